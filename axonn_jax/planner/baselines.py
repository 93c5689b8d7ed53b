"""What else one could run, by the same model: Megatron-style static pipelines, one-dimensional tensor parallelism."""

from dataclasses import replace

from axonn_jax.planner.job import Estimate, Job
from axonn_jax.planner.search import search
from axonn_jax.planner.space import Space
from axonn_jax.planner.tasks import Switches

NOTHING = Switches(gathers=False, scatters=False, gradients=False, forward=False)


def megatron(job: Job, devices: int, limit: float, space: Space | None = None) -> Estimate:
    """The best of pipe x data x y, `y` inside a node, fixed interleaved order, no overlap inside a stage.

    Raises:
        UserError: none fits.
    """
    chosen = space or Space()
    only = replace(chosen, axes={**chosen.axes, "z": 1, "x": 1}, near=("y",))
    static = replace(job, switches=NOTHING, policy="interleaved", split=False)
    return search(static, devices, only, limit).best[0]


def tensor_1d(job: Job, devices: int, limit: float, space: Space | None = None) -> Estimate:
    """The best of data x y without pipeline: Megatron's column-row pairs alone, without overlap.

    Of a space its axes do not count.

    Raises:
        UserError: none fits.
    """
    only = replace(space or Space(), axes={"pipe": 1, "z": 1, "x": 1}, virtual_stages=(1,))
    return search(replace(job, switches=NOTHING), devices, only, limit).best[0]
