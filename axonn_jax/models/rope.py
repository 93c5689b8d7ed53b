"""Rotary frequencies, plain and scaled for longer sequences than a model was trained on; no jax."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from axonn_jax.errors import UserError
from axonn_jax.options import RopeScaling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: angles by which queries and keys turn from one token to the next."""

    theta: float
    """Base of the frequencies."""
    scaling: RopeScaling = "none"
    factor: float = 1.0
    """Ratio of the sequences' length to that of the first training."""
    low_freq_factor: float = 1.0
    """llama3: frequencies that turn fewer times in `original_seq_len` tokens are divided by `factor`."""
    high_freq_factor: float = 4.0
    """Lower bound of the turns that stay unscaled (llama3)."""
    original_seq_len: int = 0
    """Tokens of the sequences that the model was trained on first; llama3 and yarn need it."""
    beta_fast: float = 32.0
    """yarn: frequencies that turn more often in `original_seq_len` tokens stay."""
    beta_slow: float = 1.0
    """Upper bound of the turns that are divided by `factor` (yarn)."""
    attention_factor: float = 0.0
    """Factor on rotated queries and keys (yarn); 0: 0.1 ln(factor) + 1."""

    def check(self) -> None:
        """Raise ``UserError`` for numbers that contradict each other."""
        if self.scaling == "none":
            return
        if self.scaling != "linear" and not self.original_seq_len:
            accepted = f"the tokens of the sequences trained on first, which {self.scaling} needs"
            raise UserError("model.rope_original_seq_len", self.original_seq_len, accepted)
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            least, most = getattr(self, low), getattr(self, high)
            if not least < most:
                raise UserError(f"model.rope_{high}", most, f"a number above model.rope_{low} = {least}")

    @property
    def amplitude(self) -> float:
        """Factor on rotated queries and keys (YaRN, Peng et al. 2023, eq. 22)."""
        if self.scaling != "yarn":
            return 1.0
        return self.attention_factor or 0.1 * math.log(max(self.factor, 1.0)) + 1.0

    def frequencies(self, head_dim: int) -> "NDArray[np.float64]":
        """Radians a token of each pair of features, [head_dim/2] float64.

        Sources: RoFormer (Su et al. 2021) section 3.2.2; linear: Chen et al. 2023; llama3: Llama 3.1's code; yarn:
        YaRN (Peng et al. 2023) section 3.2, in the form that Hugging Face's `rope_parameters` describe.
        """
        import numpy as np  # not for sizes alone

        # in float64: a float32 power would cost the low bits of the angle at far positions
        plain = self.theta ** -(np.arange(head_dim // 2, dtype=np.float64) / (head_dim // 2))
        if self.scaling == "none":
            return plain
        slow = plain / self.factor
        if self.scaling == "linear":
            return slow
        if self.scaling == "llama3":
            turns = self.original_seq_len * plain / (2 * np.pi)
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        else:
            low, high = (
                math.floor(self._pair(self.beta_fast, head_dim)),
                math.ceil(self._pair(self.beta_slow, head_dim)),
            )
            low, high = max(low, 0), min(high, head_dim - 1)
            kept = 1 - (np.arange(head_dim // 2) - low) / max(high - low, 1e-3)
        kept = np.clip(kept, 0, 1)
        return kept * plain + (1 - kept) * slow

    def _pair(self, turns: float, head_dim: int) -> float:
        """The pair of features that turns so often in `original_seq_len` tokens; a fraction."""
        return head_dim * math.log(self.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
