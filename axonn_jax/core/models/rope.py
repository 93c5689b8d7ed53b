"""Rotary frequencies, optionally scaled for sequences longer than those of the initial training; no jax."""

import math

import numpy as np
from numpy.typing import NDArray

from axonn_jax.core.models.config import ModelShape


def amplitude(shape: ModelShape) -> float:
    """Return the scale of rotated queries and keys (YaRN, Peng et al. 2023, eq. 22); 1 without YaRN."""
    if shape.rope_scaling != "yarn":
        return 1.0
    return shape.rope_attention_factor or 0.1 * math.log(max(shape.rope_factor, 1.0)) + 1.0


def frequencies(shape: ModelShape) -> NDArray[np.float64]:
    """Return the rotation in radians per token of each pair of features, [head_dim/2] float64.

    Sources: RoFormer (Su et al. 2021) section 3.2.2; linear: Chen et al. 2023; llama3: Llama 3.1's code; yarn:
    YaRN (Peng et al. 2023) section 3.2, in the form that Hugging Face's `rope_parameters` describe.
    """
    pairs, length = shape.head_dim // 2, shape.rope_original_seq_len
    # float64: rounding a frequency to float32 would lose the low bits of the angle at distant positions.
    plain = shape.rope_theta ** -(np.arange(pairs, dtype=np.float64) / pairs)
    if shape.rope_scaling == "none":
        return plain
    slow = plain / shape.rope_factor
    if shape.rope_scaling == "linear":
        return slow
    if shape.rope_scaling == "llama3":
        turns, least = length * plain / (2 * np.pi), shape.rope_low_freq_factor
        ramp = (turns - least) / (shape.rope_high_freq_factor - least)
    else:

        def pair(turns: float) -> float:
            # Fractional index of the pair that makes this many turns in a sequence of the initial training.
            return shape.head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(shape.rope_theta))

        low = max(math.floor(pair(shape.rope_beta_fast)), 0)
        high = min(math.ceil(pair(shape.rope_beta_slow)), shape.head_dim - 1)
        ramp = 1 - (np.arange(pairs) - low) / max(high - low, 1e-3)
    # 1 keeps a frequency, 0 divides it by the full factor, and frequencies in between are interpolated.
    ramp = np.clip(ramp, 0, 1)
    return ramp * plain + (1 - ramp) * slow
