"""Configs, weights and gradients of every family as Hugging Face transformers (PyTorch) gave them."""

import functools
import json
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
ROUTED = ("mixtral", "qwen3_moe", "qwen3_moe_sparse")
FAMILIES = ("gpt2", "llama", "llama3", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "arcee", *ROUTED)
VARIANTS = {"llama_linear": "llama3", "llama_yarn": "llama3"}  # to the model that they are but for one option


@functools.cache
def stored(family: str) -> dict[str, np.ndarray]:
    with np.load(ROOT / f"tests/fixtures/huggingface_{family}.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def fixture(family: str) -> dict[str, np.ndarray]:
    """What is stored; a variant's weights and tokens are those of the model that it is a variant of."""
    return (stored(VARIANTS[family]) if family in VARIANTS else {}) | stored(family)


def config(family: str) -> dict:
    return json.loads(str(fixture(family)["config"]))


def under(family: str, prefix: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(prefix): a for key, a in fixture(family).items() if key.startswith(prefix)}
