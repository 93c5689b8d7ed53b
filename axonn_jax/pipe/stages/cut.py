"""Cut of a model into the stages of a pipeline, by its declared costs or as the user says; without jax."""

from collections.abc import Sequence

from axonn_jax.core.errors import UserError
from axonn_jax.core.models.declared.segments import Segment
from axonn_jax.core.settings import PipelineConfig
from axonn_jax.pipe.schedule.partition import SegmentCost, explicit, partition
from axonn_jax.pipe.schedule.policies import policy_of
from axonn_jax.pipe.schedule.tasks import PipelineShape


def check_pipeline(
    pipe: int, microbatches: int, pipeline: PipelineConfig, segments: Sequence[Segment]
) -> tuple[PipelineShape, list[range]]:
    """Return the pipeline's sizes and the segments of every virtual stage.

    Raises:
        UserError: the policy cannot run so, or the model does not split so.
    """
    shape = PipelineShape(pipe, microbatches, pipeline.virtual_stages)
    policy_of(pipeline.policy).check(shape)
    costs = [SegmentCost(segment.name, segment.flops, 2 * segment.flops, segment.params) for segment in segments]
    return shape, ranges_of(shape, pipeline.split, costs)


def ranges_of(shape: PipelineShape, split: str, costs: Sequence[SegmentCost]) -> list[range]:
    """Return the segments of every virtual stage: balanced by cost, or as the user says.

    Args:
        shape: Sizes of the pipeline.
        split: The user's numbers of segments, with commas; empty for none.
        costs: Costs of the segments.

    Raises:
        UserError: The segments do not split so.
    """
    if not split:
        return partition(costs, shape.pipe, shape.virtual_stages)
    words = split.split(",")
    if not all(word.strip().isdecimal() and len(word) < 10 for word in words):
        raise UserError("pipeline.split", split, 'numbers of segments with commas, such as "9,8"')
    return explicit([int(word) for word in words], len(costs), shape.stages)
