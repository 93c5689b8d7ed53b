"""Strictness for the whole suite: 8 virtual CPU devices, strict dtype promotion, warnings as errors."""

import gc
import os
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # now: a command that a test calls would start another number of them
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "allow")
jax.config.update("jax_traceback_in_locations_limit", 1)  # of each operation traced: more is only for debugging
# Tracing makes millions of objects that nothing else holds: looking for circles among them took a tenth of the time.
gc.freeze()
gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def hangup():
    """SIGHUP as a terminal's programs have it, also where the suite runs under `nohup`, which ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


NO_MESH = jax.sharding.get_mesh()


def _forget_mesh():
    if jax.sharding.get_mesh() != NO_MESH:
        jax.set_mesh(NO_MESH)


@pytest.fixture(autouse=True)
def _no_mesh_left_behind():
    """What sets the mesh (as `init` does), a test or a fixture of its module, does not set it for the next test."""
    _forget_mesh()
    yield
    _forget_mesh()
