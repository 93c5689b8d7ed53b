"""Named model sizes from the literature, without jax."""

from dataclasses import replace

from axonn_jax.errors import UserError, nearest
from axonn_jax.models.config import ModelShape


def _gpt(layers: int, hidden: int, heads: int, vocab: int, seq_len: int) -> ModelShape:
    return ModelShape(layers, hidden, heads, heads, 4 * hidden, vocab, seq_len)


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq_len: int, theta: float
) -> ModelShape:
    return ModelShape(
        layers, hidden, heads, kv_heads, ffn, vocab, seq_len,
        positions="rope", norm="rmsnorm", mlp="swiglu", bias="none", tied=False, rope_theta=theta,
    )  # fmt: skip


# (layers, hidden, heads) by name; vocabulary and sequence length by family.
_GPT2 = {
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}
# GPT-3 shapes, as trained by SAMO (IPDPS 23).
_GPT3 = {
    "gpt-1.3b": (24, 2048, 16),
    "gpt-2.7b": (32, 2560, 32),
    "gpt-6.7b": (32, 4096, 32),
    "gpt-13b": (40, 5120, 40),
}
# AxoNN (IPDPS 22): sequence 512, vocabulary 51,200.
_IPDPS22 = {
    "gpt-12b": (48, 4512, 24), "gpt-24b": (48, 6336, 36), "gpt-50b": (96, 6528, 48), "gpt-100b": (96, 9360, 60),
}  # fmt: skip
# 4D hybrid (SC 24): sequence 2,048, heads of 128 features.
_SC24 = {
    "gpt-5b": (24, 4096, 32), "gpt-10b": (32, 5120, 40), "gpt-20b": (32, 7168, 56), "gpt-40b": (38, 9216, 72),
    "gpt-60b": (56, 9216, 72), "gpt-80b": (42, 12288, 96), "gpt-160b": (84, 12288, 96),
    "gpt-320b": (96, 16384, 128), "gpt-640b": (192, 16384, 128),
}  # fmt: skip
_LLAMA = {
    "llama2-7b": (32, 4096, 32, 32, 11008, 32000, 4096, 1e4),
    "llama2-13b": (40, 5120, 40, 40, 13824, 32000, 4096, 1e4),
    "llama2-70b": (80, 8192, 64, 8, 28672, 32000, 4096, 1e4),
    "llama3-8b": (32, 4096, 32, 8, 14336, 128256, 8192, 5e5),
    "llama3-70b": (80, 8192, 64, 8, 28672, 128256, 8192, 5e5),
    "llama3-405b": (126, 16384, 128, 8, 53248, 128256, 8192, 5e5),
}


def preset_names() -> tuple[str, ...]:
    """Names that `preset` knows, in order of family and size."""
    return (*_GPT2, *_GPT3, *_IPDPS22, *_SC24, *_LLAMA)


def preset(name: str, **changes: object) -> ModelShape:
    """Returns the named model's sizes, with any fields of `ModelShape` changed.

    Raises ``UserError`` for an unknown name, naming the nearest known one.
    """
    if name in _GPT2:
        shape = _gpt(*_GPT2[name], vocab=50257, seq_len=1024)
    elif name in _GPT3:
        shape = _gpt(*_GPT3[name], vocab=51200, seq_len=2048)
    elif name in _IPDPS22:
        shape = _gpt(*_IPDPS22[name], vocab=51200, seq_len=512)
    elif name in _SC24:
        shape = _gpt(*_SC24[name], vocab=51200, seq_len=2048)
    elif name in _LLAMA:
        shape = _llama(*_LLAMA[name])
    else:
        names = preset_names()
        raise UserError("model.preset", name, "one of " + ", ".join(names) + nearest(name, names))
    return replace(shape, **changes) if changes else shape  # type: ignore[arg-type]
