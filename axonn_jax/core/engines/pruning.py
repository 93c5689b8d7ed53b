"""Pruning schedule of a run (at the start, after a step, or when a search finds a mask) and checks of its masks."""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp

from axonn_jax.core.checkpoint.naming import MASKS
from axonn_jax.core.distributed.host_sync import HostSync, LocalSync, host_sync, together
from axonn_jax.core.engines.engine import Engine
from axonn_jax.core.errors import UserError
from axonn_jax.core.pruned.config import PruneConfig
from axonn_jax.core.pruned.layout import PrunedLayout
from axonn_jax.core.pruned.masks import WINDOW, EarlyBird, keep_count
from axonn_jax.core.pruned.prune import make_masks

_CHECKPOINT = "masks of the checkpoint that the run goes on from"
_LINES = 20
"""Most lines of text buffered until `Pruning.lines` is called."""


class Pruning:
    """Prunes a trainer's dense engine when it is due, and checks its masks against the settings.

    Raises ``UserError`` if only some processes can read `prune.mask_file`.
    """

    def __init__(self, config: PruneConfig, engine: Engine):
        self._config, self._engine, self._search = config, engine, EarlyBird(config.threshold)
        self._sync: HostSync = host_sync(engine.grid) if config.prunes else LocalSync()
        self._last: int | None = None
        """Step of the last call of `at`."""
        self.pruned_at = 0
        """Step after which the run was pruned; 0 if it was not, or if it started pruned."""
        self._took = 0.0
        self._lines: deque[str] = deque(maxlen=_LINES)
        # Ask all processes: a file missing on one node must fail everywhere instead of leaving collectives waiting.
        files = set(self._sync.gather("there" if Path(config.mask_file).is_file() else "") if config.mask_file else [])
        if len(files) > 1:
            raise UserError("prune.mask_file", config.mask_file, "a file that every process of the run can read")
        self._fileless = self._unmasked = files == {""}

    def loaded(self) -> None:
        """Restart pruning for the engine's current weights, loaded or initial; every process must call it.

        Raises ``UserError`` on all processes if the engine's masks contradict the settings: an existing
        `prune.mask_file`, or else `prune.density` of the entries, of every kernel or in total. Method and scope are not
        compared.
        """
        self._search, self._last = EarlyBird(self._config.threshold), None
        self._lines.clear()
        if not self._config.prunes or self._waits:
            return
        counts = mask_counts(self._engine, self._sync, self._config.density)
        self._unmasked = self._fileless and not counts.entries
        self.check_masks()
        self._lines.append(str(counts))
        if self._fileless:
            name = self._config.mask_file
            self._lines.append(f"prune.mask_file = {name!r} is not there: the masks of the checkpoint go on")
        elif self._config.method == "file":
            check_file(self._engine, self._sync, self._config)
        else:
            check_density(counts, self._config.density)

    def check_masks(self) -> None:
        """Raise ``UserError`` if masks should come from a missing file and no checkpoint provided them."""
        if self._unmasked:
            accepted = "an .npz file of arrays of booleans by parameter, unless a checkpoint that is loaded has masks"
            raise UserError("prune.mask_file", self._config.mask_file, accepted)

    def at(self, step: int) -> None:
        """Prune if it is due after `step` steps; a second call with the same `step` does nothing.

        Collectives: those of `pruned.masks`.
        """
        self.check_masks()
        if not self._waits or step < self._config.at_step or step == self._last:
            return
        resumed, self._last = self._last is None and step > 0, step
        if resumed and self._config.method == "early_bird":
            self._lines.append(f"step {step}: the search for a mask begins anew: checkpoints do not have its looks")
        if not self.due(step):
            return
        # Wait for the step first, so that its time does not count as pruning.
        jax.block_until_ready([store.masters for store in self._engine.stores.values()])
        began = time.monotonic()
        self._look(step, began)
        self._took += time.monotonic() - began

    def due(self, step: int) -> bool:
        """Return True if `at` inspects the weights after a step, for which it has to wait."""
        config = self._config
        searches = config.method == "early_bird"
        return self._waits and step >= config.at_step and (not searches or (step > 0 and step % config.every == 0))

    def took(self) -> float:
        """Return the seconds spent on pruning since the previous call."""
        took, self._took = self._took, 0.0
        return took

    def _look(self, step: int, began: float) -> None:
        if self._config.method != "early_bird":
            self._prune(began)
            return
        masks = {name: mask for store in self._engine.stores.values() for name, mask in store.masks().items()}
        if self._search.done(masks):
            self._prune(began)
        elif self._search.distance is not None:
            far = f"masks differ by up to {self._search.distance:.3f} of what random ones do"
            self._lines.append(f"step {step}: {far}, over {WINDOW} looks at most: not yet pruned")

    def lines(self) -> list[str]:
        """Return the latest lines of text since the previous call."""
        lines = list(self._lines)
        self._lines.clear()
        return lines

    def undone(self) -> str:
        """Return a warning for the end of a run that should have been pruned and was not, or an empty string."""
        if not self._waits:
            return ""
        config, far = self._config, self._search.distance
        last = "" if far is None else f"; the last masks differed by up to {far:.3f}"
        return (
            f"warning: this run was never pruned, and all its weights are dense: {WINDOW} masks in a row, one every "
            f"{config.every} steps, must differ by at most prune.threshold = {config.threshold}{last}"
        )

    @property
    def _waits(self) -> bool:
        """True if the run has yet to be pruned."""
        return self._config.starts_dense and dense(self._engine)

    def _prune(self, began: float) -> None:
        for store in self._engine.stores.values():
            store.reform()
        self._search, self.pruned_at = EarlyBird(self._config.threshold), self._last or 0
        counts, took = mask_counts(self._engine, self._sync, self._config.density), time.monotonic() - began
        action = f"pruned {counts.kernels} kernels to {self._config.density:.3g}"
        self._lines.append(f"step {self._last}: {action} in {took:.1f} s")
        self._lines.append(str(counts))


def dense(engine: Engine) -> bool:
    """Return True if all entries of an engine's parameters are trained."""
    return all(store.forms is None for store in engine.stores.values())


def prune_for(engine: Engine, names: Iterable[str]) -> None:
    """Prune a dense engine if the checkpoint that it will load, with these array names, has masks."""
    # By the current weights: this only switches the form of the state, as loading then brings the checkpoint's masks.
    if dense(engine) and any(name.startswith(MASKS) for name in names):
        for store in engine.stores.values():
            if store.prunes:
                store.reform()


@dataclass(frozen=True)
class MaskCounts:
    """Kernels, entries and slots that the full model's masks keep; `str` gives a line of text."""

    kernels: int
    at_density: int
    """Kernels that keep exactly the number of entries that `density` demands."""
    entries: int
    of: int
    slots: int

    def __str__(self) -> str:
        """Return the line."""
        where = f"{self.kernels} kernels are trained, in {self.slots:,} slots"
        return f"pruned: {self.entries:,} of {self.of:,} entries of {where}"


def mask_counts(engine: Engine, sync: HostSync, density: float) -> MaskCounts:
    """Count the entries that the masks of all processes keep, and the kernels at `density`; zero for a dense engine.

    Messages: five numbers from each process.
    """

    def numbers(layout: PrunedLayout | None) -> tuple[int, ...]:
        if not isinstance(layout, PrunedLayout):
            return (0,) * 5
        sizes = {name: prod(shape) for name, shape in layout.shapes.items()}
        at_density = sum(layout.counts[name] == keep_count(size, density) for name, size in sizes.items())
        slots = sum(map(prod, layout.value_shapes.values()))
        return len(sizes), at_density, layout.trained_count, sum(sizes.values()), slots

    gathered = sync.gathered({pp_rank: numbers(store.forms) for pp_rank, store in engine.stores.items()})
    copies = engine.grid.stage_processes  # every process of a stage reports the same numbers
    return MaskCounts(*(int(sum(column)) // copies for column in zip(*gathered, strict=True)))


def check_density(counts: MaskCounts, density: float) -> None:
    """Raise ``UserError`` unless masks keep `density` of every kernel or in total."""
    if counts.at_density == counts.kernels or counts.entries == keep_count(counts.of, density):
        return
    # Suggest the shortest decimal that reproduces the masks' number of entries.
    shares = [f"{counts.entries / counts.of:.{digits}g}" for digits in range(1, 18)]
    share = next((text for text in shares if keep_count(counts.of, float(text)) == counts.entries), shares[-1])
    raise UserError(
        "prune.density", density, f"{share}, as the {_CHECKPOINT} keep {counts.entries:,} of {counts.of:,} entries"
    )


def check_file(engine: Engine, sync: HostSync, config: PruneConfig) -> None:
    """Raise ``UserError`` on all processes if an engine's masks differ from those in the settings' file.

    Collectives: an all-reduce of one number per parameter.
    """
    names = [name.removeprefix(MASKS) for name in engine.state_shapes() if name.startswith(MASKS)]
    state = engine.state()
    masks = {name: state[MASKS + name] for name in names if MASKS + name in state}
    with together(sync):
        expected = make_masks(config, masks, names)
    with together(sync):
        if mismatched := [name for name, mask in masks.items() if bool(_differ(expected[name], mask.materialize()))]:
            accepted = (
                f"a file of the {_CHECKPOINT}; {len(mismatched)} are not the same, such as that of {mismatched[0]}"
            )
            raise UserError("prune.mask_file", config.mask_file, accepted)


@jax.jit
def _differ(mask: jax.Array, stored: jax.Array) -> jax.Array:
    return jnp.any(mask != stored.astype(bool))
