"""Time of pruning: at a run's beginning, behind a step, or once an early-bird search has a mask."""

import time
from collections import deque
from collections.abc import Iterable

from axonn_jax.checkpoint.naming import MASKS
from axonn_jax.errors import UserError
from axonn_jax.pruned.config import PruneConfig
from axonn_jax.pruned.early_bird import WINDOW, EarlyBird
from axonn_jax.train.engines.engine import Engine
from axonn_jax.train.engines.spmd import SpmdEngine

_ROUNDED = 1e-3
"""Of all entries: what may be kept more or less than a density, since every kernel keeps a whole number."""
_LINES = 20
"""Lines for people that are kept until somebody takes them."""


class Pruning:
    """Prunes a trainer's engine that began densely, when its time has come."""

    def __init__(self, config: PruneConfig, engine: Engine):
        self._config, self._search = config, EarlyBird(config.threshold)
        self._engine = engine if isinstance(engine, SpmdEngine) and config.prunes else None
        self._last: int | None = None
        """The step of the last call of `at`."""
        self._lines: deque[str] = deque(maxlen=_LINES)

    def loaded(self) -> None:
        """Begins anew with what an engine has loaded.

        Raises ``UserError`` where that keeps another share of the entries than the settings say.
        """
        self._search, self._last = EarlyBird(self._config.threshold), None
        if self._engine is not None and self._engine.pruned and self._config.method != "file":
            kept, of = self._engine.kept_entries
            if abs(kept - self._config.density * of) > _ROUNDED * of:
                accepted = f"{kept / of:.4g}, as the masks of the checkpoint that the run goes on from"
                raise UserError("prune.density", self._config.density, accepted)

    def at(self, step: int) -> None:
        """Prunes if it is time, before or behind a step: of two calls with as many steps done the second does nothing.

        Collectives: those of `pruned.masks` and `pruned.early_bird`.
        """
        config, engine = self._config, self._engine
        if engine is None or engine.pruned or step < config.at_step or step == self._last:
            return
        resumed, self._last = self._last is None and step > 0, step
        began = time.monotonic()
        if config.method != "early_bird":
            self._prune(engine, began)
            return
        if resumed:
            self._lines.append(f"step {step}: the search for a mask begins anew: checkpoints do not have its looks")
        if step == 0 or step % config.every:
            return
        if self._search.done(engine.masks()):
            self._prune(engine, began)
        elif self._search.distance is not None:
            far = f"masks differ by up to {self._search.distance:.3f} of what random ones do"
            self._lines.append(f"step {step}: {far}, over {WINDOW} looks at most: not yet pruned")

    def lines(self) -> list[str]:
        """Lines for people since the call before, the newest few."""
        lines = list(self._lines)
        self._lines.clear()
        return lines

    def undone(self) -> str:
        """A line for people where a run ends that was to be pruned and is not, or an empty text."""
        if self._engine is None or self._engine.pruned:
            return ""
        config, far = self._config, self._search.distance
        last = "" if far is None else f"; at the last look they differed by up to {far:.3f}"
        return (
            f"warning: this run was never pruned, and all its weights are dense: {WINDOW} looks in a row, one every "
            f"{config.every} steps, must have masks that differ by at most prune.threshold = {config.threshold}{last}"
        )

    def _prune(self, engine: SpmdEngine, began: float) -> None:
        layout = engine.prune()
        self._search = EarlyBird(self._config.threshold)
        what, took = f"pruned {len(layout.shapes)} kernels to {self._config.density:.3g}", time.monotonic() - began
        self._lines.append(f"step {self._last}: {what} in {took:.1f} s")


def prune_for(engine: Engine, names: Iterable[str]) -> None:
    """Prunes an engine that still trains densely, if the names of the checkpoint that it is to load have masks."""
    late = isinstance(engine, SpmdEngine) and engine.prunes_later and not engine.pruned
    if late and any(name.startswith(MASKS) for name in names):
        assert isinstance(engine, SpmdEngine)
        engine.prune()
