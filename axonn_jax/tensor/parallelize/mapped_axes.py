"""Mapped axes that code for `jax.pmap` names, as of size one."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

_UNBOUND = re.compile(r"unbound axis name: ([^.\s]+)")


class MappedAxes:
    """Axes that a loss written for `jax.pmap` names, unbound by trying, each bound with size one.

    The rows of a batch are one array, of which `lax.pmean` over devices is the mean itself.
    """

    def __init__(self) -> None:
        self._names: list[str] = []

    def call(self, run: Callable[[], Any]) -> Any:
        """Call a function that may be traced several times; its result must be a tree of arrays."""
        while True:
            called = run
            for name in self._names:
                called = partial(_bound, name, called)
            try:
                return called()
            except NameError as error:
                unbound = _UNBOUND.search(str(error))
                if unbound is None or unbound[1] in self._names:
                    raise
                self._names.append(unbound[1])


def _bound(name: str, run: Callable[[], Any]) -> Any:
    return jax.vmap(lambda _: run(), out_axes=None, axis_name=name)(jnp.zeros(1))
