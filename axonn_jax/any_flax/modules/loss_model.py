"""Flax models as pure functions: parameters and other state by path, and a loss as a function of them."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from sysconfig import get_path
from traceback import extract_tb
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax.errors import FlaxError
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_leaves_with_path

from axonn_jax.any_flax.modules.param_tree import ParamTree
from axonn_jax.any_flax.parallelize.linen import MappedAxes, takes_key
from axonn_jax.core.errors import UserError, first_line
from axonn_jax.core.tensor.params import Params, copied, key_of
from axonn_jax.core.tensor.specs import values_of
from axonn_jax.core.terminal import say

REPLICAS = "axonn_replicas"
"""Name of the axis that is mapped over data-parallel replicas."""

ROW_AXES = ("z",)
"""Mesh axes over which the rows of one replica are sharded."""

_NOT_THE_USERS = (str(Path(__file__).parents[2]), get_path("stdlib"), get_path("purelib"))
"""Path prefixes of library code, as opposed to the user's."""

Loss = Callable[..., Any]
"""Function of (model, batch) or (model, batch, key) that returns a mean loss, or (a mean loss, metrics)."""

Strategy = Literal["parts", "whole", "xla"]
"""Strategy of a loss. `parts`: on one replica's rows at a time, with sharded layers. `whole`: on the rows of all
replicas as one array, with sharded layers. `xla`: like `whole`, but with Flax's own layers, which XLA partitions."""


class LossResult(NamedTuple):
    """Results of a loss on some rows."""

    loss: jax.Array
    aux: Any
    """Metrics, averaged like the loss."""
    carried: dict[str, jax.Array]
    """State and parameters that the call has written, by path."""


class LossModel(ABC):
    """A model and its loss as a pure function of parameters and state.

    Args:
        arrays: Parameters and state on the mesh, by path; abstract ones stay so.
        trained: Paths of the trained parameters.
        loss: The loss.
        compute: Dtype of the computation where the model sets none; None leaves it to the model.
        mesh: Mesh of the parameters.
        replicate_state: True to copy the state to every device; otherwise it keeps its layout.
    """

    kernels: tuple[str, ...]
    """Paths of the kernels of layers that have a sharded form, except for embedding tables."""
    tree: ParamTree
    """Converter between parameters by path and the tree that Flax gives an optimizer."""
    collections: frozenset[str] = frozenset()
    """Roots of paths that are Linen's collections, which hold arrays of the same modules."""
    streamed = False
    """True if the model holds random streams."""

    def __init__(
        self, arrays: Params, trained: Collection[str], loss: Loss, compute: Any, mesh: Mesh, *, replicate_state: bool
    ):
        self.params = {name: in_dtype(value, jnp.float32) for name, value in arrays.items() if name in trained}
        """Trained parameters in float32, by path."""
        self.specs = {name: spec_of_value(arrays[name]) for name in self.params}
        self.dtypes: dict[str, Any] = {name: value.dtype for name, value in arrays.items()}
        """Original dtype of every parameter and state array, by path."""
        state = {
            n: (value, P() if replicate_state else spec_of_value(value))
            for n, value in arrays.items()
            if n not in trained
        }
        self.carried = {name: _placed(value, NamedSharding(mesh, spec)) for name, (value, spec) in state.items()}
        """Untrained state, which calls may change, by path."""
        self.compute, self.unsharded = compute, unsharded(mesh)
        self._use(loss)

    def _use(self, loss: Loss) -> None:
        self.loss, self.keyed, self._axes = loss, takes_key(loss), MappedAxes()

    @property
    def draws(self) -> bool:
        """True if the loss draws random numbers."""
        return self.streamed or self.keyed

    @property
    def split(self) -> bool:
        """True if layers may have a sharded form; otherwise parameters are gathered where the loss uses them."""
        return True

    def exact(self) -> "LossModel":
        """Return a copy that computes in float32 where the model sets no dtype."""
        model = copy(self)
        model.compute = None
        return model

    def with_flax_layers(self) -> "LossModel":
        """Return a copy that runs Flax's own layers in parts, with statistics over the axis `REPLICAS`."""
        model = copy(self)
        model.unsharded = True
        return model

    def with_loss(self, loss: Loss) -> "LossModel":
        """Return a copy with another loss."""
        model = copy(self)
        model._use(loss)
        return model

    def run(
        self,
        params: Mapping[str, jax.Array],
        carried: Params,
        key: Any,
        rows: Any,
        *,
        training: bool,
        strategy: Strategy,
    ) -> LossResult:
        """Compute the loss of some rows.

        Args:
            params: Parameters by path.
            carried: State by path.
            key: Seed of random streams; None in an evaluation.
            rows: The rows, in the tree of the batch.
            training: True for a training step, False for an evaluation.
            strategy: How the loss runs.

        Returns:
            The loss, its metrics, and the state that the call has changed.
        """
        return self._axes.call(partial(self.compute_loss, params, carried, key, rows, training, strategy))  # type: ignore[no-any-return]

    def result(self, loss: Loss, model: Any, rows: Any, key: Any) -> tuple[jax.Array, Any]:
        """Call the user's loss and check its results.

        Args:
            loss: The loss.
            model: The model as the loss expects it.
            rows: The rows.
            key: Key of the rows; None in an evaluation, which uses one constant key for all rows.

        Returns:
            The loss as a float32 scalar, and its metrics.

        Raises:
            UserError: The results cannot be averaged.
        """
        result = loss(model, rows, *(((key_of(0) if key is None else key),) if self.keyed else ()))
        value, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        accepted = "a function that returns a scalar, or (scalar, numbers)"
        if not hasattr(value, "dtype") and not isinstance(value, float):
            raise UserError("loss", f"a function that returns {type(value).__name__}", accepted)
        if jnp.shape(value) != () or not is_float(value):
            raise UserError("loss", f"{jnp.result_type(value)} of shape {jnp.shape(value)}", accepted)
        return jnp.asarray(value, jnp.float32), aux

    @abstractmethod
    def compute_loss(
        self, params: Mapping[str, jax.Array], carried: Params, key: Any, rows: Any, training: bool, strategy: Strategy
    ) -> LossResult:
        """Compute the loss of some rows; the mapped axes that the model names are bound."""

    @abstractmethod
    def restored(self, params: Mapping[str, jax.Array], carried: Params) -> Any:
        """Return the user's model with new parameters and state, in the structure and dtypes that it came with."""


@contextmanager
def fitting(batch: Any) -> Iterator[None]:
    """Turn errors that a user's loss raises on a batch it cannot handle into a ``UserError``.

    Other exceptions, and errors outside the loss, pass through.

    Raises:
        UserError: The loss failed; the message has the batch's shapes and the user's source line.
    """
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, LookupError, AssertionError, FlaxError) as error:
        # An error belongs to the loss only if it was raised below the call in `LossModel.result`.
        frames = extract_tb(error.__traceback__)
        calls = [at for at, frame in enumerate(frames) if (frame.filename, frame.name) == (__file__, "result")]
        inside = frames[calls[-1] + 1 :] if calls else []
        if not inside:
            raise
        # Point at the innermost line of user code: errors are mostly raised inside jax or Flax.
        last = [inside[0], *(frame for frame in inside if not frame.filename.startswith(_NOT_THE_USERS))][-1]
        leaves = tree_leaves_with_path(values_of(batch))
        shown = ", ".join(f"{keystr(path)} {value.dtype}{[*value.shape]}".strip() for path, value in leaves)
        accepted = f"a batch for the loss, which in {Path(last.filename).name}, line {last.lineno}, raises"
        raise UserError("batch", shown, f"{accepted} {first_line(error)}") from error


def unsharded(mesh: Mesh) -> bool:
    """Return whether every replica has a single device, so that Flax's own layers need no sharding."""
    return mesh.devices.size == mesh.shape["data"]


def say_first(*lines: str) -> None:
    """Print lines in the first process of the run."""
    if lines and jax.process_index() == 0:
        say("\n".join(lines))


def takes_batch(loss: Loss) -> bool:
    """Return whether a loss can be called with a model and a batch, and optionally a key."""
    signature = inspect.signature(getattr(loss, "plain", loss))
    for count in (2, 3):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return True
    return False


def check_real(name: str, value: Any) -> None:
    """Check that a trained parameter fits into the float32 in which updates are computed.

    Raises:
        UserError: It is complex or float64.
    """
    kind = jnp.result_type(value)
    if jnp.issubdtype(kind, jnp.complexfloating) or kind == jnp.float64:
        accepted = "float32 or half precision, as all that is trained; a complex one as its real and imaginary parts"
        raise UserError("model", f"parameter {name} of {kind}", accepted)


def is_float(value: Any) -> bool:
    """Return whether a value has a real floating-point dtype."""
    return jnp.issubdtype(jnp.result_type(value), jnp.floating)


def _placed(value: Any, sharding: NamedSharding) -> Any:
    return value.update(sharding=sharding) if isinstance(value, jax.ShapeDtypeStruct) else copied(value, sharding)


def in_dtype(value: Any, dtype: Any) -> Any:
    """Return an array, or a `ShapeDtypeStruct`, with another dtype."""
    return value.update(dtype=dtype) if isinstance(value, jax.ShapeDtypeStruct) else value.astype(dtype)


def spec_of_value(value: Any) -> P:
    """Return an array's PartitionSpec, padded to one entry per dimension."""
    spec = value.sharding.spec if isinstance(value.sharding, NamedSharding) else P()
    return P(*spec, *[None] * (value.ndim - len(spec)))
