"""Results of a loss under every strategy, and of all rows at once on one device, for comparison."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.any_flax.modules.batches import TreeBatches
from axonn_jax.any_flax.modules.differences import HALF, SINGLE, Run, at_points, constant_key
from axonn_jax.any_flax.modules.loss_model import Strategy
from axonn_jax.any_flax.modules.metrics import averaged
from axonn_jax.any_flax.modules.program import LossProgram
from axonn_jax.core.backend.small_products import compile_traced, jitted
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import without_mesh
from axonn_jax.core.tensor.params import Params
from axonn_jax.core.tensor.specs import values_of

_SMALL, _ROOM = 2**30, 2**31
"""Bytes of parameters, and of temporaries, up to which a single device computes the loss of all rows."""


class Comparison:
    """Programs of a loss whose results are compared; each is compiled once.

    Args:
        program: The program of the loss.
        batches: The layout of batches.
        gradients: True to compare gradients as well as the loss, its metrics and its state.
    """

    def __init__(self, program: LossProgram, batches: TreeBatches, *, gradients: bool):
        self._program, self._batches, self._gradients = program, batches, gradients
        self._mesh = program.grid.mesh
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._share, self._half = 1.0, False

    @property
    def rounding(self) -> float:
        """Relative rounding of a weight in the precision that the loss computes in."""
        return HALF if self._half else SINGLE

    def all_rows(self, params: Params, carried: Params, batch: Any) -> tuple[Run, Any]:
        """Return a function that computes the loss of all rows at once, and the rows it uses.

        A single device computes it if parameters and temporaries fit; a large batch is cut to its first rows.

        Args:
            params: Parameters by path.
            carried: State by path.
            batch: This process's rows, on the host.
        """
        if jax.process_count() == 1 and sum(value.size * value.dtype.itemsize for value in params.values()) <= _SMALL:
            with without_mesh():
                return self._single_device(params, carried, batch)
        batch, at_once = self._batches.first(batch, 1 / self._batches.microbatches), self._batches.at_once()
        self._half = _computes_in_half(jax.make_jaxpr(self._plain_loss)(params, carried, values_of(batch)))
        run = self.run("whole", at_once, params, carried, batch)
        try:
            run(0.0)
        except UserError:
            raise
        except Exception:  # the layers' manual regions may not compile with this model
            run = self.run("xla", at_once, params, carried, batch)
        return run, batch

    def run(self, strategy: Strategy, batches: TreeBatches, params: Params, carried: Params, batch: Any) -> Run:
        """Return a function that computes the loss of a batch under a strategy.

        Args:
            strategy: The strategy.
            batches: The layout of the batch.
            params: Parameters by path.
            carried: State by path.
            batch: This process's rows, on the host.
        """
        program = replace(self._program, strategy=strategy)

        def run(params: Params, carried: Params, batch: Any) -> Any:
            result = program.forward(
                {**params}, carried, batch, constant_key(), training=True, gradients=self._gradients
            )
            return (result.loss, result.aux, result.carried), result.grads

        form = (strategy, batches.microbatches)
        if form not in self._compiled:
            grads = program.shardings() if self._gradients else None
            self._compiled[form] = jitted(run, out_shardings=(NamedSharding(self._mesh, P()), grads))
        inputs = (carried, batches.shard(batch))
        return partial(at_points, lambda params: self._compiled[form](params, *inputs), params, self._mesh)

    def traced(self, strategy: Strategy, params: Params, carried: Params, batch: Any) -> None:
        """Trace the loss and its gradients under a strategy, without compiling; exceptions of the loss pass through."""
        program = replace(self._program, strategy=strategy)
        run = partial(program.forward, training=True, gradients=True)
        jax.eval_shape(run, params, carried, self._batches.shard(batch), constant_key())

    def _single_device(self, params: Params, carried: Params, batch: Any) -> tuple[Run, Any]:
        """Return a function that computes the loss on one device, and the rows it uses, fewer if memory is short."""
        device = self._mesh.local_devices[0]
        batch = self._batches.first(batch, self._share)
        inputs = jax.device_put((carried, values_of(batch)), device)
        if (form := str(jax.tree.map(jnp.shape, inputs))) not in self._compiled:
            traced = jax.jit(self._plain_loss).trace(jax.device_put(params, device), *inputs)
            self._half = _computes_in_half(traced.jaxpr)
            self._compiled[form] = compiled = compile_traced(traced)
            room = compiled.memory_analysis()
            # Temporaries grow with the rows, so retry once with proportionally fewer.
            if room is not None and room.temp_size_in_bytes > _ROOM and self._share == 1.0:
                self._share = _ROOM / room.temp_size_in_bytes
                return self._single_device(params, carried, batch)

        def run(params: Params) -> Any:
            with without_mesh():
                results, grads = self._compiled[form](jax.device_put(params, device), *inputs)
            return results, jax.device_put(grads, self._program.shardings()) if self._gradients else {}

        return partial(at_points, run, params, self._mesh), batch

    def _plain_loss(self, params: Params, carried: Params, rows: Any) -> Any:
        key = jax.random.fold_in(constant_key(), 0)  # the key of a single part

        def part(params: Params) -> Any:
            result = self._program.model.run(params, carried, key, rows, training=True, strategy="xla")
            return result.loss, (averaged(1.0, result.aux), result.carried)

        if self._gradients:
            (loss, (aux, changed)), grads = jax.value_and_grad(part, has_aux=True)(params)
            return (loss, aux, changed), grads
        loss, (aux, changed) = part(params)
        return (loss, aux, changed), {}


def _computes_in_half(traced: Any) -> bool:
    text = str(traced)
    return any(f"{name}[" in text for name in ("bf16", "f16"))
