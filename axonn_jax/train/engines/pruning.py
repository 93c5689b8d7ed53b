"""Time of pruning, at a run's beginning, behind a step or once a search has a mask; and whether masks are as asked."""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp

from axonn_jax.checkpoint.naming import MASKS
from axonn_jax.distributed.host_sync import HostSync, LocalSync, host_sync, together
from axonn_jax.errors import UserError
from axonn_jax.pruned.config import PruneConfig
from axonn_jax.pruned.layout import PrunedLayout
from axonn_jax.pruned.masks import WINDOW, EarlyBird, kept
from axonn_jax.pruned.prune import make_masks
from axonn_jax.train.engines.engine import Engine

_CHECKPOINT = "masks of the checkpoint that the run goes on from"
_LINES = 20
"""Lines for people kept until somebody takes them."""


class Pruning:
    """Prunes a trainer's engine that began densely, when its time has come, and holds masks against the settings.

    Raises ``UserError`` where some processes have the file of masks and some do not.
    """

    def __init__(self, config: PruneConfig, engine: Engine):
        self._config, self._engine, self._search = config, engine, EarlyBird(config.threshold)
        self._sync: HostSync = host_sync(engine.grid) if config.prunes else LocalSync()
        self._last: int | None = None
        """The step of the last call of `at`."""
        self.pruned_at = 0
        """The step behind which the run was pruned, 0 for one that was not, or that began so."""
        self._took = 0.0
        self._lines: deque[str] = deque(maxlen=_LINES)
        files = set(self._sync.gather("there" if Path(config.mask_file).is_file() else "") if config.mask_file else [])
        if len(files) > 1:
            raise UserError("prune.mask_file", config.mask_file, "a file that every process of the run can read")
        self._fileless = self._unmasked = files == {""}

    def loaded(self) -> None:
        """Start pruning anew for the weights that an engine has, loaded or initial.

        Raises ``UserError``, on all processes, where its masks contradict the settings: the masks of an existing
        `prune.mask_file`, else a share `prune.density` of the entries, of every kernel or of all together. Method and
        scope of the choice do not matter. Every process must call it.
        """
        self._search, self._last = EarlyBird(self._config.threshold), None
        self._lines.clear()
        if not self._config.prunes or self._waits:
            return
        held = kept_of(self._engine, self._sync, self._config.density)
        self._unmasked = self._fileless and not held.entries
        self.check_masks()
        self._lines.append(str(held))
        if self._fileless:
            name = self._config.mask_file
            self._lines.append(f"prune.mask_file = {name!r} is not there: the masks of the checkpoint go on")
        elif self._config.method == "file":
            check_file(self._engine, self._sync, self._config)
        else:
            check_density(held, self._config.density)

    def check_masks(self) -> None:
        """Raise ``UserError`` where masks come from a file that is not there, and no checkpoint had them."""
        if self._unmasked:
            accepted = "an .npz file of arrays of booleans by parameter, unless a checkpoint that is loaded has masks"
            raise UserError("prune.mask_file", self._config.mask_file, accepted)

    def at(self, step: int) -> None:
        """Prune if it is time, before or behind a step: of two calls with as many steps done the second does nothing.

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
        # The step is waited for, which is no time of the look.
        jax.block_until_ready([store.masters for store in self._engine.stores.values()])
        began = time.monotonic()
        self._look(step, began)
        self._took += time.monotonic() - began

    def due(self, step: int) -> bool:
        """Return True if weights are looked at behind a step, which waits for it."""
        config = self._config
        searches = config.method == "early_bird"
        return self._waits and step >= config.at_step and (not searches or (step > 0 and step % config.every == 0))

    def took(self) -> float:
        """Return the seconds of all looks since the call before."""
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
        """Lines for people since the call before, the newest few."""
        lines = list(self._lines)
        self._lines.clear()
        return lines

    def undone(self) -> str:
        """A line for people where a run ends that was to be pruned and is not, or an empty text."""
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
        """True if the run is to be pruned and still trains densely."""
        return self._config.later and dense(self._engine)

    def _prune(self, began: float) -> None:
        for store in self._engine.stores.values():
            store.reform()
        self._search, self.pruned_at = EarlyBird(self._config.threshold), self._last or 0
        held, took = kept_of(self._engine, self._sync, self._config.density), time.monotonic() - began
        what = f"pruned {held.kernels} kernels to {self._config.density:.3g}"
        self._lines.append(f"step {self._last}: {what} in {took:.1f} s")
        self._lines.append(str(held))


def dense(engine: Engine) -> bool:
    """True if all entries of an engine's parameters are trained."""
    return all(store.forms is None for store in engine.stores.values())


def prune_for(engine: Engine, names: Iterable[str]) -> None:
    """Prune an engine that still trains densely, if the names of the checkpoint that it is to load have masks."""
    if dense(engine) and any(name.startswith(MASKS) for name in names):
        for store in engine.stores.values():
            if store.prunes:
                store.reform()


@dataclass(frozen=True)
class KeptCounts:
    """Kernels, entries and slots that the masks of the whole model keep; as a text, a line for people."""

    kernels: int
    as_asked: int
    """Kernels that keep as many entries as `density` asks for."""
    entries: int
    of: int
    slots: int

    def __str__(self) -> str:
        """Return the line."""
        where = f"{self.kernels} kernels are trained, in {self.slots:,} slots"
        return f"pruned: {self.entries:,} of {self.of:,} entries of {where}"


def kept_of(engine: Engine, sync: HostSync, density: float) -> KeptCounts:
    """Count the entries that an engine's masks keep in the whole run, and the kernels that keep `density`.

    Messages: a few numbers of each process. An engine that is not pruned keeps nothing.
    """

    def numbers(layout: PrunedLayout | None) -> tuple[int, ...]:
        if not isinstance(layout, PrunedLayout):
            return (0,) * 5
        sizes = {name: prod(shape) for name, shape in layout.shapes.items()}
        as_asked = sum(layout.counts[name] == kept(size, density) for name, size in sizes.items())
        slots = sum(map(prod, layout.value_shapes.values()))
        return len(sizes), as_asked, layout.kept, sum(sizes.values()), slots

    own = sync.gathered({pp_rank: numbers(store.forms) for pp_rank, store in engine.stores.items()})
    copies = engine.grid.stage_processes  # each says the same of its stage
    return KeptCounts(*(int(sum(column)) // copies for column in zip(*own, strict=True)))


def check_density(held: KeptCounts, density: float) -> None:
    """Raise ``UserError`` where masks keep more or less than a density, of some kernel and of all together."""
    if held.as_asked == held.kernels or held.entries == kept(held.of, density):
        return
    shares = [f"{held.entries / held.of:.{digits}g}" for digits in range(1, 18)]
    share = next((text for text in shares if kept(held.of, float(text)) == held.entries), shares[-1])
    raise UserError(
        "prune.density", density, f"{share}, as the {_CHECKPOINT} keep {held.entries:,} of {held.of:,} entries"
    )


def check_file(engine: Engine, sync: HostSync, config: PruneConfig) -> None:
    """Raise ``UserError``, on all processes, where an engine's masks are not those of the settings' file.

    Collectives: an all-reduce of a number a parameter.
    """
    names = [name.removeprefix(MASKS) for name in engine.state_shapes() if name.startswith(MASKS)]
    state = engine.state()
    masks = {name: state[MASKS + name] for name in names if MASKS + name in state}
    with together(sync):
        wanted = make_masks(config, masks, names)
    with together(sync):
        if unlike := [name for name, mask in masks.items() if bool(_differ(wanted[name], mask.joined()))]:
            accepted = f"a file of the {_CHECKPOINT}; {len(unlike)} are not the same, such as that of {unlike[0]}"
            raise UserError("prune.mask_file", config.mask_file, accepted)


@jax.jit
def _differ(mask: jax.Array, held: jax.Array) -> jax.Array:
    return jnp.any(mask != held.astype(bool))
