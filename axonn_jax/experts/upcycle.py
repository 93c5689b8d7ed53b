"""Upcycling: the feed-forward layers of a dense model as the experts of a mixture (Komatsuzaki et al., ICLR 23).

Every expert begins as a copy, so a router whose weights add up to 1 changes nothing at first, whatever it chooses.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.experts.shape import ExpertShape, MoeConfig

_EXPERTS, _ROUTER = ".mlp.experts.", ".mlp.router."
Arrays = dict[str, jax.Array]


def dense_sources(wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return, for each wanted kernel of experts, the stored dense kernel to copy, by name; both have shapes."""
    pairs = {name: name.replace(_EXPERTS, ".mlp.") for name in wanted if _EXPERTS in name and name not in stored}
    return {name: dense for name, dense in pairs.items() if stored.get(dense) == tuple(wanted[name][1:])}


def biases_left_over(sources: Mapping[str, str], stored: Iterable[str]) -> list[str]:
    """Return the biases of the dense layers in `sources`: experts have none."""
    layers = {dense.rpartition(".mlp.")[0] for dense in sources.values()}
    return sorted(name for name in stored if name.endswith(".bias") and name.rpartition(".mlp.")[0] in layers)


def other_function(shape: ExpertShape, moe: MoeConfig) -> str:
    """Return the setting by which a mixture of equal experts is another function than the dense layer, or an empty
    text."""
    if not shape.norm and (shape.router == "sigmoid" or shape.per_token < shape.experts):
        return "model.router_norm = false"
    if shape.scale != 1.0:
        return f"model.router_scale = {shape.scale:g}"
    return f"moe.dispatch = {moe.dispatch}" if moe.drops else ""


def is_of_router(name: str) -> bool:
    """Return True if a parameter is a router's, which a dense model has none of."""
    return _ROUTER in name


def upcycled(read: Callable[[Any], Arrays], sources: Mapping[str, str]) -> Callable[[Mapping[str, Any]], Arrays]:
    """Return a function that reads arrays by `read`, experts as copies of the dense kernels in `sources`.

    Each device reads only its own part of the dense kernel; no collectives.
    """

    def run(abstract: Mapping[str, Any]) -> Arrays:
        copies = {name: want for name, want in abstract.items() if name in sources}
        dense = {sources[name]: _of_one(want) for name, want in copies.items()}
        values = read({name: want for name, want in abstract.items() if name not in copies} | dense)
        for name, want in copies.items():
            spread = jax.jit(partial(_repeated, count=want.shape[0]), out_shardings=want.sharding)
            values[name] = spread(values.pop(sources[name]))
        return {name: values[name] for name in abstract}

    return run


def _repeated(kernel: jax.Array, count: int) -> jax.Array:
    return jnp.broadcast_to(kernel, (count, *kernel.shape))


def _of_one(want: Any) -> jax.ShapeDtypeStruct:
    """The shape and layout of one expert's part."""
    held = want.sharding
    sharding = NamedSharding(held.mesh, P(*held.spec[1:]), memory_kind=held.memory_kind)
    return jax.ShapeDtypeStruct(want.shape[1:], want.dtype, sharding=sharding)
