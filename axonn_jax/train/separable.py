"""Finds out whether an optimizer treats every parameter by itself, which a pipeline needs."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from axonn_jax.errors import UserError

_SCALES = (1e-3, 1e3)


def check_separable(optimizer: optax.GradientTransformation, params: Mapping[str, Any], own: Iterable[str]) -> None:
    """Raises ``UserError`` if the update of a stage's own parameters depends on parameters it does not hold.

    Found out by trying: tiny arrays under all names, gradients small and large, all at once and the own ones alone.
    A transformation that looks at all gradients together, such as `optax.clip_by_global_norm`, gives itself away.
    """
    own = set(own)
    if len(own) == len(params):
        return
    tiny = {name: jnp.full((2,) * len(p.shape), 0.5, jnp.float32) for name, p in params.items()}

    def update(names: Iterable[str], scale: float) -> dict[str, jax.Array]:
        chosen = {name: tiny[name] for name in names}
        grads = {name: scale * (1 + i % 7) * chosen[name] for i, name in enumerate(tiny) if name in chosen}
        with jax.numpy_dtype_promotion("standard"):  # optax mixes step counters with floats
            result, _ = optimizer.update(grads, optimizer.init(chosen), chosen)
        return {name: value for name, value in result.items() if name in own}  # type: ignore[union-attr]

    for scale in _SCALES:
        together, alone = (jax.jit(update, static_argnums=(0, 1))(tuple(n), scale) for n in (tiny, sorted(own)))
        for name in own:
            if not np.allclose(together[name], alone[name], rtol=1e-5, atol=0):
                raise UserError(
                    "optimizer", "a transformation that looks at all parameters together",
                    "one that treats every parameter by itself where grid.pipe is above 1, since no stage has them "
                    "all; for clipping by the global norm use `clip` (train.clip)",
                )  # fmt: skip
