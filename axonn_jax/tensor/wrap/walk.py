"""The layers of a Flax NNX model, by path, in the order they were defined."""

from collections.abc import Iterator
from typing import Any

from flax import nnx

from axonn_jax.tensor.wrap.layers import SHARDED


def modules(model: nnx.Module) -> dict[str, nnx.Module]:
    """Every module in the model by dotted path, each once, attributes in the order they were first set.

    A model that was merged from its parts has forgotten that order (Flax sorts them by name).
    """
    found: dict[str, nnx.Module] = {}
    seen: set[int] = set()
    for path, module in _walk(model, ()):
        if id(module) not in seen:
            seen.add(id(module))
            found[".".join(path)] = module
    return found


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], nnx.Module]]:
    if isinstance(value, nnx.Module):
        yield path, value
        inside = {name: child for name, child in vars(value).items() if not name.startswith("_pytree__")}
    elif isinstance(value, dict):
        inside = {str(name): child for name, child in value.items()}
    elif isinstance(value, list | tuple):
        inside = {str(index): child for index, child in enumerate(value)}
    else:
        return
    for name, child in inside.items():
        yield from _walk(child, (*path, name))


def has_sharded_form(module: nnx.Module) -> bool:
    """Whether the layer's type is one of those that can be split."""
    return type(module) in SHARDED


def own_variables(module: nnx.Module) -> dict[str, nnx.Variable[Any]]:
    """The variables a module holds itself, not through another module; those of random streams left out."""
    values = vars(module).items()
    return {n: v for n, v in values if isinstance(v, nnx.Variable) and not isinstance(v, nnx.RngState)}
