"""NNX modules as pure functions."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.tree_util import keystr, tree_flatten_with_path

from axonn_jax.any_flax.modules.loss_model import (
    REPLICAS,
    ROW_AXES,
    Loss,
    LossModel,
    LossResult,
    Strategy,
    check_real,
    in_dtype,
    is_float,
)
from axonn_jax.any_flax.modules.param_tree import StateTree
from axonn_jax.any_flax.parallelize.api import as_flax, gather_spread, modules, with_row_axes
from axonn_jax.any_flax.parallelize.kinds import Kernel, describe
from axonn_jax.any_flax.parallelize.layouts import PLAN
from axonn_jax.core.errors import UserError
from axonn_jax.core.models.sequential import seeded
from axonn_jax.core.tensor.params import Params


class VariableSlot(NamedTuple):
    """A Variable, or an array attribute, without its value."""

    path: tuple[Any, ...]
    empty: Any
    """The Variable without a value; None for an array attribute."""
    tree: Any
    """Structure of the value, which may be a pytree."""
    names: tuple[str, ...]
    """Path of every array of the value."""


class NnxLossModel(LossModel):
    """An NNX module and its loss.

    Args:
        model: The module, parallelized if the mesh has several devices.
        loss: Its loss.
        wrt: Filter of the Variables that are trained.
        compute: Dtype of the computation where the module sets none; None leaves it to the module.
        mesh: Mesh of the parameters.
    """

    def __init__(self, model: nnx.Module, loss: Loss, wrt: Any, compute: Any, mesh: Mesh):
        if any(isinstance(value, nnx.Intermediate) for _, value in nnx.iter_graph(model)):
            # Values sown by earlier calls are not state. Drop them from a copy, because the module is the user's.
            model = nnx.clone(model)
            nnx.pop(model, nnx.Intermediate)
        split: Any = nnx.split(model, nnx.RngState, ...)
        self._graph, self._streams, state = split
        is_trained = nnx.filterlib.to_predicate(wrt)
        self._slots, arrays, trained = list[VariableSlot](), dict[str, Any](), dict[str, tuple[Any, Any]]()
        frozen, self._impls = set[str](), dict[str, Any]()
        for slot, values in leaves_of(state):
            self._slots.append(slot)
            self._impls |= {n: jax.random.key_impl(v) for n, v in values.items() if _is_key(v)}
            arrays |= {name: array_of(name, value) for name, value in values.items()}
            if isinstance(slot.empty, nnx.Variable) and is_trained(slot.path, slot.empty):
                for name, value in values.items():
                    check_real(name, value)
                    trained |= {name: (slot.path, slot.empty)} if is_float(value) else {}
            if isinstance(slot.empty, nnx.Param):
                frozen |= {name for name in values if is_float(arrays[name]) and name not in trained}
        self._frozen = frozen
        """Paths of parameters that are not trained."""
        self.streamed = bool(jax.tree.leaves(self._streams))
        self.tree = StateTree(trained)
        super().__init__(arrays, trained, loss, compute, mesh, replicate_state=False)
        inside, kernels = set[int](), set[int]()
        for module in modules(model).values():
            described = describe(module)
            if _plans_dtype(module):
                inside |= {id(vars(module).get(name)) for name, _ in getattr(module, PLAN).specs}
            if isinstance(described, Kernel) and not isinstance(module, nnx.Embed):
                kernels.add(id(vars(module)[described.name]))
        paths = [(path, value) for path, value in nnx.iter_graph(model) if isinstance(value, nnx.Variable)]
        self._in_layers = {_dotted(path) for path, value in paths if id(value) in inside}
        """Paths of parameters of sharded layers, which cast them themselves, inside the reduction of the gradients."""
        kernel_paths = (_dotted(path) for path, value in paths if id(value) in kernels)
        self.kernels = tuple(name for name in kernel_paths if name in self.params)

    def compute_loss(  # noqa: D102
        self, params: Mapping[str, jax.Array], carried: Params, key: Any, rows: Any, training: bool, strategy: Strategy
    ) -> LossResult:
        weights = {name: value.astype(self._dtype(name)) for name, value in params.items()}
        frozen = {name: carried[name].astype(self._dtype(name)) for name in self._frozen}
        drawn = key is not None and self.streamed
        streams = seeded(self._streams, key) if drawn else jax.tree.map(_unplaced, self._streams)
        model = self._merged({**carried, **frozen, **weights}, streams)
        if not training:
            model.eval()
        if strategy == "xla" or (strategy == "parts" and self.unsharded):
            as_flax(model)
        else:
            gather_spread(model)
            if strategy == "parts":
                with_row_axes(model, ROW_AXES)
        for module in modules(model).values():
            layer: Any = module
            if self.compute is not None and _plans_dtype(layer) and layer.dtype is None:
                layer.dtype = self.compute
            # Average the statistics over replicas, as one device would over all rows.
            if isinstance(layer, nnx.BatchNorm):
                layer.axis_name = REPLICAS if strategy == "parts" else None
        old_values = self._values(model)
        loss, aux = self.result(self.loss, model, rows, key)
        # Compare by identity: a Variable that the call has not written still holds the same tracer.
        inputs = {**carried, **params}
        new_values = {name: value for name, value in self._values(model).items() if value is not old_values[name]}
        return LossResult(
            loss, aux, {name: _checked_update(name, new_values[name], inputs[name]) for name in sorted(new_values)}
        )

    def restored(self, params: Mapping[str, jax.Array], carried: Params) -> nnx.Module:  # noqa: D102
        weights = {name: in_dtype(value, self.dtypes[name]) for name, value in params.items()}
        return self._merged({**carried, **weights}, self._streams)

    def _dtype(self, name: str) -> Any:
        return self.dtypes[name] if self.compute is None or name in self._in_layers else self.compute

    def _merged(self, values: Params, streams: Any) -> nnx.Module:
        keys = {name: jax.random.wrap_key_data(values[name], impl=impl) for name, impl in self._impls.items()}
        filled = [(slot.path, _filled(slot, {**values, **keys})) for slot in self._slots]
        return nnx.merge(self._graph, nnx.from_flat_state(filled), streams, copy=True)

    def _values(self, model: nnx.Module) -> dict[str, Any]:
        """Return a module's arrays by path, ignoring Variables that a call has added."""
        state = dict(nnx.to_flat_state(nnx.state(model)))
        values = dict[str, Any]()
        for slot in self._slots:
            leaves, tree = jax.tree.flatten(_raw(state[slot.path]))
            if tree != slot.tree:
                raise UserError("model", _dotted(slot.path), "state that a call leaves in the structure that it has")
            values |= dict(zip(slot.names, leaves, strict=True))
        return values


def leaves_of(state: Any) -> Iterator[tuple[VariableSlot, dict[str, Any]]]:
    """Yield every Variable or array of a state, with its arrays by path."""
    for path, leaf in nnx.to_flat_state(state):
        leaves, tree = tree_flatten_with_path(_raw(leaf))
        values = {_dotted(path) + keystr(inner): value for inner, value in leaves}
        yield (
            VariableSlot(path, leaf.replace(None) if isinstance(leaf, nnx.Variable) else None, tree, tuple(values)),
            values,
        )


def _raw(leaf: Any) -> Any:
    """Return a Variable's stored value, bypassing hooks that run when it is read."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _filled(slot: VariableSlot, values: Mapping[str, Any]) -> Any:
    value = jax.tree.unflatten(slot.tree, [values[name] for name in slot.names])
    return slot.empty.replace(value) if isinstance(slot.empty, nnx.Variable) else value


def array_of(name: str, value: Any) -> jax.Array:
    """Return a value as an array, and a typed key as its data; an abstract array stays one.

    Raises:
        UserError: It is not an array.
    """
    if _is_key(value):
        return jax.eval_shape(jax.random.key_data, value) if _is_abstract(value) else jax.random.key_data(value)  # type: ignore[no-any-return]
    try:
        return value if isinstance(value, jax.Array) or _is_abstract(value) else jnp.asarray(value)
    except TypeError as error:
        raise UserError("model", f"{name} of type {type(value).__name__}", "Variables of arrays") from error


def _checked_update(name: str, value: Any, current: Any) -> jax.Array:
    """Return a value that a call has written, in its original dtype: state must keep its form over steps.

    Raises:
        UserError: Its shape has changed.
    """
    value = jax.random.key_data(value) if _is_key(value) else value
    if jnp.shape(value) != current.shape:
        accepted = f"the shape that it has, {current.shape}, after a call"
        raise UserError("model", f"{name} written with shape {jnp.shape(value)}", accepted)
    return jnp.asarray(value, current.dtype)


def _is_key(value: Any) -> bool:
    arrays = jax.Array | jax.ShapeDtypeStruct
    return isinstance(value, arrays) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _unplaced(value: jax.Array) -> jax.Array:
    """Return a constant that no mesh holds: a call that draws writes the counter inside of any region."""
    with jax.ensure_compile_time_eval():
        words = np.asarray(jax.random.key_data(value) if _is_key(value) else value)
    constant = jnp.asarray(words)
    return jax.random.wrap_key_data(constant, impl=jax.random.key_impl(value)) if _is_key(value) else constant


def _is_abstract(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)


def _dotted(path: Any) -> str:
    return ".".join(map(str, path))


def _plans_dtype(module: Any) -> bool:
    """Return whether a layer is sharded and casts its parameters itself."""
    plan = getattr(module, PLAN, None)
    return plan is not None and plan.sharded and hasattr(module, "dtype")
