"""Time of pruning: at a run's beginning, behind a step, or once an early-bird search has a mask."""

import time
from collections.abc import Iterable

from axonn_jax.checkpoint.naming import MASKS
from axonn_jax.errors import UserError
from axonn_jax.pruned.config import PruneConfig
from axonn_jax.pruned.early_bird import WINDOW, EarlyBird
from axonn_jax.train.engines.engine import Engine
from axonn_jax.train.engines.spmd import SpmdEngine

_ROUNDED = 1e-3
"""Of all entries: what may be kept more or less than a density, since every kernel keeps a whole number."""


class Pruning:
    """Prunes an engine that began densely, when its time has come.

    Raises ``UserError`` where an engine keeps another share of the entries than the settings say.
    """

    def __init__(self, config: PruneConfig, engine: Engine):
        self._config, self._search = config, EarlyBird(config.threshold)
        self._engine = engine if isinstance(engine, SpmdEngine) and config.prunes else None
        if self._engine is not None and self._engine.pruned and config.method != "file":
            kept, of = self._engine.kept_entries
            if abs(kept - config.density * of) > _ROUNDED * of:
                accepted = f"{kept / of:.4g}, as the masks of the checkpoint that the run goes on from"
                raise UserError("prune.density", config.density, accepted)

    def after(self, step: int) -> str:
        """Prunes behind a step if it is time; returns a line for people, or an empty text.

        Collectives: those of `pruned.masks` and `pruned.early_bird`.
        """
        if self._engine is None or self._engine.pruned or step < self._config.at_step:
            return ""
        began = time.monotonic()
        if self._config.method != "early_bird":
            return self._pruned(step, began)
        if step == 0 or step % self._config.every:
            return ""
        if self._search.done(self._engine.masks()):
            return self._pruned(step, began)
        far = self._search.distance
        return (
            "" if far is None else f"step {step}: masks differ by up to {far:.3f} over {WINDOW} looks: not yet pruned"
        )

    def _pruned(self, step: int, began: float) -> str:
        assert self._engine is not None
        layout = self._engine.prune()
        self._search = EarlyBird(self._config.threshold)
        took = time.monotonic() - began
        return f"step {step}: pruned {len(layout.shapes)} kernels to {self._config.density:.3g} in {took:.1f} s"


def prune_for(engine: Engine, names: Iterable[str]) -> None:
    """Prunes an engine that still trains densely, if the names of the checkpoint that it is to load have masks."""
    late = isinstance(engine, SpmdEngine) and engine.prunes_later and not engine.pruned
    if late and any(name.startswith(MASKS) for name in names):
        assert isinstance(engine, SpmdEngine)
        engine.prune()
