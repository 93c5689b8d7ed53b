"""Settings of pruned training; no jax."""

from dataclasses import dataclass

from axonn_jax.errors import UserError
from axonn_jax.options import Density, PruneMethod, PruneScope, Seed


@dataclass(frozen=True)
class PruneConfig:
    """Which entries of the blocks' kernels are trained; the others are zero and stay zero (SAMO)."""

    density: Density = 1.0
    """Share of their entries that is kept. 1: nothing is pruned."""
    method: PruneMethod = "magnitude"
    """Which: those of largest magnitude when pruning begins, some drawn at random, or those that prune.masks says."""
    scope: PruneScope = "layer"
    """Whether every kernel keeps this share, or all of them together."""
    seed: Seed = 0
    """Seed of what is drawn (random)."""
    masks: str = ""
    """An .npz file with an array of booleans by the parameter's name (file)."""

    @property
    def prunes(self) -> bool:
        """Whether anything is pruned."""
        return self.density < 1.0 or self.method == "file"

    def check(self) -> None:
        """Raises ``UserError`` for settings that contradict each other."""
        if self.masks and self.method != "file":
            raise UserError("prune.masks", self.masks, "left out, or prune.method = file")
        if self.method == "file" and not self.masks:
            raise UserError("prune.masks", self.masks, "the path of an .npz file, as prune.method is file")
        if self.method == "file" and self.density != 1.0:
            raise UserError("prune.density", self.density, "left out, as prune.masks says what is kept")
