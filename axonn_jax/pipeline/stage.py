"""The compiled programs of one virtual stage: forward, backward whole or split, and evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax import compat
from axonn_jax.grid import BATCH_AXES
from axonn_jax.memory.activations import Activations
from axonn_jax.models.pieces import Piece
from axonn_jax.pipeline.split import Keep, Part, cut, keep_all, keep_matmuls, keep_none
from axonn_jax.tensor.clip import spec_axes
from axonn_jax.tensor.collectives import vary
from axonn_jax.tensor.params import Parts
from axonn_jax.tensor.region import live_axes, manual

_KEEP: dict[Activations, Keep] = {"none": keep_all, "full": keep_none, "dots": keep_matmuls}


class Sequenced(Protocol):
    """What a model must offer to be cut into stages."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """Its links in order."""

    @property
    def between(self) -> P:
        """Layout of what one piece hands to the next."""

    def stretch(
        self,
        first: int,
        last: int,
        x: jax.Array | None,
        tokens: jax.Array | None,
        *,
        dtype: jnp.dtype,
        key: jax.Array | None,
    ) -> jax.Array:
        """Runs pieces `first` to `last - 1`; the last piece gives the loss of every target."""


@dataclass(frozen=True)
class Work:
    """Sizes of a step, the same for all stages."""

    rows: int
    """Sequences of a microbatch, over all of `data` and `z`."""
    width: int
    """Tokens a sequence, one more than the model reads."""
    microbatches: int
    """Microbatches of a step."""
    dtype: jnp.dtype
    """What layers compute in and activations travel in."""
    activations: Activations
    """What the forward pass keeps."""

    @property
    def targets(self) -> int:
        """Target tokens of a step's global batch."""
        return self.rows * self.microbatches * (self.width - 1)


@dataclass
class Stage:
    """One virtual stage: which pieces it runs, what it needs, and its programs once compiled.

    Raises ``ValueError`` where two neighbouring stages would disagree on what travels between them.
    """

    parts: Parts
    """The whole model, with abstract parameters."""
    mesh: Mesh
    pieces: range
    first: bool
    last: bool
    work: Work
    keyed: bool
    """Whether the model drops out: its programs then take a key and the microbatch's number."""
    x: jax.ShapeDtypeStruct | None
    """What arrives (None for the first stage)."""
    names: tuple[str, ...] = ()
    """Parameters that the stage reads."""
    y: jax.ShapeDtypeStruct | None = None
    """What it sends on (None for the last stage)."""
    sums: dict[str, jax.ShapeDtypeStruct] = field(default_factory=dict)
    """Its gradients while they add up: float32, unreduced over `data` (see `_stacked`)."""
    programs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._closed, self._slots = self._trace()
        out = self._closed.jaxpr.outvars
        skip = 1 if self.first else 2
        reached = cut(self._closed, [[0]], range(len(self._slots)), [], [keep_all])[0].inputs
        self.names = tuple(self._slots[i] for i in reached if self._slots[i] in self.parts.params)
        self._gradients = {name: skip + i for i, name in enumerate(self.parts.params) if name in set(self.names)}
        model: Any = self.parts.rebuild(self.parts.params)
        y = out[0].aval
        if not self.last:
            shape = _global_shape(y.shape, model.between, self.mesh)
            self.y = jax.ShapeDtypeStruct(shape, y.dtype, sharding=NamedSharding(self.mesh, model.between))
        for name, place in self._gradients.items():
            self.sums[name] = self._struct(out[place].aval, self.parts.specs[name])

    # Tracing

    def _trace(self) -> tuple[Any, list[str]]:
        """Traces forward and backward as one local function; returns it and the names of its inputs."""
        work, params = self.work, self.parts.params
        tokens = jax.ShapeDtypeStruct((work.rows, work.width), jnp.int32)
        arguments: dict[str, tuple[Any, P]] = {name: (p, self.parts.specs[name]) for name, p in params.items()}
        model: Any = self.parts.rebuild(params)
        if self.x is not None:
            arguments[" x"] = (self.x, model.between)
        if self.first or self.last:
            arguments[" tokens"] = (tokens, P(BATCH_AXES))
        if self.keyed:
            arguments[" key"] = (jax.eval_shape(lambda: jax.random.key(0)), P())
            arguments[" microbatch"] = (jax.ShapeDtypeStruct((), jnp.uint32), P())
        slots = list(arguments)
        found: list[Any] = []

        def forward(params: Mapping[str, jax.Array], x: jax.Array | None, more: Mapping[str, jax.Array]) -> jax.Array:
            key = jax.random.fold_in(more[" key"], more[" microbatch"]) if self.keyed else None
            run: Any = self.parts.rebuild(params)
            out = run.stretch(self.pieces.start, self.pieces.stop, x, more.get(" tokens"), dtype=work.dtype, key=key)
            return jnp.sum(out) if self.last else out

        def whole(*inputs: jax.Array) -> list[Any]:
            given = dict(zip(slots, inputs, strict=False))
            # Varying over data and z on purpose: gradients then stay unreduced over both (see `StageProgram`).
            own = {name: vary(given[name], BATCH_AXES) for name in params}
            y, pull = jax.vjp(lambda p, x: forward(p, x, given), own, given.get(" x"))
            dy = inputs[len(slots)] if not self.last else None
            if dy is None:  # the loss is the mean over all targets of the step
                dy = vary(jnp.full(y.shape, 1.0 / work.targets, y.dtype), compat.varying_axes(y))
            dp, dx = pull(dy)
            return [y, *([] if self.first else [dx]), *(dp[name] for name in params)]

        def capture(*inputs: jax.Array) -> jax.Array:
            more = []
            if not self.last:
                y = jax.eval_shape(lambda *a: forward(*_sorted(a, slots, params)), *inputs)
                more = [vary(jnp.zeros(y.shape, y.dtype), spec_axes(model.between))]
            found.append(jax.make_jaxpr(whole)(*inputs, *more))
            return jnp.zeros(())

        specs = tuple(spec for _, spec in arguments.values())
        structs = [value for value, _ in arguments.values()]
        jax.eval_shape(manual(capture, self.mesh, specs, P()), *structs)
        return found[0], [*slots, *([] if self.last else [" dy"])]

    def _struct(self, aval: Any, spec: P | None = None) -> jax.ShapeDtypeStruct:
        """The global form of a local value that crosses between programs, or between microbatches.

        It gets a leading dim over the axes it varies over (beyond those of `spec`, a parameter's own layout), so
        that every device keeps what it has and nothing is communicated.
        """
        own = spec_axes(spec) if spec is not None else frozenset()
        extra = tuple(a for a in live_axes(self.mesh) if a in compat.varying_axes_of(aval) and a not in own)
        full = P(extra or None, *(spec or ()))
        shape = _global_shape((1, *aval.shape), full, self.mesh)
        return jax.ShapeDtypeStruct(shape, aval.dtype, sharding=NamedSharding(self.mesh, full))

    # Programs

    def compile(self, *, split: bool) -> None:
        """Compiles forward and backward, the latter as one program or as two (`split`)."""
        dx = [] if self.first else [1]
        gradients = list(self._gradients.values())
        goals = [[0], dx, gradients] if split else [[0], dx + gradients]
        free = [i for i, name in enumerate(self._slots) if name in self.parts.params]
        held = free + [i for i, name in enumerate(self._slots) if name in (" tokens", " key", " microbatch")]
        chain = cut(self._closed, goals, held, free, [_KEEP[self.work.activations], keep_all, keep_all])
        self._handed = [[self._struct(var.aval) for var in part.handed] for part in chain]
        self._chain = chain
        names = ["F", "I", "W"] if split else ["F", "B"]
        for number, (name, part) in enumerate(zip(names, chain, strict=True)):
            self.programs[name] = self._compile(number, part, adds=name in "BW")
        self.programs["zero"] = self._zero()

    def _compile(self, number: int, part: Part, *, adds: bool) -> Any:
        inputs = [self._input(i) for i in part.inputs]
        taken = [self._handed[source][position] for source, position in part.taken]
        sums = self.sums if adds else {}
        heads = [i for i in part.outputs if i not in set(self._gradients.values())]
        results = [self._output(i) for i in heads]
        where = {place: name for name, place in self._gradients.items()}

        def body(inputs: list[Any], taken: list[Any], sums: dict[str, Any]) -> tuple[Any, ...]:
            out, handed = part(inputs, [value[0] for value in taken])
            values = dict(zip(part.outputs, out, strict=True))
            sums = {where[i]: sums[where[i]] + values[i][None] for i in values if i in where}
            tops = [values[i][None] if i == 0 and self.last else values[i] for i in heads]
            # The last result tells that the program has run: unlike the sums it is never donated.
            return tops, [value[None] for value in handed], sums, jnp.zeros((), jnp.int32)

        arguments = (inputs, taken, sums)
        outputs = (results, self._handed[number], sums, self.done)
        specs = jax.tree.map(lambda s: s.sharding.spec, (arguments, outputs))
        run = manual(body, self.mesh, specs[0], specs[1])
        shardings = jax.tree.map(lambda s: s.sharding, outputs)
        return jax.jit(run, donate_argnums=2, out_shardings=shardings).lower(*arguments).compile()

    @property
    def done(self) -> jax.ShapeDtypeStruct:
        """A program's last result."""
        return jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(self.mesh, P()))

    def _input(self, position: int) -> jax.ShapeDtypeStruct:
        name, replicated = self._slots[position], NamedSharding(self.mesh, P())
        if name in self.parts.params:
            p = self.parts.params[name]
            return jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=NamedSharding(self.mesh, self.parts.specs[name]))
        if name == " tokens":
            return self.tokens
        if name == " key":
            key = jax.eval_shape(lambda: jax.random.key(0))
            return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated)
        if name == " microbatch":
            return jax.ShapeDtypeStruct((), jnp.uint32, sharding=replicated)
        struct = self.x if name == " x" else self.y
        assert struct is not None
        return struct

    @property
    def tokens(self) -> jax.ShapeDtypeStruct:
        """Layout of a microbatch's tokens."""
        shape = (self.work.rows, self.work.width)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(self.mesh, P(BATCH_AXES)))

    def _output(self, position: int) -> jax.ShapeDtypeStruct:
        if position == 0 and self.last:
            return self._struct(self._closed.jaxpr.outvars[0].aval)
        struct = self.y if position == 0 else self.x
        assert struct is not None
        return struct

    def _zero(self) -> Any:
        shardings = {name: s.sharding for name, s in self.sums.items()}

        def zeros() -> dict[str, jax.Array]:
            return {name: jnp.zeros(s.shape, s.dtype) for name, s in self.sums.items()}

        return jax.jit(zeros, out_shardings=shardings).lower().compile()


def _sorted(inputs: Sequence[Any], slots: list[str], params: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    given = dict(zip(slots, inputs, strict=True))
    return {name: given[name] for name in params}, given.get(" x"), given


def _global_shape(local: Sequence[int], spec: P, mesh: Mesh) -> tuple[int, ...]:
    shape = list(local)
    for dim, axes in enumerate(spec):
        for axis in () if axes is None else (axes,) if isinstance(axes, str) else axes:
            shape[dim] *= mesh.shape[axis]
    return tuple(shape)
