"""The only place for version-dependent JAX names (jax 0.10.2 up)."""

import jax


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which `x` varies inside a manual region; empty outside one."""
    aval = jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):  # jax 0.10.2 and later
        return frozenset(aval.manual_axis_type.varying)
    return frozenset(getattr(aval, "vma", ()))


def context_mesh() -> jax.sharding.Mesh | None:
    """The concrete mesh set by `jax.set_mesh`, or None inside a trace or without one."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh
