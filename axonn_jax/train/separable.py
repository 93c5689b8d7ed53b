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

    def updates(names: Iterable[str]) -> list[dict[str, jax.Array]]:
        chosen = {name: tiny[name] for name in names}
        state, results = optimizer.init(chosen), []
        for scale in _SCALES:  # one after the other: the first update of Adam does not depend on the gradients' scale
            grads = {name: scale * (1 + i % 7) * chosen[name] for i, name in enumerate(tiny) if name in chosen}
            with jax.numpy_dtype_promotion("standard"):  # optax mixes step counters with floats
                result, state = optimizer.update(grads, state, chosen)
            results.append({name: value for name, value in result.items() if name in own})  # type: ignore[union-attr]
        return results

    together, alone = (jax.jit(updates, static_argnums=0)(tuple(n)) for n in (tiny, sorted(own)))
    for one, other in zip(together, alone, strict=True):
        for name in own:
            if not np.allclose(one[name], other[name], rtol=1e-5, atol=0):
                raise UserError(
                    "optimizer", "a transformation that looks at all parameters together",
                    "one that treats every parameter by itself where grid.pipe is above 1, since no stage has them "
                    "all; for clipping by the global norm use `clip` (train.clip)",
                )  # fmt: skip
