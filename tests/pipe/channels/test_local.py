"""The channel between device slices of one process."""

import queue
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axonn_jax.core.distributed.shards import empty_bytes, from_bytes, host_bytes, local_shards, rebuild
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GridShape, build_grid
from axonn_jax.pipe.channels.base import ChannelClosed, Ports
from axonn_jax.pipe.channels.choice import open_channel
from axonn_jax.pipe.channels.tags import Tags
from axonn_jax.pipe.schedule.tasks import Message

SPECS = [(("data", "z"), None, "x"), ("z", "y"), (), (("data", "z", "y", "x"),), (None, None, ("x", "y"))]


@pytest.fixture(params=[(1, 2, 1, 2), (2, 1, 2, 1), (1, 4, 1, 1)], ids=["z2x2", "data2y2", "z4"])
def meshes(request):
    """The two stages' meshes, of four devices each."""
    data, z, y, x = request.param
    devices = jax.devices()
    return [build_grid(GridShape(1, data, z, y, x), devices[i : i + 4]).mesh for i in (0, 4)]


def opened(meshes, spec, dtype, shape=(8, 4, 16)):
    forms = {
        stage: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for stage, mesh in enumerate(meshes)
    }
    channel, arrived = open_channel("local", Ports(forms, len(meshes))), queue.SimpleQueue()
    channel.start(lambda message, value: arrived.put((message, value)), arrived.put)
    return channel, forms, arrived


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_layout_arrives_unchanged_on_the_other_mesh(meshes, spec, dtype):
    channel, forms, arrived = opened(meshes, spec, dtype)
    host = np.random.default_rng(0).standard_normal((8, 4, 16), np.float32).astype(dtype)
    for message in (Message("forward", 1, 3), Message("backward", 0, 2)):
        with jax.set_mesh(meshes[0]):
            channel.send(message, jax.device_put(host, forms[1 - message.stage].sharding))
        got, value = arrived.get_nowait()
        assert got == message
        assert value.sharding == forms[message.stage].sharding
        np.testing.assert_array_equal(np.asarray(value), host)
        assert len(value.addressable_shards) == 4
        for shard in value.addressable_shards:
            assert np.asarray(shard.data).tobytes() == host[shard.index].tobytes()
    channel.flush(0)
    assert channel.unsent() == []
    assert channel.close()


def test_sending_does_not_wait_for_the_value(meshes):
    """The array is delivered while it is still in computation."""
    channel, forms, arrived = opened(meshes, (), jnp.float32, (700, 700))
    slow = jax.jit(lambda w: jax.lax.fori_loop(0, 80, lambda i, x: x @ w / 700, w))
    w = jax.device_put(np.ones((700, 700), np.float32), forms[0].sharding)
    slow(w).block_until_ready()
    channel.send(Message("forward", 1, 0), slow(w))
    _, value = arrived.get_nowait()
    assert not value.is_ready()
    np.testing.assert_allclose(np.asarray(value), 1, rtol=1e-5)


def test_misuse_is_refused(meshes):
    channel, forms, arrived = opened(meshes, (), jnp.float32)
    value = jax.device_put(np.zeros((8, 4, 16), np.float32), forms[0].sharding)
    with pytest.raises(ValueError, match=r"float32\(8, 4, 16\) is expected"):
        channel.send(Message("forward", 1, 0), value[:4])
    with pytest.raises(KeyError, match=r"stage 7, microbatch 0: this process receives for stages \[0, 1\]"):
        channel.send(Message("forward", 7, 0), value)
    with pytest.raises(ChannelClosed):
        channel.start(arrived.put, arrived.put)
    channel.close()
    with pytest.raises(ChannelClosed, match="forward message for stage 1"):
        channel.send(Message("forward", 1, 0), value)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_shards_go_through_bytes_and_back_without_a_copy(meshes, dtype):
    here = NamedSharding(meshes[0], PartitionSpec(("data", "z"), None, "x"))
    form = jax.ShapeDtypeStruct((8, 4, 16), dtype, sharding=NamedSharding(meshes[1], here.spec))
    host = np.arange(512).reshape(8, 4, 16).astype(dtype)
    shards = []
    for shard, device in zip(local_shards(jax.device_put(host, here)), meshes[1].devices.flat, strict=True):
        sent = host_bytes(shard)
        received = empty_bytes(sent.size)
        received[:] = sent
        shards.append(from_bytes(received, form, device))
        assert sent.ctypes.data == shard.unsafe_buffer_pointer()
        assert received.ctypes.data == shards[-1].unsafe_buffer_pointer()
    np.testing.assert_array_equal(np.asarray(rebuild(form, shards)), host)


def test_tags_tell_messages_apart_and_end_with_an_error():
    tags = Tags(stages=6, shards=4, largest=32767)
    seen = {}
    for microbatch in range(3):
        for stage in range(6):
            for shard in range(4):
                tag = tags.of(Message("forward", stage, microbatch), shard)
                assert tags.read(tag) == (stage, microbatch, shard)
                assert seen.setdefault(tag, (stage, microbatch, shard)) == (stage, microbatch, shard)
    assert len(seen) == 72
    last = tags.microbatches - 1
    assert tags.of(Message("forward", 5, last), 3) <= 32767
    with pytest.raises(UserError, match=r"train.microbatches = .*at most 1365: .*32767 \(MPI_TAG_UB\)"):
        tags.of(Message("forward", 0, last + 1))


def test_local_needs_no_mpi_package():
    code = (
        "import sys; sys.modules['mpi4py'] = sys.modules['mpi4jax'] = None\n"
        "import jax\n"
        "from axonn_jax.pipe.channels.base import Ports\n"
        "from axonn_jax.pipe.channels.choice import choose, open_channel\n"
        "assert choose('auto', 1) == 'local'\n"
        "channel = open_channel('local', Ports({}, 1)); channel.start(print, print); assert channel.close()\n"
        "import axonn_jax.pipe.channels.mpi4py, axonn_jax.pipe.channels.mpi4jax\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
