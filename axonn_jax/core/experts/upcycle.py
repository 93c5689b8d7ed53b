"""Upcycling of a dense model's feed-forward layers into experts (Komatsuzaki et al., ICLR 23)."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core.experts.shape import ExpertShape, MoeConfig

# Every expert starts as a copy, so with weights that sum to 1 the router changes nothing at first, whatever it chooses.
_EXPERTS, _ROUTER = ".mlp.experts.", ".mlp.router."
Arrays = dict[str, jax.Array]


def dense_sources(
    target_shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Map each expert kernel that is not stored to the stored dense kernel to copy; both arguments map to shapes."""
    pairs = {name: name.replace(_EXPERTS, ".mlp.") for name in target_shapes if _EXPERTS in name and name not in stored}
    return {name: dense for name, dense in pairs.items() if stored.get(dense) == tuple(target_shapes[name][1:])}


def unused_biases(sources: Mapping[str, str], stored: Iterable[str]) -> list[str]:
    """Return the stored biases of the dense layers in `sources`, which experts have no place for."""
    layers = {dense.rpartition(".mlp.")[0] for dense in sources.values()}
    return sorted(name for name in stored if name.endswith(".bias") and name.rpartition(".mlp.")[0] in layers)


def other_function(shape: ExpertShape, moe: MoeConfig) -> str:
    """Return the setting that makes a mixture of equal experts differ from the dense layer, or an empty string."""
    if not shape.norm and (shape.router == "sigmoid" or shape.per_token < shape.experts):
        return "model.router_norm = false"
    if shape.scale != 1.0:
        return f"model.router_scale = {shape.scale:g}"
    return f"moe.dispatch = {moe.dispatch}" if moe.drops else ""


def is_of_router(name: str) -> bool:
    """Return True if the parameter belongs to a router, which a dense model does not have."""
    return _ROUTER in name


def upcycled(
    read: Callable[[Mapping[str, jax.ShapeDtypeStruct]], Arrays], sources: Mapping[str, str]
) -> Callable[[Mapping[str, jax.ShapeDtypeStruct]], Arrays]:
    """Wrap `read` so that expert kernels are filled with copies of the dense kernels in `sources`; no collectives."""

    def run(abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        copies = {name: want for name, want in abstract.items() if name in sources}
        # Ask for the dense kernel in the layout of one expert, so that each device reads its part alone.
        dense = {sources[name]: _expert_slice(want) for name, want in copies.items()}
        values = read({name: want for name, want in abstract.items() if name not in copies} | dense)
        for name, want in copies.items():
            spread = jax.jit(partial(_repeated, count=want.shape[0]), out_shardings=want.sharding)
            values[name] = spread(values.pop(sources[name]))
        return {name: values[name] for name in abstract}

    return run


def _repeated(kernel: jax.Array, count: int) -> jax.Array:
    return jnp.broadcast_to(kernel, (count, *kernel.shape))


def _expert_slice(want: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = want.sharding
    sliced = NamedSharding(sharding.mesh, P(*sharding.spec[1:]), memory_kind=sharding.memory_kind)
    return jax.ShapeDtypeStruct(want.shape[1:], want.dtype, sharding=sliced)
