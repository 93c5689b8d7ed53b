"""Trace of a stretch of a model on local shards: inputs, outputs, forward and backward pass."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax import compat
from axonn_jax.grid import BATCH_AXES
from axonn_jax.models.packed import balance_of, inputs_of, targets_of, values_of
from axonn_jax.models.protocol import Model
from axonn_jax.models.segments import Segment
from axonn_jax.options import Activations
from axonn_jax.pipeline.partition_jaxpr import cut
from axonn_jax.pruned.layout import PrunedLayout
from axonn_jax.tensor.collectives import mark_varying
from axonn_jax.tensor.elementwise import DropoutKey
from axonn_jax.tensor.params import SplitModule, key_of
from axonn_jax.tensor.specs import live_axes, shard_mapped, spec_axes
from axonn_jax.tensor.weight_gather import Weights, cast_for_reduction, trained, training

X, TOKENS, KEY, MICROBATCH, LATER, DY, SCALE = " x", " tokens", " key", " microbatch", " later", " dy", " scale"
"""Names of a stage's inputs beside its parameters; the space tells them from parameters' names."""


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step, the same for all stages."""

    rows: int
    """Sequences of a microbatch, over all of `data` and `z`."""
    width: int
    """Tokens a sequence, one more than the model reads."""
    microbatches: int
    """Microbatches of a step."""
    dtype: jnp.dtype
    """Dtype of the layers' computation and of activations on their way."""
    activations: Activations
    """Policy for the activations that the forward pass keeps (`memory.remat`)."""
    sums: jnp.dtype
    """Dtype in which gradients add up."""


@dataclass(frozen=True)
class Stretch:
    """Some segments of a model, in a row, on a mesh."""

    parts: SplitModule
    """The whole model, with abstract parameters."""
    mesh: Mesh
    segments: range
    total: int
    """Segments of the whole model."""
    work: StepShape
    keyed: bool
    """True for dropout, which takes a key, a microbatch number and an offset of layer numbers."""
    x: jax.ShapeDtypeStruct | None
    """Incoming activations; None for the first stretch."""
    names: tuple[str, ...] = ()
    """Parameters that the stretch reads; found by `survey`, as `y` is."""
    y: jax.ShapeDtypeStruct | None = None
    """Outgoing activations; None for the last stretch."""
    forms: PrunedLayout | None = None
    """Layout of the pruned parameters."""

    @property
    def first(self) -> bool:
        """True if the stretch reads the tokens and nothing else."""
        return self.segments.start == 0

    @property
    def last(self) -> bool:
        """True if the stretch ends with the loss."""
        return self.segments.stop == self.total

    @property
    def reads_tokens(self) -> bool:
        """True if the stretch takes the tokens: the first, the last, and all of a model whose layers read them."""
        return self.first or self.last or self.model.reads_words

    @property
    def counts(self) -> bool:
        """True if the stretch has losses; their gradients start from the loss scale over the number of targets."""
        return self.last or self.model.balanced

    @property
    def model(self) -> Model:
        """The model, with abstract parameters."""
        model: Any = self.parts.merge(self.parts.params)
        return model  # type: ignore[no-any-return]

    def inputs(self, names: Iterable[str]) -> dict[str, Any]:
        """Return every input by name, as a global array with its layout; `names` are those of parameters.

        A parameter in another form is a pytree of such arrays.
        """

        def struct(like: Any, spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=NamedSharding(self.mesh, spec))

        held = {**self.parts.params, **self._formed()}
        given = {
            name: jax.tree.map(lambda array, spec=self.parts.specs[name]: struct(array, spec), held[name])
            for name in names
        }
        if self.x is not None:
            given[X] = self.x
        if self.reads_tokens:
            given[TOKENS] = struct(jax.ShapeDtypeStruct((self.work.rows, self.work.width), jnp.int32), P(BATCH_AXES))
        if self.keyed:
            given[KEY] = struct(jax.eval_shape(lambda: key_of(0)), P())
            given[MICROBATCH] = struct(jax.ShapeDtypeStruct((), jnp.uint32), P())
            given[LATER] = struct(jax.ShapeDtypeStruct((), jnp.uint32), P())
        if self.counts:
            given[SCALE] = struct(jax.ShapeDtypeStruct((), jnp.float32), P())
        return given

    def _formed(self) -> Weights:
        """Return the shapes of the parameters in another form."""
        if (forms := self.forms) is None:
            return {}
        dtype = next((self.parts.params[name].dtype for name in forms.shapes), self.work.dtype)
        extra = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in forms.value_shapes.items()}
        return jax.eval_shape(lambda extra: forms.first(extra, dtype), extra)

    @property
    def all_inputs(self) -> dict[str, Any]:
        """Inputs of the forward and backward pass."""
        return self.inputs(self.names) | ({} if self.y is None else {DY: self.y})

    def forward(
        self, params: Mapping[str, jax.Array], given: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the outgoing activations, or the sum of the local targets' losses; on local shards.

        Activations come with the losses that the layers add to the gradients; a loss has those in its gradient.
        """
        key = None
        if self.keyed:
            key = DropoutKey(given[KEY], given[LATER], given[MICROBATCH])
        weights = self._weights(given)
        frozen = {name: mark_varying(given[name], self.model.token_axes) for name in self.parts.frozen if name in given}
        held = {**frozen, **training(weights, params, self.work.sums)}
        model: Any = self.parts.merge({**self.parts.params, **held})
        if self.first:
            x = model.embed(inputs_of(model, given[TOKENS]), self.work.dtype, key)
        else:
            x = model.continued(given[X], given[TOKENS] if model.reads_words else None)
        for number in self.segments:
            x = model.run_segment(number, x, key)
        if not self.last:
            return values_of(x), balance_of(x)
        return model.total_loss(x, *targets_of(model, given[TOKENS])), None

    def own(self, given: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Return the trained parameters, varying over the axes over which gradients then stay partial sums."""
        axes, own, parts = self.model.token_axes, self._weights(given), self.parts
        return {
            name: mark_varying(trained(weight, self.work.sums), parts.sum_axes(name, axes))
            for name, weight in own.items()
        }

    def _weights(self, given: Mapping[str, Any]) -> Weights:
        """Return the trained parameters among the given inputs."""
        return {name: given[name] for name in self.parts.trained if name in given}

    def whole(self, given: Mapping[str, Any], dy: jax.Array | None) -> list[jax.Array]:
        """Return the result, the gradient of `x` if there is one, and the gradients of parameters, on local shards."""
        rest = {name: value for name, value in given.items() if name != X}
        x = given.get(X)

        def forward(params: Mapping[str, jax.Array], x: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
            return self.forward(params, rest if x is None else {**rest, X: x})

        (y, balance), pull = jax.vjp(forward, cast_for_reduction(self.work.sums, self.own(given), self.parts.specs), x)

        def seed(loss: jax.Array) -> jax.Array:  # the loss is the mean over all targets of the step that count
            return mark_varying(jnp.full(loss.shape, given[SCALE], loss.dtype), compat.varying_axes(loss))

        dp, dx = pull((seed(y) if dy is None else dy, None if balance is None else seed(balance)))
        return [y, *([] if x is None else [dx]), *(dp[name] for name in given if name in dp)]


class Traced(NamedTuple):
    """Traced function on local shards, and for each of its arrays the name of the input that has it."""

    closed: compat.ClosedJaxpr
    names: list[str]


def survey(stretch: Stretch) -> Stretch:
    """Return the stretch with its parameters and output, found by tracing its forward pass; allocates nothing."""
    everything = stretch.inputs(stretch.parts.params)
    closed, arrays = _trace(stretch, lambda given: [stretch.forward(stretch.own(given), given)[0]], everything)
    (part,) = cut(closed, [[0]], [])
    read = dict.fromkeys(arrays[i] for i in part.inputs)
    names = tuple(name for name in read if name in stretch.parts.params)
    if stretch.last:
        return replace(stretch, names=names)
    y: Any = closed.jaxpr.outvars[0].aval
    spec = stretch.model.residual_spec
    shape = global_shape(y.shape, spec, stretch.mesh)
    struct = jax.ShapeDtypeStruct(shape, y.dtype, sharding=NamedSharding(stretch.mesh, spec))
    return replace(stretch, names=names, y=struct)


def trace_whole(stretch: Stretch) -> Traced:
    """Trace forward and backward as one function: (inputs, `dy`) -> [result, `dx`, gradients of its parameters]."""
    return _trace(stretch, lambda given: stretch.whole(given, given.get(DY)), stretch.all_inputs)


def _trace(stretch: Stretch, f: Any, given: Mapping[str, Any]) -> Traced:
    traced: list[compat.ClosedJaxpr] = []

    def named(inputs: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(given, inputs, strict=True))

    def capture(*inputs: Any) -> jax.Array:
        traced.append(jax.make_jaxpr(lambda *values: f(named(values)))(*inputs))
        return jnp.zeros(())

    specs = tuple(jax.tree.map(lambda struct: struct.sharding.spec, value) for value in given.values())
    jax.eval_shape(shard_mapped(capture, stretch.mesh, specs, P()), *given.values())
    return Traced(traced[0], [name for name, value in given.items() for _ in jax.tree.leaves(value)])


def crossing(aval: Any, mesh: Mesh, spec: P | None = None) -> jax.ShapeDtypeStruct:
    """Return the global form of a local value that crosses between programs, or between microbatches.

    It gets a leading dim over the axes it varies over (beyond those of `spec`, a parameter's own layout), so that every
    device keeps its own values and nothing is communicated.
    """
    own = spec_axes(spec) if spec is not None else frozenset()
    extra = tuple(a for a in live_axes(mesh) if a in compat.varying_axes_of(aval) and a not in own)
    full = P(extra or None, *(spec or ()))
    shape = global_shape((1, *aval.shape), full, mesh)
    return jax.ShapeDtypeStruct(shape, aval.dtype, sharding=NamedSharding(mesh, full))


def global_shape(local: Sequence[int], spec: P, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of the array of which every device holds `local`, laid out by `spec`."""
    shape = list(local)
    for dim, axes in enumerate(spec):
        for axis in () if axes is None else (axes,) if isinstance(axes, str) else axes:
            shape[dim] *= mesh.shape[axis]
    return tuple(shape)


@dataclass(frozen=True)
class Group:
    """Segments in a row that run the programs of a stretch, which has these segments or like ones."""

    stretch: Stretch
    names: tuple[str, ...]
    """Names of the group's parameters, in the order of the stretch's `names`."""
    later: int = 0
    """Number of layers between the stretch and the group."""


def like(first: Group, segments: Sequence[Segment], own: range) -> Group:
    """Return the group of segments `own` that runs the programs of a first one, whose segments are like them."""
    layer_of = {segments[a].layer: segments[b].layer for a, b in zip(first.stretch.segments, own, strict=True)}

    def renamed(name: str) -> str:
        layer = next(layer for layer in layer_of if name.startswith(f"{layer}."))
        return layer_of[layer] + name.removeprefix(layer)

    before, here = (int(segments[p.start].layer.rpartition(".")[2]) for p in (first.stretch.segments, own))
    return replace(first, names=tuple(map(renamed, first.names)), later=here - before)
