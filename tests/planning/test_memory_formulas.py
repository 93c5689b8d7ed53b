"""Memory by formula against the published tables, tensor by tensor."""

import jax
import pytest

from axonn_jax.core.engines.optimizer import OPTIMIZERS, averaging, make_optimizer
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.models.presets import preset
from axonn_jax.core.ops.language import Param
from axonn_jax.core.settings import TrainConfig
from axonn_jax.planning import memory
from axonn_jax.planning.block_memory import block_activations

PHI = 1e9


def test_axonn_state_is_twenty_bytes_or_four():
    """IPDPS 22, which has all gradients once more in float32 where nothing is offloaded."""
    state = memory.device_state(PHI, "fp16", gradient_item=2, separate_masters=True).total
    assert state + 4 * PHI == 20 * PHI
    assert memory.device_state(PHI, "fp16", gradient_item=2, offload=True).total == 4 * PHI


def test_state_by_precision_and_place():
    separate_masters = memory.device_state(PHI, "bf16", gradient_item=2, separate_masters=True)
    assert (
        separate_masters.weights,
        separate_masters.gradients,
        separate_masters.master,
        separate_masters.moments,
    ) == (2 * PHI, 2 * PHI, 4 * PHI, 8 * PHI)
    assert memory.device_state(PHI, "fp16", gradient_item=4, separate_masters=True).total == 18 * PHI
    for precision in ("fp32", "bf16", "fp16"):  # a half-precision run casts its float32 weights where it uses them
        single = memory.device_state(PHI, precision)
        assert (single.weights, single.gradients, single.master, single.moments) == (4 * PHI, 4 * PHI, 0, 8 * PHI)
    away = memory.device_state(PHI, "bf16", gradient_item=4, offload=True)
    assert (away.weights, away.gradients, away.master, away.moments) == (2 * PHI, 4 * PHI, 0, 0)
    assert memory.host_state(PHI, "bf16") == 12 * PHI
    assert memory.host_state(PHI, "fp32") == 8 * PHI
    assert memory.streamed_state(1e6, "bf16") == 36e6


def test_zero_shares_optimizer_state_only():
    alone = memory.device_state(PHI, "bf16", separate_masters=True)
    shared = memory.device_state(PHI, "bf16", replicas=8)
    assert (shared.weights, shared.gradients) == (alone.weights, alone.gradients)
    assert (shared.master, shared.moments) == (alone.master / 8, alone.moments / 8)
    assert memory.host_state(PHI, "bf16", replicas=8) == 12 * PHI / 8


def test_a_split_sequence_divides_what_is_kept_of_the_stream():
    """One device of four along `y`: under `none` inputs of norms and normalised streams, else a block's input."""
    shape = preset("gpt-5b")

    def block(policy, split):
        return block_activations(shape, 1, 4, 2, policy, comm=BlockComm(sequence_split=split))

    assert block("none", False).saved - block("none", True).saved == 2 * (4 * shape.hidden - 4 * shape.hidden / 4)
    assert block("full", True).saved == block("full", False).saved / 4 == 2 * shape.hidden / 4
    assert block("save_collectives", True).saved == block("save_collectives", False).saved / 4
    assert block("full", True).working < block("full", False).working


def test_activation_policies_keep_less_and_less():
    shape = preset("gpt-5b")
    kept = [block_activations(shape, 1, 1, 2, policy).saved for policy in ("none", "dots", "full", "offload")]
    assert kept == sorted(kept, reverse=True)
    assert kept[2] == 2 * shape.hidden
    assert kept[3] == 0
    assert block_activations(shape, 1, 1, 2, "offload").host == 2 * shape.hidden
    # hidden: two inputs of norms, two normalised, QKV 3, attention 1, MLP 4 + 4; float32 statistics of the softmax.
    assert kept[0] == 2 * 16 * shape.hidden + 4 * shape.heads
    scores = block_activations(shape, 1, 1, 2, "none", "xla").saved
    assert scores == 2 * (16 * shape.hidden + 2 * shape.heads * shape.seq_len)


def test_axes_split_what_they_shard():
    shape = preset("llama2-7b")
    whole, over_x, over_y = (block_activations(shape, x, y, 2, "none").saved for x, y in ((1, 1), (2, 1), (1, 2)))
    stream = 4 * shape.hidden * 2
    assert whole - over_x == pytest.approx(stream / 2)
    assert whole - over_y == pytest.approx((whole - stream) / 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_state_is_what_optax_keeps(name):
    """But for counts of steps and Adafactor's placeholders, of 4 bytes a parameter; beside it an average of all."""
    shapes = {
        "blocks.mlp.up.kernel": (256, 512), "blocks.attn.o.kernel": (64, 640), "embedding.table": (300, 256),
        "blocks.norm.scale": (256,), "blocks.experts.up.kernel": (4, 128, 256), "blocks.experts.odd": (200, 16, 150),
    }  # fmt: skip
    params = {key: jax.ShapeDtypeStruct(shape, "float32") for key, shape in shapes.items()}
    optimizer = make_optimizer(TrainConfig(optimizer=name))
    kept, averaged = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(one.init, params)))
        for one in (optimizer, averaging(optimizer, 0.9))
    )
    counted = sum(memory.state_item(name, Param(key, shape)) * params[key].size for key, shape in shapes.items())
    assert kept == pytest.approx(counted, abs=64)
    assert averaged - kept == sum(memory.AVERAGE * one.size for one in params.values())
