"""Traces of consecutive model segments on local shards: inputs, outputs, forward and backward pass."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core import compat
from axonn_jax.core.grid import BATCH_AXES
from axonn_jax.core.models.declared.segments import Segment
from axonn_jax.core.models.packed import balance_of, inputs_of, targets_of, values_of
from axonn_jax.core.models.protocol import Model
from axonn_jax.core.options import Activations
from axonn_jax.core.pruned.layout import PrunedLayout
from axonn_jax.core.tensor.collectives import mark_varying
from axonn_jax.core.tensor.elementwise import DropoutKey
from axonn_jax.core.tensor.params import SplitModule, key_of
from axonn_jax.core.tensor.specs import live_axes, shard_mapped, spec_axes
from axonn_jax.core.tensor.weight_gather import Weights, cast_for_reduction, trained, training
from axonn_jax.pipe.stages.partition_jaxpr import cut

X, TOKENS, KEY, MICROBATCH, LAYER_OFFSET, DY, SCALE = " x", " tokens", " key", " microbatch", " later", " dy", " scale"
"""Names of a stage's non-parameter inputs. The leading space keeps them distinct from parameter names."""


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step, the same for all stages."""

    rows: int
    """Sequences of a microbatch, over all of `data` and `z`."""
    width: int
    """Tokens per sequence, one more than the model reads."""
    microbatches: int
    """Microbatches per step."""
    dtype: jnp.dtype
    """Dtype of the layers' computation and of the activations sent between stages."""
    activations: Activations
    """Policy for the activations that the forward pass saves (`memory.remat`)."""
    sums: jnp.dtype
    """Dtype in which gradients accumulate over microbatches."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive segments of a model on a mesh."""

    parts: SplitModule
    """The full model, with abstract parameters."""
    mesh: Mesh
    segments: range
    total: int
    """Number of segments in the full model."""
    work: StepShape
    keyed: bool
    """True for dropout, which takes a key, a microbatch number and an offset of layer numbers."""
    x: jax.ShapeDtypeStruct | None
    """Incoming activations; None for the first stretch."""
    names: tuple[str, ...] = ()
    """Parameters that the stretch reads; filled in by `survey`, like `y`."""
    y: jax.ShapeDtypeStruct | None = None
    """Outgoing activations; None for the last stretch."""
    forms: PrunedLayout | None = None
    """Layout of the pruned parameters."""

    @property
    def first(self) -> bool:
        """True if the stretch starts from the tokens, without incoming activations."""
        return self.segments.start == 0

    @property
    def last(self) -> bool:
        """True if the stretch ends with the loss."""
        return self.segments.stop == self.total

    @property
    def reads_tokens(self) -> bool:
        """True if the stretch takes the tokens: the first, the last, and every one if the model's layers read them."""
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
        """Return the global shape and sharding of every input, keyed by name.

        Args:
            names: Parameters to include. A pruned parameter is a pytree of arrays rather than a single one.
        """

        def struct(array: Any, spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(self.mesh, spec))

        params = {**self.parts.params, **self._pruned_structs()}
        # The order of this dict is the order of the traced function's arguments: parameters come first.
        structs = {
            name: jax.tree.map(lambda leaf, spec=self.parts.specs[name]: struct(leaf, spec), params[name])
            for name in names
        }
        if self.x is not None:
            structs[X] = self.x
        if self.reads_tokens:
            structs[TOKENS] = struct(jax.ShapeDtypeStruct((self.work.rows, self.work.width), jnp.int32), P(BATCH_AXES))
        if self.keyed:
            structs[KEY] = struct(jax.eval_shape(lambda: key_of(0)), P())
            structs[MICROBATCH] = struct(jax.ShapeDtypeStruct((), jnp.uint32), P())
            structs[LAYER_OFFSET] = struct(jax.ShapeDtypeStruct((), jnp.uint32), P())
        if self.counts:
            structs[SCALE] = struct(jax.ShapeDtypeStruct((), jnp.float32), P())
        return structs

    def _pruned_structs(self) -> Weights:
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
        self, params: Mapping[str, jax.Array], inputs: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array | None]:
        """Run the forward pass on local shards.

        Args:
            params: Trained parameters to differentiate with respect to, by name.
            inputs: All other inputs, by name; also the weights as they are stored.

        Returns:
            The outgoing activations and the layers' balance losses (None without any). The last stretch returns the
            sum of the local targets' losses instead, and None: its loss already carries the balance gradients.
        """
        key = None
        if self.keyed:
            key = DropoutKey(inputs[KEY], inputs[LAYER_OFFSET], inputs[MICROBATCH])
        weights = self._weights(inputs)
        # Constants of the vjp: marking them varying adds no all-reduce to the backward pass.
        frozen = {
            name: mark_varying(inputs[name], self.model.token_axes) for name in self.parts.frozen if name in inputs
        }
        local_params = {**frozen, **training(weights, params, self.work.sums)}
        model: Any = self.parts.merge({**self.parts.params, **local_params})
        if self.first:
            x = model.embed(inputs_of(model, inputs[TOKENS]), self.work.dtype, key)
        else:
            x = model.continued(inputs[X], inputs[TOKENS] if model.reads_words else None)
        for number in self.segments:
            x = model.run_segment(number, x, key)
        if not self.last:
            return values_of(x), balance_of(x)
        return model.total_loss(x, *targets_of(model, inputs[TOKENS])), None

    def trained_params(self, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Return the trained parameters, marked varying over the axes on which their gradients stay partial sums."""
        axes, weights, parts = self.model.token_axes, self._weights(inputs), self.parts
        return {
            name: mark_varying(trained(weight, self.work.sums), parts.sum_axes(name, axes))
            for name, weight in weights.items()
        }

    def _weights(self, inputs: Mapping[str, Any]) -> Weights:
        return {name: inputs[name] for name in self.parts.trained if name in inputs}

    def forward_backward(self, inputs: Mapping[str, Any], dy: jax.Array | None) -> list[jax.Array]:
        """Run the forward and backward pass on local shards.

        Returns:
            The forward result, the gradient of `x` if the stretch has one, and the parameters' gradients.
        """
        other_inputs = {name: value for name, value in inputs.items() if name != X}
        x = inputs.get(X)

        def forward(params: Mapping[str, jax.Array], x: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
            return self.forward(params, other_inputs if x is None else {**other_inputs, X: x})

        params = cast_for_reduction(self.work.sums, self.trained_params(inputs), self.parts.specs)
        (y, balance), pull = jax.vjp(forward, params, x)

        # Seed with the loss scale over the step's target count, so that microbatch gradients simply add up to the
        # gradient of the mean over all counted targets.
        def seed(loss: jax.Array) -> jax.Array:
            return mark_varying(jnp.full(loss.shape, inputs[SCALE], loss.dtype), compat.varying_axes(loss))

        dp, dx = pull((seed(y) if dy is None else dy, None if balance is None else seed(balance)))
        return [y, *([] if x is None else [dx]), *(dp[name] for name in inputs if name in dp)]


class Traced(NamedTuple):
    """A function traced on local shards."""

    closed: compat.ClosedJaxpr
    names: list[str]
    """Name of the input that each flat argument belongs to."""


def survey(stretch: Stretch) -> Stretch:
    """Return the stretch with `names` and `y` filled in, from an abstract trace of its forward pass."""
    structs = stretch.inputs(stretch.parts.params)
    closed, arrays = _trace(
        stretch, lambda inputs: [stretch.forward(stretch.trained_params(inputs), inputs)[0]], structs
    )
    # `cut` keeps only the inputs that the output depends on: the trace itself has all of the model's parameters.
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


def trace_forward_backward(stretch: Stretch) -> Traced:
    """Trace forward and backward as one function: (inputs, `dy`) -> [result, `dx`, parameter gradients]."""
    return _trace(stretch, lambda inputs: stretch.forward_backward(inputs, inputs.get(DY)), stretch.all_inputs)


def _trace(stretch: Stretch, f: Any, structs: Mapping[str, Any]) -> Traced:
    traced: list[compat.ClosedJaxpr] = []

    def by_name(arrays: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(structs, arrays, strict=True))

    # Trace inside the manual region, not around it: the jaxpr must be that of local shards, whose equations `cut`
    # moves between programs that are each put into a manual region again.
    def capture(*arrays: Any) -> jax.Array:
        traced.append(jax.make_jaxpr(lambda *values: f(by_name(values)))(*arrays))
        return jnp.zeros(())

    specs = tuple(jax.tree.map(lambda struct: struct.sharding.spec, value) for value in structs.values())
    jax.eval_shape(shard_mapped(capture, stretch.mesh, specs, P()), *structs.values())
    return Traced(traced[0], [name for name, value in structs.items() for _ in jax.tree.leaves(value)])


def boundary_struct(aval: Any, mesh: Mesh, spec: P | None = None) -> jax.ShapeDtypeStruct:
    """Return the global form of a local value that crosses between programs, or between microbatches.

    A leading dim spans the mesh axes over which the value varies, beyond those of `spec` (a parameter's own layout):
    every device keeps its own values and nothing is communicated.
    """
    param_axes = spec_axes(spec) if spec is not None else frozenset()
    extra = tuple(a for a in live_axes(mesh) if a in compat.varying_axes_of(aval) and a not in param_axes)
    full = P(extra or None, *(spec or ()))
    shape = global_shape((1, *aval.shape), full, mesh)
    return jax.ShapeDtypeStruct(shape, aval.dtype, sharding=NamedSharding(mesh, full))


def global_shape(local: Sequence[int], spec: P, mesh: Mesh) -> tuple[int, ...]:
    """Return the global shape of an array whose shard on every device has shape `local` under `spec`."""
    shape = list(local)
    for dim, axes in enumerate(spec):
        for axis in () if axes is None else (axes,) if isinstance(axes, str) else axes:
            shape[dim] *= mesh.shape[axis]
    return tuple(shape)


@dataclass(frozen=True)
class Group:
    """Consecutive segments that run the programs of a stretch: the stretch's own segments, or identical ones."""

    stretch: Stretch
    names: tuple[str, ...]
    """Names of the group's parameters, in the order of the stretch's `names`."""
    layer_offset: int = 0
    """Number of layers between the stretch and the group."""


def shifted_group(first: Group, segments: Sequence[Segment], target: range) -> Group:
    """Return the group of the `target` segments, identical to those of `first`, whose programs it reuses."""
    source = first.stretch.segments
    layer_of = {segments[a].layer: segments[b].layer for a, b in zip(source, target, strict=True)}

    def renamed(name: str) -> str:
        layer = next(layer for layer in layer_of if name.startswith(f"{layer}."))
        return layer_of[layer] + name.removeprefix(layer)

    # Dropout keys are derived from layer numbers. With the offset passed as an input, layers of the two groups draw
    # different masks although they share a program.
    source_layer, target_layer = (int(segments[p.start].layer.rpartition(".")[2]) for p in (source, target))
    return replace(first, names=tuple(map(renamed, first.names)), layer_offset=target_layer - source_layer)
