"""Results of a loss in the ways that it may run, beside those of all rows at once on one device."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.backend.small_products import compile_traced, jitted
from axonn_jax.errors import UserError
from axonn_jax.grid import without_mesh
from axonn_jax.tensor.params import Params
from axonn_jax.tensor.specs import values_of
from axonn_jax.train.modules.apart import Way
from axonn_jax.train.modules.batches import TreeBatches
from axonn_jax.train.modules.numbers import averaged
from axonn_jax.train.modules.probes import HALF, SINGLE, Run, at_points, constant_key
from axonn_jax.train.modules.program import LossProgram

_SMALL, _ROOM = 2**30, 2**31
"""Bytes of parameters, and of temporaries, up to which one device computes the loss of all rows."""


class Comparison:
    """Programs of a loss whose results are compared, each compiled once.

    Args:
        program: The program of the loss.
        batches: The form of batches.
        gradients: True if gradients are compared too, and not the loss, its numbers and its state alone.
    """

    def __init__(self, program: LossProgram, batches: TreeBatches, *, gradients: bool):
        self._program, self._batches, self._gradients = program, batches, gradients
        self._mesh = program.grid.mesh
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._share, self._half = 1.0, False

    @property
    def rounding(self) -> float:
        """Rounding of a weight, in the precision that the loss computes in."""
        return HALF if self._half else SINGLE

    def all_rows(self, params: Params, carried: Params, batch: Any) -> tuple[Run, Any]:
        """Return the results of all rows at once, by one device where it has room, and the rows."""
        if jax.process_count() == 1 and sum(value.size * value.dtype.itemsize for value in params.values()) <= _SMALL:
            with without_mesh():
                return self._alone(params, carried, batch)
        batch, at_once = self._batches.first(batch, 1 / self._batches.microbatches), self._batches.at_once()
        self._half = _computes_in_half(jax.make_jaxpr(self._run_alone)(params, carried, values_of(batch)))
        run = self.run("whole", at_once, params, carried, batch)
        try:
            run(0.0)
        except UserError:
            raise
        except Exception:  # of jax's manual axes
            run = self.run("xla", at_once, params, carried, batch)
        return run, batch

    def run(self, way: Way, batches: TreeBatches, params: Params, carried: Params, batch: Any) -> Run:
        """Return the results of a batch in a way."""
        program = replace(self._program, way=way)

        def run(params: Params, carried: Params, batch: Any) -> Any:
            result = program.forward(
                {**params}, carried, batch, constant_key(), training=True, gradients=self._gradients
            )
            return (result.loss, result.aux, result.carried), result.grads

        form = (way, batches.microbatches)
        if form not in self._compiled:
            grads = program.shardings() if self._gradients else None
            self._compiled[form] = jitted(run, out_shardings=(NamedSharding(self._mesh, P()), grads))
        rest = (carried, batches.shard(batch))
        return partial(at_points, lambda params: self._compiled[form](params, *rest), params, self._mesh)

    def traced(self, way: Way, params: Params, carried: Params, batch: Any) -> None:
        """Trace the loss with its gradients in a way; raises what it raises there."""
        program = replace(self._program, way=way)
        run = partial(program.forward, training=True, gradients=True)
        jax.eval_shape(run, params, carried, self._batches.shard(batch), constant_key())

    def _alone(self, params: Params, carried: Params, batch: Any) -> tuple[Run, Any]:
        """Return the results of one device, and the rows, of a batch that is too large the first of every part."""
        device = self._mesh.local_devices[0]
        batch = self._batches.first(batch, self._share)
        rest = jax.device_put((carried, values_of(batch)), device)
        if (form := str(jax.tree.map(jnp.shape, rest))) not in self._compiled:
            traced = jax.jit(self._run_alone).trace(jax.device_put(params, device), *rest)
            self._half = _computes_in_half(traced.jaxpr)
            self._compiled[form] = compiled = compile_traced(traced)
            room = compiled.memory_analysis()
            if room is not None and room.temp_size_in_bytes > _ROOM and self._share == 1.0:
                self._share = _ROOM / room.temp_size_in_bytes
                return self._alone(params, carried, batch)

        def run(params: Params) -> Any:
            with without_mesh():
                results, grads = self._compiled[form](jax.device_put(params, device), *rest)
            return results, jax.device_put(grads, self._program.shardings()) if self._gradients else {}

        return partial(at_points, run, params, self._mesh), batch

    def _run_alone(self, params: Params, carried: Params, rows: Any) -> Any:
        key = jax.random.fold_in(constant_key(), 0)  # as of the one part

        def part(params: Params) -> Any:
            result = self._program.model.run(params, carried, key, rows, training=True, way="xla")
            return result.loss, (averaged(1.0, result.aux), result.carried)

        if self._gradients:
            (loss, (aux, changed)), grads = jax.value_and_grad(part, has_aux=True)(params)
            return (loss, aux, changed), grads
        loss, (aux, changed) = part(params)
        return (loss, aux, changed), {}


def _computes_in_half(traced: Any) -> bool:
    text = str(traced)
    return any(f"{name}[" in text for name in ("bf16", "f16"))
