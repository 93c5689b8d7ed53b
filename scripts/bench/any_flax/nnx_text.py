"""NNX models of text and sequences: decoders, encoders, experts, state spaces."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from any_flax.sources import Copies
from any_flax.strangers import (
    FFN,
    HEADS,
    LAYERS,
    SEQ,
    VOCAB,
    WIDE,
    Model,
    Stranger,
    language_model,
    regression,
    token_ids,
)
from any_flax.strangers import cross_entropy as xent
from flax import nnx

_HEAD = WIDE // HEADS
_TUNIX = {
    "num_layers": LAYERS, "vocab_size": VOCAB, "embed_dim": WIDE, "hidden_dim": FFN, "num_heads": HEADS,
    "head_dim": _HEAD, "num_kv_heads": 2, "rope_theta": 10000, "norm_eps": 1e-5,
}  # fmt: skip


def _positions_and_mask(make: Any) -> Model:
    """A model called as tunix and flax's gemma are: ids, positions, cache, mask."""
    rows = token_ids().shape[0]
    positions = np.tile(np.arange(SEQ, dtype=np.int32), (rows, 1))
    mask = np.tile(np.tril(np.ones((SEQ, SEQ), bool)), (rows, 1, 1))

    def logits(model: Any, batch: Any) -> Any:
        return model(batch[0], batch[1], None, batch[2])[0]

    return Model(make, lambda m, b: xent(logits(m, b), b[0]), (token_ids(), positions, mask), logits)


def _tunix(copies: Copies) -> None:
    copies.bare("tunix", "tunix.generate", "tunix.utils", "tunix.models")


def _tunix_llama3(copies: Copies) -> Model:
    _tunix(copies)
    from tunix.models.llama3 import model as m

    return _positions_and_mask(lambda: m.Llama3(m.ModelConfig(**_TUNIX), rngs=nnx.Rngs(0)))


def _tunix_qwen3(copies: Copies) -> Model:
    _tunix(copies)
    from tunix.models.qwen3 import model as m

    return _positions_and_mask(lambda: m.Qwen3(m.ModelConfig(**_TUNIX, use_tied_embedding=True), rngs=nnx.Rngs(0)))


def _tunix_gemma3(copies: Copies) -> Model:
    _tunix(copies)
    from tunix.models.gemma3 import model as m

    config = m.ModelConfig(
        num_layers=LAYERS, num_embed=VOCAB, embed_dim=WIDE, hidden_dim=FFN, num_heads=HEADS, head_dim=_HEAD,
        num_kv_heads=2, sliding_window_size=8, param_dtype=jnp.float32,
    )  # fmt: skip
    return _positions_and_mask(lambda: m.Gemma3(config, rngs=nnx.Rngs(0)))


def _flax_gemma(copies: Copies) -> Model:
    import transformer
    import transformer_cfg

    whole = transformer_cfg.TransformerConfig.gemma3_1b()
    config = dataclasses.replace(
        whole, num_layers=LAYERS, num_embed=VOCAB, embed_dim=WIDE, hidden_dim=FFN, num_heads=HEADS, head_dim=_HEAD,
        num_kv_heads=1, sliding_window_size=8, attention_types=whole.attention_types[:LAYERS],
    )  # fmt: skip
    return _positions_and_mask(lambda: transformer.Transformer(config, rngs=nnx.Rngs(0)))


def _dantinox(**settings: Any) -> Model:
    from dantinox.core.config import ModelConfig
    from dantinox.core.model import Transformer

    config = ModelConfig(dim=WIDE, n_heads=HEADS, num_blocks=LAYERS, vocab_size=VOCAB, max_context=SEQ, **settings)
    return language_model(
        lambda: Transformer(config, rngs=nnx.Rngs(0)), lambda m, ids: m(ids, deterministic=True).logits
    )


def _mamba2(copies: Copies) -> Model:
    from mamba2_jax.modeling import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=VOCAB, hidden_size=WIDE, state_size=16, head_dim=16, chunk_size=8, num_hidden_layers=LAYERS
    )
    return Model(
        lambda: Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)),
        lambda m, ids: m(ids, labels=ids)["loss"],
        token_ids(),
        lambda m, ids: m(ids)["logits"],
    )


def _bonsai_umt5(copies: Copies) -> Model:
    from bonsai.models.umt5 import modeling as m

    config = m.ModelConfig(
        vocab_size=VOCAB, d_model=WIDE, d_kv=_HEAD, d_ff=FFN, num_layers=LAYERS, num_heads=HEADS, dropout_rate=0.0
    )

    def hidden(model: Any, ids: Any) -> Any:
        out = model(ids)
        return out[0] if isinstance(out, tuple) else out

    return regression(lambda: m.UMT5EncoderModel(config, rngs=nnx.Rngs(0)), hidden, token_ids())


TEXT = {
    "tunix Llama3": Stranger("tunix", "text", False, _tunix_llama3),
    "tunix Qwen3": Stranger("tunix", "text", False, _tunix_qwen3),
    "tunix Gemma3": Stranger("tunix", "text", False, _tunix_gemma3),
    "flax gemma": Stranger("flax gemma", "text", False, _flax_gemma),
    "dantinox": Stranger("dantinox", "text", False, lambda copies: _dantinox(attention="gqa", kv_heads=2)),
    "dantinox MoE": Stranger("dantinox", "text", False, lambda copies: _dantinox(ffn="moe")),
    "bonsai UMT5": Stranger("bonsai", "text", False, _bonsai_umt5),
    "mamba2-jax": Stranger("mamba2-jax", "state space", False, _mamba2),
}
