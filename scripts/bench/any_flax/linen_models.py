"""Linen models of text, pictures and diffusion; each loss makes the model anew, as training scripts do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from any_flax.sources import Copies, stand_in
from any_flax.strangers import (
    CLASSES,
    FFN,
    HEADS,
    LAYERS,
    ROWS,
    SEQ,
    VOCAB,
    WIDE,
    Model,
    Stranger,
    cross_entropy,
    distance,
    images,
    labels,
    token_ids,
)  # fmt: skip

_TRANSFORMER: dict[str, Any] = {
    "vocab_size": VOCAB, "output_vocab_size": VOCAB, "emb_dim": WIDE, "num_heads": HEADS, "num_layers": LAYERS,
    "qkv_dim": WIDE, "mlp_dim": FFN, "max_len": SEQ, "dropout_rate": 0.0, "attention_dropout_rate": 0.0,
}  # fmt: skip


def _parameters(module: Any, *inputs: Any, **settings: Any) -> Any:
    """The tree of parameters, without the boxes of logical axes."""

    def unboxed(leaf: Any) -> Any:
        return leaf.unbox() if hasattr(leaf, "unbox") else leaf

    made = module.init(jax.random.key(0), *inputs, **settings)["params"]
    return jax.tree.map(unboxed, made, is_leaf=lambda leaf: hasattr(leaf, "unbox"))


def _lm1b(**settings: Any) -> Model:
    import models

    config = models.TransformerConfig(**_TRANSFORMER, deterministic=True, **settings)
    ids = token_ids()

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(models.TransformerLM(config).apply({"params": params}, batch), batch)

    return Model(lambda: _parameters(models.TransformerLM(config), ids), loss, ids)


def _wmt(copies: Copies) -> Model:
    import models

    config = models.TransformerConfig(**_TRANSFORMER, deterministic=True, share_embeddings=True)
    batch = (token_ids(), token_ids()[::-1].copy())

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(models.Transformer(config).apply({"params": params}, *batch), batch[1])

    return Model(lambda: _parameters(models.Transformer(config), *batch), loss, batch)


def _nlp_seq(copies: Copies) -> Model:
    import models

    config = models.TransformerConfig(**_TRANSFORMER)
    ids = token_ids()

    def loss(params: Any, batch: Any) -> Any:
        logits = models.Transformer(config).apply({"params": params}, inputs=batch, train=False)
        return cross_entropy(logits, batch)

    return Model(lambda: _parameters(models.Transformer(config), inputs=ids, train=False), loss, ids)


def _imagenet(copies: Copies) -> Model:
    import models

    model = models.ResNet(stage_sizes=(1, 1), block_cls=models.ResNetBlock, num_classes=CLASSES, num_filters=32)
    made = model.init(jax.random.key(0), images(), train=False)

    def loss(params: Any, batch: Any) -> Any:
        logits = model.apply({"params": params, "batch_stats": made["batch_stats"]}, batch[0], train=False)
        return cross_entropy(logits, batch[1])

    return Model(lambda: made["params"], loss, (images(), labels()))


def _nano_moe(copies: Copies) -> Model:
    from nano_moe.config import NanoMoEConfig
    from nano_moe.model import NanoMoE

    model = NanoMoE(
        NanoMoEConfig(
            vocab_size=VOCAB, block_size=SEQ, n_layers=LAYERS, n_heads=HEADS, d_model=WIDE, d_ff=FFN, n_experts=4,
            top_k=2, dropout_rate=0.0,
        )
    )  # fmt: skip
    ids = token_ids()

    def loss(params: Any, batch: Any) -> Any:
        logits, balance = model.apply({"params": params}, batch)
        return cross_entropy(logits, batch) + 0.01 * balance

    return Model(lambda: _parameters(model, ids), loss, ids)


def _gemma(copies: Copies) -> Model:
    stand_in("tensorflow", lambda name: type(name, (), {}))
    from gemma.gm.nn import _config, _modules, _transformer

    config = _config.TransformerConfig(
        num_embed=VOCAB, embed_dim=WIDE, hidden_dim=FFN, num_heads=HEADS, head_dim=WIDE // HEADS, num_kv_heads=2,
        final_logit_softcap=None, use_post_attn_norm=True, use_post_ffw_norm=True,
        attention_types=(_modules.AttentionType.GLOBAL,) * LAYERS,
    )  # fmt: skip
    model = _transformer.Transformer(config=config, dtype=jnp.float32)
    ids = token_ids()

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(model.apply({"params": params}, batch).logits, batch)

    return Model(lambda: _parameters(model, ids), loss, ids)


def _flaxdiff_unet(copies: Copies) -> Model:
    from flaxdiff.models.simple_unet import Unet

    model = Unet(
        emb_features=WIDE, feature_depths=(32, WIDE), attention_configs=(None, {"heads": HEADS}), num_res_blocks=1
    )
    rng = np.random.default_rng(5)
    times = np.arange(ROWS, dtype=np.float32)
    batch = (images(), times, rng.normal(size=(ROWS, 4, 32)).astype(np.float32))

    def loss(params: Any, batch: Any) -> Any:
        return distance(model.apply({"params": params}, *batch))

    return Model(lambda: _parameters(model, *batch), loss, batch)


LINEN = {
    "flax lm1b": Stranger("flax lm1b", "text", True, lambda copies: _lm1b()),
    "flax lm1b tied": Stranger("flax lm1b", "text", True, lambda copies: _lm1b(logits_via_embedding=True)),
    "flax wmt": Stranger("flax wmt", "text", True, _wmt),
    "flax nlp_seq": Stranger("flax nlp_seq", "text", True, _nlp_seq),
    "gemma": Stranger("gemma", "text", True, _gemma),
    "nano-moe-jax": Stranger("nano-moe-jax", "text", True, _nano_moe),
    "flax imagenet": Stranger("flax imagenet", "vision", True, _imagenet),
    "flaxdiff UNet": Stranger("flaxdiff", "vision", True, _flaxdiff_unet),
}
