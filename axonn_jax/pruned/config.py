"""Settings of pruned training; no jax."""

from dataclasses import dataclass

from axonn_jax.errors import UserError
from axonn_jax.options import Count, CountOrZero, Density, PruneMethod, PruneScope, Seed, Share


@dataclass(frozen=True)
class PruneConfig:
    """Which entries of the blocks' kernels are trained; the others are zero and stay zero (SAMO)."""

    density: Density = 1.0
    """Share of their entries that is kept. 1: nothing is pruned."""
    method: PruneMethod = "magnitude"
    """Which: those of largest magnitude when pruning begins, some drawn at random, those of largest magnitude once they
    stay the same (early_bird, Early-Bird Tickets), or those that prune.mask_file says (file)."""
    scope: PruneScope = "layer"
    """True if every kernel keeps this share, or all of them together."""
    seed: Seed = 0
    """Seed of what is drawn (random)."""
    at_step: CountOrZero = 0
    """Steps that are trained densely before pruning (magnitude, random)."""
    every: Count = 100
    """Steps between looks at which entries are largest (early_bird)."""
    threshold: Share = 0.2
    """A mask is found that differs from each of the four before in at most this share of the entries that masks drawn
    at random differ in (early_bird). Of density 0.5 that is the 0.1 of all entries that the paper takes."""
    mask_file: str = ""
    """An .npz file with an array of booleans by the parameter's name (file)."""

    @property
    def prunes(self) -> bool:
        """True if anything is pruned."""
        return self.density < 1.0 or self.method == "file"

    @property
    def later(self) -> bool:
        """True if the run begins densely."""
        return self.prunes and (self.at_step > 0 or self.method == "early_bird")

    def check(self) -> None:
        """Raise ``UserError`` for settings that contradict each other."""
        if self.mask_file and self.method != "file":
            raise UserError("prune.mask_file", self.mask_file, "left out, or prune.method = file")
        if self.method == "file" and not self.mask_file:
            raise UserError("prune.mask_file", self.mask_file, "the path of an .npz file, as prune.method is file")
        if self.method == "file" and self.density != 1.0:
            raise UserError("prune.density", self.density, "left out, as prune.mask_file says what is kept")
        if self.at_step and self.method in ("early_bird", "file"):
            raise UserError("prune.at_step", self.at_step, f"0 where prune.method is {self.method}")
        if not self.prunes and self != PruneConfig():
            accepted = "below 1 where other settings of [prune] are given"
            raise UserError("prune.density", self.density, accepted)
