"""Regions in which a stage's programs run: how values of single devices are laid out between programs."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from axonn_jax.core.backend.small_products import compile_traced
from axonn_jax.core.tensor.specs import shard_mapped
from axonn_jax.pipe.stages.trace import boundary_struct


class Region(ABC):
    """Layout of a stage's programs over its devices, and the form of values between two programs."""

    mesh: Mesh

    @abstractmethod
    def boxed(self, aval: Any) -> jax.ShapeDtypeStruct | None:
        """Return the global form of a value between two programs; None leaves its layout to the compiler."""

    @abstractmethod
    def box(self, value: jax.Array) -> jax.Array:
        """Return a value in the form that `boxed` describes, inside a program."""

    @abstractmethod
    def unbox(self, value: jax.Array) -> jax.Array:
        """Return the value of a form that `box` has made."""

    @abstractmethod
    def compile(self, body: Callable[..., Any], arguments: Any, outputs: Any) -> tuple[jax.stages.Compiled, Any]:
        """Compile a program that donates its third argument.

        Args:
            body: Function of the arguments, as the region sees them.
            arguments: Shapes and layouts of the arguments.
            outputs: Shapes and layouts of the results; None where the compiler chooses.

        Returns:
            The program, and shapes and layouts of all results.
        """


class LocalShards(Region):
    """One manual region of local shards, for a model with its own collectives."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh

    def boxed(self, aval: Any) -> jax.ShapeDtypeStruct:  # noqa: D102
        return boundary_struct(aval, self.mesh)

    def box(self, value: jax.Array) -> jax.Array:  # noqa: D102
        return value[None]

    def unbox(self, value: jax.Array) -> jax.Array:  # noqa: D102
        return value[0]

    def compile(self, body: Callable[..., Any], arguments: Any, outputs: Any) -> tuple[jax.stages.Compiled, Any]:  # noqa: D102
        specs = jax.tree.map(lambda struct: struct.sharding.spec, (arguments, outputs))
        return compiled_to(shard_mapped(body, self.mesh, *specs), arguments, outputs), outputs


def compiled_to(run: Callable[..., Any], arguments: Any, outputs: Any) -> jax.stages.Compiled:
    """Compile a function of global arrays that donates its third argument, with results in the layouts of `outputs`."""
    shardings = jax.tree.map(lambda struct: struct.sharding, outputs)
    return compile_traced(jax.jit(run, donate_argnums=2, out_shardings=shardings).trace(*arguments))
