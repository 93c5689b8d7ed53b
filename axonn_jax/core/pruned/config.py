"""Settings of pruned training; no jax."""

from dataclasses import dataclass

from axonn_jax.core.errors import UserError
from axonn_jax.core.options import Count, CountOrZero, Density, PathText, PruneMethod, PruneScope, Seed, Settings, Share


@dataclass(frozen=True)
class PruneConfig(Settings):
    """Pruning of the blocks' kernels: entries outside the mask are zero and stay zero (SAMO)."""

    table = "prune"

    density: Density = 1.0
    """Share of entries that is kept. 1: no pruning."""
    method: PruneMethod = "magnitude"
    """Choice of the kept entries. magnitude: the largest when pruning begins; random; early_bird: the largest once they
    stay the same (Early-Bird Tickets); file: as prune.mask_file says."""
    scope: PruneScope = "layer"
    """Arrays that keep this share: every kernel (layer), or all of them together (global)."""
    seed: Seed = 0
    """Seed of the random masks (random)."""
    at_step: CountOrZero = 0
    """Steps of dense training before pruning (magnitude, random)."""
    every: Count = 100
    """Steps between two masks (early_bird)."""
    threshold: Share = 0.2
    """Largest distance of the new mask to each of the four before, as a share of the distance between random masks
    (early_bird). At density 0.5 the default is the paper's 0.1 of all entries."""
    mask_file: PathText = ""
    """An .npz file with an array of booleans by the parameter's name (file)."""

    @property
    def prunes(self) -> bool:
        """True if anything is pruned."""
        return self.density < 1.0 or self.method == "file"

    @property
    def starts_dense(self) -> bool:
        """True if the run starts with dense training."""
        return self.prunes and (self.at_step > 0 or self.method == "early_bird")

    def check(self) -> None:
        """Raise ``UserError`` if settings contradict each other."""
        if self.mask_file and self.method != "file":
            raise UserError("prune.mask_file", self.mask_file, "not given, or prune.method = file")
        if self.method == "file" and not self.mask_file:
            raise UserError("prune.mask_file", self.mask_file, "the path of an .npz file, as prune.method is file")
        if self.method == "file" and self.density != 1.0:
            raise UserError("prune.density", self.density, "not given where prune.method is file: the masks decide")
        if self.at_step and self.method in ("early_bird", "file"):
            raise UserError("prune.at_step", self.at_step, f"0 where prune.method is {self.method}")
        if not self.prunes and self != PruneConfig():
            accepted = "below 1 where other settings of [prune] are given"
            raise UserError("prune.density", self.density, accepted)
