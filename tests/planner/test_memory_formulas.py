"""Memory by formula against the published tables, tensor by tensor."""

import pytest
from published_memory import axonn_state, samo_state, ted_state

from axonn_jax.models.block_comm import BlockComm
from axonn_jax.models.presets import preset
from axonn_jax.planner import memory
from axonn_jax.planner.block_memory import block_activations

PHI = 1e9


def test_axonn_state_is_twenty_bytes_or_four_and_the_buffers():
    assert axonn_state(PHI) == 20 * PHI
    assert axonn_state(PHI, offload=True) == 4 * PHI + 16 * 16_000_000
    assert axonn_state(PHI, offload=True, bucket=4_000_000) == 4 * PHI + 16 * 4_000_000


def test_state_by_precision_and_place():
    apart = memory.device_state(PHI, "bf16", gradient_item=2, apart=True)
    assert (apart.weights, apart.gradients, apart.master, apart.moments) == (2 * PHI, 2 * PHI, 4 * PHI, 8 * PHI)
    assert memory.device_state(PHI, "fp16", gradient_item=4, apart=True).total == 18 * PHI
    for precision in ("fp32", "bf16", "fp16"):  # a half-precision run casts its float32 weights where it uses them
        single = memory.device_state(PHI, precision)
        assert (single.weights, single.gradients, single.master, single.moments) == (4 * PHI, 4 * PHI, 0, 8 * PHI)
    away = memory.device_state(PHI, "bf16", gradient_item=4, offload=True)
    assert (away.weights, away.gradients, away.master, away.moments) == (2 * PHI, 4 * PHI, 0, 0)
    assert memory.host_state(PHI, "bf16") == 12 * PHI
    assert memory.host_state(PHI, "fp32") == 8 * PHI
    assert memory.streamed_state(1e6, "bf16") == 36e6


def test_zero_shares_optimizer_state_only():
    alone = memory.device_state(PHI, "bf16", apart=True)
    shared = memory.device_state(PHI, "bf16", replicas=8)
    assert (shared.weights, shared.gradients) == (alone.weights, alone.gradients)
    assert (shared.master, shared.moments) == (alone.master / 8, alone.moments / 8)
    assert memory.host_state(PHI, "bf16", replicas=8) == 12 * PHI / 8


@pytest.mark.parametrize(("kept", "each"), [(0.2, 6.8), (0.1, 4.4), (0.75, 20.0)])
def test_samo(kept, each):
    """2 phi + 24 f phi; the break-even with 20 phi is at a quarter pruned."""
    found = samo_state(PHI, kept)
    assert found.total == pytest.approx(each * PHI)
    assert found.total == pytest.approx(2 * PHI + 24 * kept * PHI)


def test_samo_tensor_by_tensor():
    found = samo_state(1000.0, 0.1)
    assert (found.weights, found.gradients, found.master, found.master_gradients) == (2000, 200, 400, 400)
    assert (found.moments, found.index, found.downcast) == (800, 400, 200)


def test_samo_of_2_7_billion():
    """54 GB dense, 11.9 GB at nine tenths pruned."""
    assert axonn_state(2.7e9) == pytest.approx(54e9)
    assert samo_state(2.7e9, 0.1).total == pytest.approx(11.88e9)


@pytest.mark.parametrize(("experts", "tensor", "devices"), [(4, 2, 64), (16, 1, 32), (8, 8, 128)])
def test_ted_collapses_to_the_published_bound(experts, tensor, devices):
    found = ted_state(PHI, experts, tensor, experts, devices)
    assert found == pytest.approx(4 * PHI * (1 / tensor + (experts + 2) / devices))


def test_ted_with_fewer_expert_groups_needs_more():
    assert ted_state(PHI, 8, 2, 4, 64) > ted_state(PHI, 8, 2, 8, 64)


def test_a_split_sequence_divides_what_is_kept_of_the_stream():
    """One device of four along `y`: under `none` inputs of norms and normalised streams, else a block's input."""
    shape = preset("gpt-5b")

    def block(policy, split):
        return block_activations(shape, 1, 4, 2, policy, comm=BlockComm(sequence_split=split))

    assert block("none", False).kept - block("none", True).kept == 2 * (4 * shape.hidden - 4 * shape.hidden / 4)
    assert block("full", True).kept == block("full", False).kept / 4 == 2 * shape.hidden / 4
    assert block("save_collectives", True).kept == block("save_collectives", False).kept / 4
    assert block("full", True).working < block("full", False).working


def test_activation_policies_keep_less_and_less():
    shape = preset("gpt-5b")
    kept = [block_activations(shape, 1, 1, 2, policy).kept for policy in ("none", "dots", "full", "offload")]
    assert kept == sorted(kept, reverse=True)
    assert kept[2] == 2 * shape.hidden
    assert kept[3] == 0
    assert block_activations(shape, 1, 1, 2, "offload").host == 2 * shape.hidden
    # hidden: two inputs of norms, two normalised, QKV 3, attention 1, MLP 4 + 4; float32 statistics of the softmax.
    assert kept[0] == 2 * 16 * shape.hidden + 4 * shape.heads
    scores = block_activations(shape, 1, 1, 2, "none", "xla").kept
    assert scores == 2 * (16 * shape.hidden + 2 * shape.heads * shape.seq_len)


def test_axes_split_what_they_shard():
    shape = preset("llama2-7b")
    whole, over_x, over_y = (block_activations(shape, x, y, 2, "none").kept for x, y in ((1, 1), (2, 1), (1, 2)))
    stream = 4 * shape.hidden * 2
    assert whole - over_x == pytest.approx(stream / 2)
    assert whole - over_y == pytest.approx((whole - stream) / 2)
