"""Trace of a user's loss on one microbatch, as a flat program whose inputs and results have names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal, Var
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.any_flax.modules.batches import rows_of, with_rows
from axonn_jax.any_flax.modules.loss_model import REPLICAS, LossModel, unsharded
from axonn_jax.any_flax.modules.metrics import averaged, share_of
from axonn_jax.any_flax.rewriting import in_fast_forms
from axonn_jax.core import compat
from axonn_jax.core.tensor.params import key_of
from axonn_jax.core.tensor.specs import Replicated, is_replicated, size_over


class TraceSlot(NamedTuple):
    """Name of an input or a result of a traced loss."""

    kind: str
    """Kind of an input: "param", "state", "rows", "fixed" (arrays of the batch without rows), "key", "number", "share",
    "scale"; or of a result: "loss", "aux", "state"."""
    name: str = ""
    """Path of a parameter or of state, or the number of an array of the batch or of a metric."""


@dataclass(frozen=True)
class LossTrace:
    """A loss traced on the microbatch of one replica."""

    closed: compat.ClosedJaxpr
    inputs: tuple[TraceSlot, ...]
    results: tuple[TraceSlot, ...]
    aux: Any
    """Structure of the metrics."""


@dataclass(frozen=True)
class Replicas:
    """Replicas of a model on the mesh of a stage, for which a program traced for one of them runs side by side."""

    mesh: Mesh

    @property
    def manual(self) -> bool:
        """True if every replica is one device: they share a manual region. Otherwise layers bring regions of their own,
        into whose layouts `jax.vmap` puts `data`."""
        return unsharded(self.mesh)

    @property
    def count(self) -> int:
        """Number of replicas."""
        return int(self.mesh.shape["data"])

    def traced(self, f: Callable[..., Any], structs: Sequence[Any]) -> compat.ClosedJaxpr:
        """Trace a function of one replica's arrays, in which the axis `REPLICAS` is bound."""
        if not self.manual:
            with jax.set_mesh(self.mesh):
                return jax.make_jaxpr(f, axis_env=[(REPLICAS, self.count)])(*structs)
        found: list[compat.ClosedJaxpr] = []

        # Trace inside the region: equations keep the mesh that they are traced under, and run under no other.
        def capture(*arrays: Any) -> jax.Array:
            found.append(jax.make_jaxpr(f)(*arrays))
            return jnp.zeros(())

        jax.eval_shape(self.region(capture, P(), P()), *structs)
        return found[0]

    def region(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Return `f` in a manual region over replicas of one device each, in which the axis `REPLICAS` is bound."""
        # The axis has the name over which BatchNorm averages, as it has under `jax.vmap`.
        mesh = Mesh(self.mesh.devices.reshape(-1), (REPLICAS,), axis_types=(AxisType.Auto,))
        mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

        def run(*args: Any) -> Any:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return mapped(*args)

        return run

    def row_axes(self, rows: int) -> str | None:
        """Return the axis over which the rows of a replica are split."""
        z = size_over(self.mesh, ("z",))
        return "z" if z > 1 and rows % z == 0 else None

    def struct(self, shape: Sequence[int], dtype: Any, spec: P = P()) -> jax.ShapeDtypeStruct:  # noqa: B008
        """Return an abstract array on the mesh."""
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(self.mesh, spec))

    def by_replica(self, aval: Any, spec: P = P()) -> jax.ShapeDtypeStruct:  # noqa: B008
        """Return an abstract array that has a value of every replica, [replicas, ...].

        Args:
            aval: Shape and dtype of the value.
            spec: Layout of the value within a replica.
        """
        return self.struct((self.count, *aval.shape), aval.dtype, P("data", *spec))


def trace_loss(
    model: LossModel,
    replicas: Replicas,
    params: Mapping[str, Any],
    state: Mapping[str, Any],
    batch: Any,
    *,
    training: bool,
) -> LossTrace:
    """Trace the loss of a microbatch of one replica.

    Args:
        model: The model and its loss, laid out on the mesh.
        replicas: Replicas on the mesh.
        params: Shapes of the trained parameters, by path.
        state: Shapes of the other arrays, by path.
        batch: Shapes of one replica's rows of a microbatch, in the tree of the batch.
        training: True for a training step, False for an evaluation.
    """
    fixed = [leaf.value for leaf in jax.tree.leaves(batch, is_leaf=is_replicated) if is_replicated(leaf)]
    fixed_leaves, fixed_tree = jax.tree.flatten(fixed)
    draws = training and model.draws
    struct = jax.ShapeDtypeStruct
    inputs: dict[TraceSlot, Any] = {TraceSlot("param", n): struct(p.shape, jnp.float32) for n, p in params.items()}
    inputs |= {TraceSlot("state", name): struct(value.shape, value.dtype) for name, value in state.items()}
    for kind, leaves in (("rows", rows_of(batch)), ("fixed", fixed_leaves)):
        inputs |= {TraceSlot(kind, str(at)): struct(leaf.shape, leaf.dtype) for at, leaf in enumerate(leaves)}
    inputs |= {TraceSlot(kind): jax.ShapeDtypeStruct((), jnp.float32) for kind in ("share", "scale")}
    if draws:
        inputs[TraceSlot("key")] = jax.eval_shape(lambda: key_of(0))
        inputs[TraceSlot("number")] = jax.ShapeDtypeStruct((), jnp.uint32)
    results: list[TraceSlot] = []
    structure: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        by_slot = dict(zip(inputs, arrays, strict=True))

        def of(kind: str) -> dict[str, Any]:
            return {slot.name: value for slot, value in by_slot.items() if slot.kind == kind}

        key = None
        if draws:
            # Parts draw as those of a loss without a pipeline do: `data = 2` with 4 microbatches as 1 with 8.
            number = by_slot[TraceSlot("number")] * jnp.uint32(replicas.count)
            key = jax.random.fold_in(by_slot[TraceSlot("key")], number + lax.axis_index(REPLICAS).astype(jnp.uint32))
        values = iter(jax.tree.unflatten(fixed_tree, list(of("fixed").values())))
        tree = jax.tree.map(
            lambda leaf: Replicated(next(values)) if is_replicated(leaf) else leaf, batch, is_leaf=is_replicated
        )
        rows = with_rows(tree, list(of("rows").values()))
        result = model.run(of("param"), of("state"), key, rows, training=training, strategy="parts")
        share = by_slot[TraceSlot("share")]
        loss = share_of(result.loss, share) * by_slot[TraceSlot("scale")]
        leaves, tree = jax.tree.flatten(averaged(share, result.aux))
        structure[:] = [tree]
        results[:] = [TraceSlot("loss"), *(TraceSlot("aux", str(at)) for at in range(len(leaves)))]
        results.extend(TraceSlot("state", name) for name in sorted(result.carried))
        return [loss, *leaves, *(result.carried[name] for name in sorted(result.carried))]

    closed = inlined(replicas.traced(in_fast_forms(flat), list(inputs.values())))
    return LossTrace(closed, tuple(inputs), tuple(results), structure[-1])


def inlined(closed: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    """Return the program with the bodies of all inner `jit` programs in their place, so that it can be cut in them."""
    eqns: list[Any] = []
    consts: dict[Var, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def walk(jaxpr: Any, env: dict[Var, Any]) -> None:
        def read(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else env.get(atom, atom)

        for eqn in jaxpr.eqns:
            invars = [read(atom) for atom in eqn.invars]
            # A layer's call stays one equation in a trace that follows layers; here nothing needs its name.
            if eqn.primitive.name in ("jit", "closed_call", "core_call"):
                inner = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
                below = dict(zip(inner.jaxpr.invars, invars, strict=True))
                for var, value in zip(inner.jaxpr.constvars, inner.consts, strict=True):
                    below[var] = Var(var.aval)
                    consts[below[var]] = value
                walk(inner.jaxpr, below)
                for var, atom in zip(eqn.outvars, inner.jaxpr.outvars, strict=True):
                    env[var] = atom if isinstance(atom, Literal) else below.get(atom, atom)
                continue
            # The same body may stand in the program several times: give each its own variables.
            outvars = [Var(var.aval) for var in eqn.outvars]
            env.update(zip(eqn.outvars, outvars, strict=True))
            eqns.append(eqn.replace(invars=invars, outvars=outvars))

    env: dict[Var, Any] = {}
    walk(closed.jaxpr, env)
    outvars = [atom if isinstance(atom, Literal) else env.get(atom, atom) for atom in closed.jaxpr.outvars]
    jaxpr = closed.jaxpr.replace(constvars=list(consts), eqns=eqns, outvars=outvars)
    return compat.part_of(compat.ClosedJaxpr(jaxpr, list(consts.values())), [True] * len(outvars), all_inputs=True)
