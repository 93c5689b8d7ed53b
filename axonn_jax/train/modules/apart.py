"""Flax models of any kind taken apart: parameters by path, other state by path, and their loss as a pure function."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_flatten_with_path

from axonn_jax.errors import UserError
from axonn_jax.models.sequential import seeded
from axonn_jax.tensor.parallelize.api import gather_spread, modules, with_row_axes
from axonn_jax.tensor.parallelize.kinds import Kernel, describe
from axonn_jax.tensor.parallelize.layouts import PLAN
from axonn_jax.tensor.parallelize.linen import LinenLoss, takes_key
from axonn_jax.tensor.parallelize.linen_layers import COUNTERPARTS
from axonn_jax.tensor.params import Params, Specs, copied

REPLICAS = "axonn_replicas"
"""Name of the axis that maps over replicas."""

ROW_AXES = ("z",)
"""Mesh axes that split the rows of one replica."""

Loss = Callable[..., Any]
"""Function of (model, batch) or (model, batch, key) -> a mean loss, or (a mean loss, numbers)."""


class LossResult(NamedTuple):
    """Results of a loss on some rows."""

    loss: jax.Array
    aux: Any
    """Numbers to be averaged as the loss is."""
    carried: dict[str, jax.Array]
    """State that the call has changed, by name."""


class Apart(Protocol):
    """A model taken apart, and its loss on one replica's rows."""

    params: Params
    """Float32 parameters by path."""
    specs: Specs
    carried: Params
    """State that is no parameter and that calls may change, by path."""
    kernels: tuple[str, ...]
    """Names of the kernels of layers that have a sharded form, tables of embeddings left out."""
    draws: bool
    """True if the loss draws random numbers."""

    def run(
        self, params: Mapping[str, jax.Array], carried: Params, key: Any, rows: Any, *, training: bool
    ) -> LossResult:
        """Return the loss of a replica's rows; `key` seeds random streams."""

    def restored(self, params: Mapping[str, jax.Array], carried: Params) -> Any:
        """Return the model as the user handed it in, with these parameters and this state."""


class ModuleApart:
    """An NNX module taken apart.

    Args:
        model: The module, parallelized where the mesh has several devices.
        loss: Its loss.
        compute: Dtype of the computation wherever the module names none; None leaves it to the module.
        mesh: Mesh of the parameters.
    """

    def __init__(self, model: nnx.Module, loss: Loss, compute: Any, mesh: Mesh):
        split: Any = nnx.split(model, _trained, nnx.RngState, ...)
        self._graph, trained, self._streams, rest = split
        self._loss, self._compute = loss, compute
        flat, others = _by_name(trained), _by_name(rest)
        arrays = {name: _value(var) for name, (_, var) in flat.items()}
        self.params = {name: value.astype(jnp.float32) for name, value in arrays.items()}
        self.specs = {name: _spec(value) for name, value in arrays.items()}
        self._dtypes = {name: value.dtype for name, value in arrays.items()}
        replicated = NamedSharding(mesh, P())
        state = {name: _value(var) for name, (_, var) in others.items()}
        self.carried = {name: copied(value, replicated) for name, value in state.items()}
        self._streamed, self._keyed = bool(jax.tree.leaves(self._streams)), takes_key(loss)
        self.draws = self._streamed or self._keyed
        self._flat = {n: (path, _filled(var, None)) for n, (path, var) in {**flat, **others}.items()}
        """Path and empty variable of all state but random streams."""
        members = modules(model).values()
        held = {id(variable) for module in members for variable in _cast_by_layer(module)}
        kernels = {id(variable) for module in members for variable in _kernel(module)}
        paths = [(path, value) for path, value in nnx.iter_graph(model) if isinstance(value, nnx.Variable)]
        self._in_layers = {".".join(map(str, path)) for path, value in paths if id(value) in held}
        """Parameters of split layers, which cast them by themselves, behind the reduction of their gradients."""
        named = (".".join(map(str, path)) for path, value in paths if id(value) in kernels)
        self.kernels = tuple(name for name in named if name in self.params)

    def run(
        self, params: Mapping[str, jax.Array], carried: Params, key: Any, rows: Any, *, training: bool
    ) -> LossResult:
        """Return the loss of a replica's rows, with the state that the call has changed."""
        own = {name: value.astype(self._dtype(name)) for name, value in params.items()}
        drawn = key is not None and self._streamed
        model = self._merged(own, carried, seeded(self._streams, key) if drawn else self._streams)
        if not training:
            model.eval()
        with_row_axes(model, ROW_AXES)
        gather_spread(model)
        for module in modules(model).values():
            each: Any = module
            if self._compute is not None and _plans_dtype(each) and each.dtype is None:
                each.dtype = self._compute
            if isinstance(each, nnx.BatchNorm):  # the statistics are those of all replicas
                each.axis_name = REPLICAS
        loss, aux = checked(self._loss(model, rows, *_keys(self._keyed, key)))
        split: Any = nnx.split(model, _trained, nnx.RngState, ...)
        after = {name: _value(var) for name, (_, var) in _by_name(split[3]).items()}
        changed = {n: after[n].astype(v.dtype) for n, v in carried.items() if n in after and after[n] is not v}
        return LossResult(loss, aux, changed)

    def restored(self, params: Mapping[str, jax.Array], carried: Params) -> nnx.Module:
        """Return the module with these parameters, in the dtypes that it had, and this state."""
        own = {name: _as(value, self._dtypes[name]) for name, value in params.items()}
        return self._merged(own, carried, self._streams)

    def _dtype(self, name: str) -> Any:
        return self._dtypes[name] if self._compute is None or name in self._in_layers else self._compute

    def _merged(self, params: Mapping[str, jax.Array], carried: Params, streams: Any) -> nnx.Module:
        values = {**carried, **params}
        state: Any = nnx.from_flat_state(
            [(path, _filled(var, values[name])) for name, (path, var) in self._flat.items()]
        )
        return nnx.merge(self._graph, state, streams, copy=True)


class TreeApart:
    """Parameters of a Linen model, in a tree, taken apart.

    A tree with "params" at its root holds collections: the others are state, which a call changes by returning
    collections of these names among its numbers.

    Args:
        tree: Parameters on the mesh, as `parallelize_linen` returns them.
        loss: Its loss, as `parallelize_linen` returns it, or of plain Linen modules where the mesh has one device.
        compute: Dtype of the computation wherever a module names none; None leaves it to the modules.
        mesh: Mesh of the parameters.
    """

    def __init__(self, tree: Any, loss: Loss, compute: Any, mesh: Mesh):
        self._loss = loss
        if isinstance(loss, LinenLoss):
            replica = loss.with_row_axes(ROW_AXES, REPLICAS)
            self._loss = replica if compute is None else replica.with_dtype(compute)
        elif compute is not None:
            self._loss = lambda tree, *given: loss(jax.tree.map(lambda v: _cast(v, compute), tree), *given)
        leaves, self._tree = tree_flatten_with_path(tree)
        arrays = {keystr(path, simple=True, separator="."): jnp.asarray(value) for path, value in leaves}
        self._names = list(arrays)
        self._collections = set(tree) - {"params"} if isinstance(tree, Mapping) and "params" in tree else set()
        state = {n for n, v in arrays.items() if n.split(".")[0] in self._collections or not _is_float(v)}
        self.params = {name: value.astype(jnp.float32) for name, value in arrays.items() if name not in state}
        self._dtypes = {name: value.dtype for name, value in arrays.items()}
        self.specs = {name: _spec(value) for name, value in arrays.items() if name not in state}
        replicated = NamedSharding(mesh, P())
        self.carried = {name: copied(arrays[name], replicated) for name in state}
        holders = loss.holders if isinstance(loss, LinenLoss) else ()
        split = [(holder.path, holder.plan.kind) for holder in holders if holder.plan.sharded]
        named = (f"{path}.{_LINEN_KERNELS[kind]}" for path, kind in split if kind in _LINEN_KERNELS)
        self.kernels = tuple(name for name in named if name in self.params)
        self.draws = self._keyed = takes_key(loss)

    def run(
        self, params: Mapping[str, jax.Array], carried: Params, key: Any, rows: Any, *, training: bool
    ) -> LossResult:
        """Return the loss of a replica's rows; in an evaluation too, as the loss function says what differs."""
        tree = self.restored(params, carried)
        tree = self._loss.gather_spread(tree) if isinstance(self._loss, LinenLoss) else tree
        loss, aux = checked(self._loss(tree, rows, *_keys(self._keyed, key)))
        changed: dict[str, jax.Array] = {}
        if isinstance(aux, Mapping) and (given := self._collections & set(aux)):
            leaves, _ = tree_flatten_with_path({name: aux[name] for name in given})
            named = {keystr(path, simple=True, separator="."): value for path, value in leaves}
            changed = {name: value.astype(carried[name].dtype) for name, value in named.items() if name in carried}
            aux = {name: value for name, value in aux.items() if name not in given}
        return LossResult(loss, aux, changed)

    def restored(self, params: Mapping[str, jax.Array], carried: Params) -> Any:
        """Return the tree with these parameters, in the dtypes that it had, and this state."""
        values = {**carried, **params}
        return jax.tree.unflatten(self._tree, [_as(values[name], self._dtypes[name]) for name in self._names])


_LINEN_KERNELS = {
    base.__name__: form.params[0]
    for base, form in COUNTERPARTS.items()
    if not form.norm and not issubclass(form.kind, nnx.Embed)
}
"""Name of the kernel by Linen's type of a layer."""


def takes_batch(loss: Loss) -> bool:
    """True if a loss can be called with a model and a batch, and perhaps a key."""
    signature = inspect.signature(getattr(loss, "plain", loss))
    for count in (2, 3):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return True
    return False


def _keys(keyed: bool, key: Any) -> tuple[Any, ...]:
    """The key of a loss that takes one; an evaluation has the same for all rows."""
    return ((jax.random.key(0) if key is None else key),) if keyed else ()


def checked(result: Any) -> tuple[jax.Array, Any]:
    """Return a loss, float32, and its numbers; raises ``UserError`` for results that cannot be averaged."""
    loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    accepted = "a function that returns a scalar, or (scalar, numbers)"
    if not hasattr(loss, "dtype") and not isinstance(loss, float):
        raise UserError("loss", f"a function that returns {type(loss).__name__}", accepted)
    if jnp.shape(loss) != () or not _is_float(loss):
        raise UserError("loss", f"{jnp.result_type(loss)} of shape {jnp.shape(loss)}", accepted)
    return jnp.asarray(loss, jnp.float32), aux


def _trained(path: Any, value: Any) -> bool:
    return isinstance(value, nnx.Param) and _is_float(value.get_value())


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jnp.floating)


def _plans_dtype(module: Any) -> bool:
    """True if a layer is split, and casts its parameters to a dtype of its own."""
    plan = getattr(module, PLAN, None)
    return plan is not None and plan.sharded and hasattr(module, "dtype")


def _as(value: Any, dtype: Any) -> Any:
    """Return an array, or a shape, in another dtype."""
    return jax.ShapeDtypeStruct(value.shape, dtype) if isinstance(value, jax.ShapeDtypeStruct) else value.astype(dtype)


def _kernel(module: Any) -> list[Any]:
    """Return the kernel of a layer that has a sharded form; empty for an embedding or another module."""
    described = describe(module)
    return [vars(module)[described.name]] if isinstance(described, Kernel) and not isinstance(module, nnx.Embed) else []


def _cast_by_layer(module: Any) -> list[Any]:
    """Return the variables that a split layer casts by itself."""
    return [vars(module).get(name) for name, _ in getattr(module, PLAN).specs] if _plans_dtype(module) else []


def _cast(value: jax.Array, dtype: Any) -> jax.Array:
    return value.astype(dtype) if _is_float(value) else value


def _by_name(state: Any) -> dict[str, tuple[Any, Any]]:
    """Path and variable, or array, by dotted path."""
    return {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _filled(leaf: Any, value: Any) -> Any:
    return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value


def _spec(value: Any) -> P:
    spec = value.sharding.spec if isinstance(value.sharding, NamedSharding) else P()
    return P(*spec, *[None] * (value.ndim - len(spec)))
