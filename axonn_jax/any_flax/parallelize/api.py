"""Parallelization of Flax NNX models: layers become 4D-sharded, everything else stays unchanged."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from inspect import isfunction
from types import MappingProxyType
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.any_flax.parallelize.convolution import ByRows, by_rows
from axonn_jax.any_flax.parallelize.kinds import base_of, describe, overrides_call, wraps
from axonn_jax.any_flax.parallelize.layers import sharded
from axonn_jax.any_flax.parallelize.layouts import PLAN, LayerPlan, Stored, further_layouts, gather_param
from axonn_jax.any_flax.parallelize.propagate import plan_of, plans_by_flow, plans_by_order
from axonn_jax.core.errors import UserError, first_line, nearest, typed_arguments
from axonn_jax.core.grid import Grid, without_mesh
from axonn_jax.core.tensor.params import copied

Model = TypeVar("Model", bound=nnx.Module)

_OVERRIDES = ("x", "y", "replicated")


@typed_arguments
def parallelize(
    model: Model | Callable[[], Model],
    grid: Grid,
    *,
    call: Callable[[Model], Any] | None = None,
    overrides: Mapping[str, str] | None = None,
) -> Model:
    """Return a copy of a Flax NNX model whose layers run 4D-sharded, with its parameters laid out on the grid.

    The model keeps its type, attributes, parameter names and results, and works with `nnx.jit`, `nnx.value_and_grad`,
    `nnx.Optimizer`, `nnx.split` and train/eval modes. Linear, LinearGeneral, Einsum, Conv, ConvTranspose, Embed,
    LayerNorm and RMSNorm (standalone, or inside MultiHeadAttention and your own modules) are split over the grid's axes
    with explicit collectives, as are derived types that call `super().__call__`, and stacks made by `nnx.vmap`. Other
    modules stay unchanged; their parameters are spread over the devices, and the compiler gathers them.
    `sharding_report` lists every layer with reasons and bytes. Only moving parameters to their devices communicates.

    Args:
        model: The model, or a function that builds it. With a function, each device creates only its part of every
            parameter, and no device ever holds a full one; the function must create its `nnx.Rngs` as well.
        grid: The grid of devices, without a pipeline; with a single device the model itself is returned.
        call: A call of the model, such as ``lambda m: m(tokens)``, traced but not run, to learn the order of the
            layers. By default the roles of `x` and `y` alternate in the order in which the layers were defined.
        overrides: Map from path patterns (``"decoder.*.out"``) to "replicated", or to the axis to contract over, "x" or
            "y" (for an embedding or a norm: the axis of its features); the last matching pattern wins.

    Raises:
        UserError: The model is not an NNX module, the grid has a pipeline, an override matches nothing, or the code
            between layers has a grouped `jax.lax` convolution whose gradient XLA computes wrong (detected only with
            `call`).
    """
    source: Any = model
    if grid.shape.pipe > 1:
        accepted = "1 for parallelize; in a pipeline ax.Trainer(model, ..., loss=loss) splits the layers of its stages"
        raise UserError("grid.pipe", grid.shape.pipe, accepted)
    if not (isfunction(source) or isinstance(source, partial)):
        return parallelized_on(grid.mesh, source, call, overrides or {})
    with without_mesh():  # sharding annotations in the model name the author's mesh axes, not the grid's
        abstract: Any = nnx.eval_shape(source)
    split: Any = parallelized_on(grid.mesh, abstract, call, overrides or {})
    return source() if split is abstract else nnx.merge(nnx.graphdef(split), birth(source, split)())


def birth(make: Callable[[], nnx.Module], split: nnx.Module) -> Any:
    """Return a jitted function that creates a model's state, with each array in the layout it has in `split`."""
    layouts = jax.tree.map(lambda leaf: leaf.sharding, nnx.state(split))
    return jax.jit(lambda: nnx.state(make()), out_shardings=layouts)


def parallelized_on(
    mesh: Mesh,
    model: Model,
    call: Callable[[Model], Any] | None = None,
    overrides: Mapping[str, str] = MappingProxyType({}),
) -> Model:
    """Return a copy of a model, whose arrays may be abstract, with its layers split over a mesh; see `parallelize`."""
    _check(model)
    if mesh.size == 1:
        return model
    members = modules(model)
    layers = {path: module for path, module in members.items() if base_of(type(module)) is not None}
    layer_overrides = choose_overrides(overrides, layers)
    traced: dict[str, LayerPlan] = {}
    if call is not None:
        # Trace a clone: tracing replaces the types of its layers by probes.
        probe = nnx.clone(model)
        by_rows((m for m in modules(probe).values() if isinstance(describe(m), str) or not wraps(type(m))), mesh)
        traced = plans_by_flow(mesh, probe, _same(probe, layers), layer_overrides, partial(_called, call))
    # Without a trace only the source code tells whether a derived type's `__call__` reaches Flax's.
    overridden = {
        path: LayerPlan(type(layer).__name__, mesh, False, note=_STRANGE.format(type(layer).__name__))
        for path, layer in layers.items()
        if overrides_call(type(layer)) and not (wraps(type(layer)) if call is None else path in traced)
    }
    plans = plans_by_order(mesh, layers.items(), layer_overrides, traced | overridden)
    if call is not None:
        plans |= {path: replace(plan, calls=()) for path, plan in plans.items() if path not in traced}
    for path, module in members.items():
        if path not in plans and direct_variables(module):
            plans[path] = plan_of(mesh, module, None, None)
    return _apply(model, _spread(plans, members, layer_overrides, mesh), mesh)


def _called(call: Callable[[Model], Any], model: Model) -> Any:
    try:
        return call(model)
    except UserError:
        raise
    except (TypeError, ValueError, LookupError) as error:
        accepted = f"a call of the model, as lambda m: m(tokens); this one raises {first_line(error)}"
        raise UserError("call", getattr(call, "__name__", type(call).__name__), accepted) from error


_STRANGE = "a {} has a __call__ of its own, which does not come to that of the layer it is derived from"


def _spread(
    plans: Mapping[str, LayerPlan], members: Mapping[str, nnx.Module], overrides: Mapping[str, str], mesh: Mesh
) -> dict[str, LayerPlan]:
    """Return the plans with storage layouts that also split the parameters a layer computes with unsplit.

    Small parameters stay replicated.
    """
    params = {}
    for path, plan in plans.items():
        for name, variable in direct_variables(members[path]).items():
            if isinstance(variable, nnx.Param):
                value, free = variable.get_raw_value(), overrides.get(path) != "replicated"
                size = value.size * value.dtype.itemsize
                params[path, name] = Stored(value.shape, size, plan.used(name), len(plan.stack), free)
    split: dict[str, list[tuple[str, P]]] = {path: [] for path in plans}
    for (path, name), spec in further_layouts(params, mesh).items():
        split[path].append((name, spec))
    return {path: replace(plan, spread=tuple(split[path])) for path, plan in plans.items()}


def _check(model: Any) -> None:
    if not isinstance(model, nnx.Module):
        names = {f"{kind.__module__}.{kind.__name__}" for kind in type(model).__mro__}
        if "flax.linen.module.Module" in names:
            call = "ax.parallelize_linen(loss, params, grid, batch)"
            raise UserError(
                "model", type(model).__name__, f"a flax.nnx.Module; a Linen model is parallelized by {call}"
            )
        raise UserError("model", type(model).__name__, "an instance of a flax.nnx.Module")
    if any(hasattr(module, PLAN) for module in modules(model).values()):
        raise UserError("model", type(model).__name__, "a model that is not parallelized already")


def choose_overrides(patterns: Mapping[str, str], layers: Mapping[str, Any]) -> dict[str, str]:
    """Resolve patterns to the override of each layer that has one, by path.

    Args:
        patterns: Map from path patterns to overrides; the last matching pattern wins.
        layers: Layers that can be split, by path.

    Raises:
        UserError: A value is not a known override, or a pattern matches no layer.
    """
    resolved = {}
    for pattern, value in patterns.items():
        field = f"overrides[{pattern!r}]"
        if value not in _OVERRIDES:
            raise UserError(field, value, f"one of {', '.join(map(repr, _OVERRIDES))}{nearest(str(value), _OVERRIDES)}")
        matching = [path for path in layers if fnmatchcase(path, pattern)]
        if not matching:
            close = nearest(pattern, layers)
            raise UserError(field, value, f"a pattern that matches the path of some layer that can be split{close}")
        resolved.update(dict.fromkeys(matching, value))
    return resolved


def _same(model: nnx.Module, paths: Mapping[str, Any]) -> dict[str, nnx.Module]:
    members = modules(model)
    return {path: members[path] for path in paths}


def _apply(model: Model, plans: Mapping[str, LayerPlan], mesh: Mesh) -> Model:
    """Return a copy of the model with sharded layer types and every variable laid out on the mesh."""
    copy = nnx.clone(model)
    layouts: dict[int, P] = {}
    for path, module in _same(copy, plans).items():
        plan = plans[path]
        setattr(module, PLAN, plan)
        for name, variable in direct_variables(module).items():
            # A variable shared by several layers takes the layout of the first.
            layouts.setdefault(id(variable), plan.stored_spec(name))
        if plan.sharded:
            module.__class__ = sharded(type(module))
        else:
            by_rows([module], mesh)
    entries = []
    for keys, variable in nnx.to_flat_state(nnx.state(copy)):
        sharding = NamedSharding(mesh, layouts.get(id(variable), P()))
        if isinstance(variable, nnx.Variable):
            value = jax.tree.map(lambda array: put(array, sharding), variable.get_raw_value())  # noqa: B023
            entries.append((keys, variable.replace(value)))
        else:  # an array that is an attribute, such as a convolution's mask
            entries.append((keys, put(variable, sharding)))
    state: nnx.State[Any, Any] = nnx.from_flat_state(entries)
    nnx.update(copy, state)
    return copy


def with_row_axes(model: nnx.Module, axes: tuple[str, ...]) -> None:
    """Set the axes that split rows in every layer of a parallelized model, and leave recomputation to the program.

    A program that maps over replicas itself (``jax.vmap`` with ``spmd_axis_name="data"``) calls the model with one
    replica's rows, which are split over ``("z",)``; jax then splits the manual regions of all layers over `data`.

    Args:
        model: The parallelized model, changed in place; its parameters do not move.
        axes: The axes, slowest first.
    """
    for module in modules(model).values():
        plan, convolve = getattr(module, PLAN, None), getattr(module, "conv_general_dilated", None)
        if plan is not None:
            setattr(module, PLAN, replace(plan, row_axes=axes, regathers=False))
        if isinstance(convolve, ByRows):
            module.conv_general_dilated = replace(convolve, row_axes=axes)  # type: ignore[attr-defined]


def as_flax(model: nnx.Module) -> None:
    """Restore the original layer types of a parallelized model, so that XLA partitions their computation.

    Args:
        model: The parallelized model, changed in place; its parameters do not move.
    """
    for module in modules(model).values():
        plan, convolve = getattr(module, PLAN, None), getattr(module, "conv_general_dilated", None)
        if plan is not None and plan.sharded:
            module.__class__ = type(module).__bases__[0]  # the type that `sharded` derived it from
        if isinstance(convolve, ByRows):
            module.conv_general_dilated = convolve.convolve  # type: ignore[attr-defined]


def gather_spread(model: nnx.Module) -> None:
    """Gather a parallelized model's spread parameters to the layouts they compute in (`layouts.gather_param`).

    Args:
        model: The model, changed in place; call this inside a traced function, before the model runs.
    """
    for module in modules(model).values():
        plan: LayerPlan | None = getattr(module, PLAN, None)
        for name, _ in () if plan is None else plan.spread:
            variable = direct_variables(module)[name]
            variable.set_raw_value(gather_param(variable.get_raw_value(), plan.mesh, plan.used(name)))  # type: ignore[union-attr]


def put(value: Any, sharding: NamedSharding) -> Any:
    """Copy a value into new memory in a layout, so that donating the copy leaves the original intact."""
    if isinstance(value, jax.ShapeDtypeStruct):  # from nnx.eval_shape: there is no data to copy
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    return copied(value, sharding)


def modules(model: nnx.Module) -> dict[str, nnx.Module]:
    """Return every distinct module in the model by dotted path, with attributes in the order they were first set."""
    members: dict[str, nnx.Module] = {}
    seen: set[int] = set()
    for path, module in _walk(model, ()):
        if id(module) not in seen:
            seen.add(id(module))
            members[".".join(path)] = module
    return members


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


def direct_variables(module: nnx.Module) -> dict[str, nnx.Variable[Any]]:
    """Return a module's direct variables, without those of its submodules and of random streams."""
    values = vars(module).items()
    return {n: v for n, v in values if isinstance(v, nnx.Variable) and not isinstance(v, nnx.RngState)}
