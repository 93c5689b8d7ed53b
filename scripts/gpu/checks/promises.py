"""What is promised on any device: the Trainer learns and updates in place, messages leave from its memory."""

import ctypes
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import axonn_jax
from axonn_jax.models import ModelShape, Transformer
from axonn_jax.pipe.channels.buffers import DeviceBuffers, DeviceBytes, takes_device_memory
from checks.report import Row

_STEPS = 5


def trainer(shape: ModelShape) -> Row:
    """Steps on one batch, in the precision a user gets by default; the old parameters' memory must be the new's."""
    grid = axonn_jax.init()
    model = Transformer(shape, rngs=nnx.Rngs(0))
    train = axonn_jax.Trainer(model, optax.adamw(1e-3), grid, microbatches=2, clip=1.0)
    batch = np.random.default_rng(3).integers(0, shape.vocab, (4, shape.seq_len + 1), dtype=np.int32)
    state = jax.tree.leaves(train.engine.train_state)
    state_bytes = sum(leaf.nbytes for leaf in state)
    aliased = getattr(train.engine.compiled_step(batch).memory_analysis(), "alias_size_in_bytes", None)
    losses = [float(train.step(batch)["loss"])]
    kept = sum(not leaf.is_deleted() for leaf in state)
    losses += [float(train.step(batch)["loss"]) for _ in range(_STEPS - 1)]

    share = None if aliased is None else aliased / state_bytes
    learns = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    # Padding may make the alias a little larger; a parameter that is not reused makes it smaller.
    donated = kept == 0 and (share is None or share >= 0.999)
    note = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {len(state) - kept} of {len(state)} buffers donated"
    note += "" if share is None else f", {100 * share:.1f} % of the state updated in place"
    figures = {"losses": losses, "buffers": len(state), "kept": kept, "aliased_share": share}
    return Row("parity", "Trainer, 5 steps, donation", "ok" if learns and donated else "failed", note, figures)


def messages() -> Row:
    """A bf16 message from one buffer in device memory into another: by MPI to itself, else by the driver's copy."""
    device = jax.devices()[0]
    mesh = jax.sharding.Mesh(np.asarray([device]), ("x",))
    form = jax.ShapeDtypeStruct((256, 257), jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P()))
    buffers = DeviceBuffers([form], [device])
    value = jax.random.normal(jax.random.key(5), form.shape, form.dtype).block_until_ready()
    sent, target = buffers.outgoing(value), buffers.incoming(form, device)
    target.array.block_until_ready()
    buffers.enter()
    carrier = _carry(sent, target, device)
    same = np.asarray(buffers.array(target, form, device)).tobytes() == np.asarray(value).tobytes()
    wide = jnp.ones(8)  # of a dtype that the array's own interface knows
    own = getattr(wide, "__cuda_array_interface__", None)  # none on CPU devices
    placed = own is None or own["data"][0] == buffers.outgoing(wide).__cuda_array_interface__["data"][0]
    note = f"{value.nbytes:,} bytes carried by {carrier}" if same and placed else f"wrong bytes by {carrier}"
    figures = {"bytes": value.nbytes, "carrier": carrier, "same": same, "placed": placed}
    return Row("parity", "messages in device memory", "ok" if same and placed else "failed", note, figures)


def _carry(sent: DeviceBytes, target: DeviceBytes, device: jax.Device) -> str:
    """Moves the bytes from one buffer to the other; returns what moved them."""
    if device.platform != "cpu" and importlib.util.find_spec("mpi4py") is not None:
        from mpi4py import MPI

        if takes_device_memory([device], MPI.__file__):
            request = MPI.COMM_SELF.Irecv([target, MPI.BYTE], 0)
            MPI.COMM_SELF.Send([sent, MPI.BYTE], 0)
            request.Wait()
            return "MPI"
    (to, _), (source, _) = (buffer.__cuda_array_interface__["data"] for buffer in (target, sent))
    count = sent.array.nbytes
    if device.platform == "cpu":
        ctypes.memmove(to, source, count)
    else:
        cuda = ctypes.CDLL("libcuda.so.1")
        failed = cuda.cuMemcpyDtoD_v2(ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(count))
        failed = failed or cuda.cuCtxSynchronize()
        if failed:
            raise RuntimeError(f"CUDA error {failed}")
    return "a copy: no MPI that takes it"
