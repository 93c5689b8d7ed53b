"""Flax models of any kind taken apart: parameters by path, other state by path, and their loss as a pure function."""

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

from axonn_jax.errors import UserError, first_line
from axonn_jax.tensor.parallelize.linen import MappedAxes, takes_key
from axonn_jax.tensor.params import Params, copied, key_of
from axonn_jax.tensor.specs import values_of
from axonn_jax.terminal import say
from axonn_jax.train.modules.own_tree import OwnTree

REPLICAS = "axonn_replicas"
"""Name of the axis that maps over replicas."""

ROW_AXES = ("z",)
"""Mesh axes that split the rows of one replica."""

_NOT_THE_USERS = (str(Path(__file__).parents[2]), get_path("stdlib"), get_path("purelib"))
"""Beginnings of the names of files that a user did not write."""

Loss = Callable[..., Any]
"""Function of (model, batch) or (model, batch, key) -> a mean loss, or (a mean loss, numbers)."""

Way = Literal["parts", "whole", "xla"]
"""Way in which a loss runs: on one replica's rows, with layers split; on the rows of all replicas as one array, with
layers split; so too, but with layers as Flax wrote them, for XLA to split."""


class LossResult(NamedTuple):
    """Results of a loss on some rows."""

    loss: jax.Array
    aux: Any
    """Numbers to be averaged as the loss is."""
    carried: dict[str, jax.Array]
    """State and parameters that the call has written, by name."""


class Apart(ABC):
    """A model taken apart, and its loss on some rows.

    Args:
        arrays: Parameters and state on the mesh, by path.
        trained: Names of those that are trained.
        loss: The loss.
        compute: Dtype of the computation wherever the model names none; None leaves it to the model.
        mesh: Mesh of the parameters.
        whole_state: True if every device gets all of the state; else it stays where it lies.
    """

    kernels: tuple[str, ...]
    """Names of the kernels of layers that have a sharded form, tables of embeddings left out."""
    tree: OwnTree
    """The parameters' own tree."""
    streamed = False
    """True if the model has random streams of its own."""

    def __init__(
        self, arrays: Params, trained: Collection[str], loss: Loss, compute: Any, mesh: Mesh, *, whole_state: bool
    ):
        self.params = {name: value.astype(jnp.float32) for name, value in arrays.items() if name in trained}
        """Float32 parameters that are trained, by path."""
        self.specs = {name: spec_of_value(arrays[name]) for name in self.params}
        self.dtypes: dict[str, Any] = {name: value.dtype for name, value in arrays.items()}
        """Dtype of each parameter and of other state, as the model had it."""
        state = {
            n: (value, P() if whole_state else spec_of_value(value)) for n, value in arrays.items() if n not in trained
        }
        self.carried = {name: copied(value, NamedSharding(mesh, spec)) for name, (value, spec) in state.items()}
        """State that is not trained and that calls may change, by path."""
        self.compute, self.one_device_each = compute, one_device_each(mesh)
        self._use(loss)

    def _use(self, loss: Loss) -> None:
        self.loss, self.keyed, self._axes = loss, takes_key(loss), MappedAxes()

    @property
    def draws(self) -> bool:
        """True if the loss draws random numbers."""
        return self.streamed or self.keyed

    @property
    def split(self) -> bool:
        """True if layers may have a sharded form; else parameters are gathered where the loss uses them."""
        return True

    def exact(self) -> "Apart":
        """Return the model with its loss in float32 wherever it names no dtype."""
        own = copy(self)
        own.compute = None
        return own

    def as_on_one_device(self) -> "Apart":
        """Return the model with layers as Flax wrote them, which take statistics over `REPLICAS`."""
        own = copy(self)
        own.one_device_each = True
        return own

    def with_loss(self, loss: Loss) -> "Apart":
        """Return the model with another loss."""
        own = copy(self)
        own._use(loss)
        return own

    def run(
        self, params: Mapping[str, jax.Array], carried: Params, key: Any, rows: Any, *, training: bool, way: Way
    ) -> LossResult:
        """Return the loss of some rows; `key` seeds random streams."""
        return self._axes.call(partial(self.called, params, carried, key, rows, training, way))  # type: ignore[no-any-return]

    def result(self, loss: Loss, model: Any, rows: Any, key: Any) -> tuple[jax.Array, Any]:
        """Return a loss of a model, float32, and its numbers.

        An evaluation has the same key for all rows. Raises ``UserError`` for results that cannot be averaged.
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
    def called(
        self, params: Mapping[str, jax.Array], carried: Params, key: Any, rows: Any, training: bool, way: Way
    ) -> LossResult:
        """Return the loss of some rows, with the axes bound that it names."""

    @abstractmethod
    def restored(self, params: Mapping[str, jax.Array], carried: Params) -> Any:
        """Return the model as the user handed it in, with these parameters and this state."""


@contextmanager
def fitting(batch: Any) -> Iterator[None]:
    """Make a ``UserError`` of what a loss raises for values that do not fit: the batch's shapes, and the user's line.

    What is no sign of a batch that does not fit stays as it is, as do errors outside of the loss.
    """
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, LookupError, AssertionError, FlaxError) as error:
        frames = extract_tb(error.__traceback__)
        calls = [at for at, each in enumerate(frames) if (each.filename, each.name) == (__file__, "result")]
        inside = frames[calls[-1] + 1 :] if calls else []
        if not inside:
            raise
        last = [inside[0], *(each for each in inside if not each.filename.startswith(_NOT_THE_USERS))][-1]
        leaves = tree_leaves_with_path(values_of(batch))
        shown = ", ".join(f"{keystr(path)} {value.dtype}{[*value.shape]}".strip() for path, value in leaves)
        accepted = f"a batch for the loss, which in {Path(last.filename).name}, line {last.lineno}, raises"
        raise UserError("batch", shown, f"{accepted} {first_line(error)}") from error


def one_device_each(mesh: Mesh) -> bool:
    """True if a replica has one device, where its layers run as Flax wrote them."""
    return mesh.devices.size == mesh.shape["data"]


def say_first(*lines: str) -> None:
    """Print lines in the run's first process."""
    if lines and jax.process_index() == 0:
        say("\n".join(lines))


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


def check_real(name: str, value: Any) -> None:
    """Raise ``UserError`` for a parameter to be trained that float32 cannot hold."""
    kind = jnp.result_type(value)
    if jnp.issubdtype(kind, jnp.complexfloating) or kind == jnp.float64:
        accepted = "float32 or half precision, as all that is trained; a complex one as its real and imaginary parts"
        raise UserError("model", f"parameter {name} of {kind}", accepted)


def is_float(value: Any) -> bool:
    """True if a value is of real floating-point numbers."""
    return jnp.issubdtype(jnp.result_type(value), jnp.floating)


def in_dtype(value: Any, dtype: Any) -> Any:
    """Return an array, or a shape, in another dtype."""
    return jax.ShapeDtypeStruct(value.shape, dtype) if isinstance(value, jax.ShapeDtypeStruct) else value.astype(dtype)


def spec_of_value(value: Any) -> P:
    """Return the layout of an array, a dim each."""
    spec = value.sharding.spec if isinstance(value.sharding, NamedSharding) else P()
    return P(*spec, *[None] * (value.ndim - len(spec)))
