"""An NNX module taken apart."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.tree_util import keystr, tree_flatten_with_path

from axonn_jax.errors import UserError
from axonn_jax.models.sequential import seeded
from axonn_jax.tensor.parallelize.api import as_flax, gather_spread, modules, with_row_axes
from axonn_jax.tensor.parallelize.kinds import Kernel, describe
from axonn_jax.tensor.parallelize.layouts import PLAN
from axonn_jax.tensor.params import Params
from axonn_jax.train.modules.apart import (
    REPLICAS,
    ROW_AXES,
    Apart,
    Loss,
    LossResult,
    Way,
    check_real,
    in_dtype,
    is_float,
)
from axonn_jax.train.modules.own_tree import StateTree


class Emptied(NamedTuple):
    """A Variable, or an array that is an attribute, without its value."""

    path: tuple[Any, ...]
    empty: Any
    tree: Any
    """Structure of the value."""
    names: tuple[str, ...]
    """Name of every array of the value."""


class ModuleApart(Apart):
    """An NNX module taken apart.

    Args:
        model: The module, parallelized where the mesh has several devices.
        loss: Its loss.
        wrt: Filter of the Variables that are trained.
        compute: Dtype of the computation wherever the module names none; None leaves it to the module.
        mesh: Mesh of the parameters.
    """

    def __init__(self, model: nnx.Module, loss: Loss, wrt: Any, compute: Any, mesh: Mesh):
        if any(isinstance(value, nnx.Intermediate) for _, value in nnx.iter_graph(model)):
            model = nnx.clone(model)
            nnx.pop(model, nnx.Intermediate)  # of calls before
        split: Any = nnx.split(model, nnx.RngState, ...)
        self._graph, self._streams, state = split
        chosen = nnx.filterlib.to_predicate(wrt)
        self._held, arrays, trained = list[Emptied](), dict[str, Any](), dict[str, tuple[Any, Any]]()
        frozen, self._impls = set[str](), dict[str, Any]()
        for held, values in _leaves(state):
            self._held.append(held)
            self._impls |= {n: jax.random.key_impl(v) for n, v in values.items() if _is_key(v)}
            arrays |= {name: _array(name, value) for name, value in values.items()}
            if isinstance(held.empty, nnx.Variable) and chosen(held.path, held.empty):
                for name, value in values.items():
                    check_real(name, value)
                    trained |= {name: (held.path, held.empty)} if is_float(value) else {}
            if isinstance(held.empty, nnx.Param):
                frozen |= {name for name in values if is_float(arrays[name]) and name not in trained}
        self._frozen = frozen
        """Parameters that are not trained."""
        self.streamed = bool(jax.tree.leaves(self._streams))
        self.tree = StateTree(trained)
        super().__init__(arrays, trained, loss, compute, mesh, whole_state=False)
        inside, kernels = set[int](), set[int]()
        for module in modules(model).values():
            described = describe(module)
            if _plans_dtype(module):
                inside |= {id(vars(module).get(name)) for name, _ in getattr(module, PLAN).specs}
            if isinstance(described, Kernel) and not isinstance(module, nnx.Embed):
                kernels.add(id(vars(module)[described.name]))
        paths = [(path, value) for path, value in nnx.iter_graph(model) if isinstance(value, nnx.Variable)]
        self._in_layers = {_dotted(path) for path, value in paths if id(value) in inside}
        """Parameters of split layers, which cast them by themselves, behind the reduction of their gradients."""
        named = (_dotted(path) for path, value in paths if id(value) in kernels)
        self.kernels = tuple(name for name in named if name in self.params)

    def called(  # noqa: D102
        self, params: Mapping[str, jax.Array], carried: Params, key: Any, rows: Any, training: bool, way: Way
    ) -> LossResult:
        own = {name: value.astype(self._dtype(name)) for name, value in params.items()}
        frozen = {name: carried[name].astype(self._dtype(name)) for name in self._frozen}
        drawn = key is not None and self.streamed
        streams = seeded(self._streams, key) if drawn else self._streams
        model = self._merged({**carried, **frozen, **own}, streams)
        if not training:
            model.eval()
        if way == "xla" or (way == "parts" and self.one_device_each):
            as_flax(model)
        else:
            gather_spread(model)
            if way == "parts":
                with_row_axes(model, ROW_AXES)
        for module in modules(model).values():
            each: Any = module
            if self.compute is not None and _plans_dtype(each) and each.dtype is None:
                each.dtype = self.compute
            if isinstance(each, nnx.BatchNorm):  # the statistics are those of all replicas
                each.axis_name = REPLICAS if way == "parts" else None
        before = self._values(model)
        loss, aux = self.result(self.loss, model, rows, key)
        given = {**carried, **params}
        after = {name: value for name, value in self._values(model).items() if value is not before[name]}
        return LossResult(loss, aux, {name: _as_before(name, after[name], given[name]) for name in sorted(after)})

    def restored(self, params: Mapping[str, jax.Array], carried: Params) -> nnx.Module:  # noqa: D102
        own = {name: in_dtype(value, self.dtypes[name]) for name, value in params.items()}
        return self._merged({**carried, **own}, self._streams)

    def _dtype(self, name: str) -> Any:
        return self.dtypes[name] if self.compute is None or name in self._in_layers else self.compute

    def _merged(self, values: Params, streams: Any) -> nnx.Module:
        keys = {name: jax.random.wrap_key_data(values[name], impl=impl) for name, impl in self._impls.items()}
        filled = [(held.path, _filled(held, {**values, **keys})) for held in self._held]
        return nnx.merge(self._graph, nnx.from_flat_state(filled), streams, copy=True)

    def _values(self, model: nnx.Module) -> dict[str, Any]:
        """Return a module's arrays by name, of those that it had at first."""
        state = dict(nnx.to_flat_state(nnx.state(model)))
        values = dict[str, Any]()
        for held in self._held:
            leaves, tree = jax.tree.flatten(_raw(state[held.path]))
            if tree != held.tree:
                raise UserError("model", _dotted(held.path), "state that a call leaves in the structure that it has")
            values |= dict(zip(held.names, leaves, strict=True))
        return values


def _leaves(state: Any) -> Iterator[tuple[Emptied, dict[str, Any]]]:
    """Return each Variable or array of a state, with its arrays by name."""
    for path, leaf in nnx.to_flat_state(state):
        leaves, tree = tree_flatten_with_path(_raw(leaf))
        values = {_dotted(path) + keystr(inner): value for inner, value in leaves}
        yield Emptied(path, leaf.replace(None) if isinstance(leaf, nnx.Variable) else None, tree, tuple(values)), values


def _raw(leaf: Any) -> Any:
    """Return a Variable's value as it is held, before what reading it may compute."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _filled(held: Emptied, values: Mapping[str, Any]) -> Any:
    value = jax.tree.unflatten(held.tree, [values[name] for name in held.names])
    return held.empty.replace(value) if isinstance(held.empty, nnx.Variable) else value


def _array(name: str, value: Any) -> jax.Array:
    """Return a value as an array, of a key its data; raises ``UserError`` for what is none."""
    if _is_key(value):
        return jax.random.key_data(value)
    try:
        return value if isinstance(value, jax.Array) else jnp.asarray(value)
    except TypeError as error:
        raise UserError("model", f"{name} of type {type(value).__name__}", "Variables of arrays") from error


def _as_before(name: str, value: Any, like: Any) -> jax.Array:
    """Return a value that a call has written, in the dtype that it had; raises ``UserError`` for another shape."""
    value = jax.random.key_data(value) if _is_key(value) else value
    if jnp.shape(value) != like.shape:
        accepted = f"the shape that it has, {like.shape}, after a call"
        raise UserError("model", f"{name} written with shape {jnp.shape(value)}", accepted)
    return jnp.asarray(value, like.dtype)


def _is_key(value: Any) -> bool:
    """True if a value is a typed key."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _dotted(path: Any) -> str:
    return ".".join(map(str, path))


def _plans_dtype(module: Any) -> bool:
    """True if a layer is split, and casts its parameters to a dtype of its own."""
    plan = getattr(module, PLAN, None)
    return plan is not None and plan.sharded and hasattr(module, "dtype")
