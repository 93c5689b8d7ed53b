"""Command-line options of Loki; without jax."""

from dataclasses import dataclass

from axonn_jax.core.errors import UserError
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.options import CachedKeys


@dataclass(frozen=True)
class LokiOptions:
    """Ranking of keys, and the number attended to by a new token."""

    features: float = 0.25
    """Share of a head's features for the ranking of keys."""
    keys: float = 0.25
    """Share of a text's tokens attended to by a new token."""
    block: int = 1
    """Rank blocks of so many tokens by their best one: reads longer pieces of memory."""

    def check(self, attention: CachedKeys) -> None:
        """Check the options.

        Raises:
            UserError: A number is out of range, or `attention` does not read an option that is set.
        """
        for name in ("features", "keys"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"--loki.{name}", getattr(self, name), "a number above 0 and at most 1")
        if self.block not in (1, 2, 4, 8, 16, 32, 64):
            raise UserError("--loki.block", self.block, "1, 2, 4, 8, 16, 32 or 64")
        for name in ("features", "keys", "block") if attention == "full" else ():
            if getattr(self, name) != getattr(LokiOptions(), name):
                raise UserError(f"--loki.{name}", getattr(self, name), f"nothing with --attention {attention}")

    def share_read(self, shape: ModelShape) -> float:
        """Return the ratio of a step's reads of a KV head's cache to those of full attention."""
        # Each query head selects its own keys, so the keys that are read grow with the group.
        first, group = self.first(shape) / shape.head_dim, shape.heads // shape.kv_heads
        return (first + group * self.keys * (2 - first)) / 2

    def first(self, shape: ModelShape) -> int:
        """Return the number of features that keys are ranked by."""
        return max(1, round(self.features * shape.head_dim))
