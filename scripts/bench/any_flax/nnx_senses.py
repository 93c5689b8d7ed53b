"""NNX models of pictures, sound and graphs."""

import dataclasses
from typing import Any

import jax
import numpy as np
from any_flax.sources import Copies
from any_flax.strangers import (
    CLASSES,
    FFN,
    HEADS,
    LAYERS,
    ROWS,
    SEQ,
    SIDE,
    VOCAB,
    WIDE,
    Model,
    Stranger,
    classifier,
    images,
    regression,
    token_ids,
)  # fmt: skip
from flax import nnx

_PATCH = 8


def _bonsai_vit(copies: Copies) -> Model:
    from bonsai.models.vit import modeling as m

    config = m.ModelConfig(
        image_size=(SIDE, SIDE), patch_size=(_PATCH, _PATCH), num_channels=3, hidden_dim=WIDE, attn_dropout_prob=0.0,
        dropout_prob=0.0, num_heads=HEADS, mlp_dim=FFN, eps=1e-6, num_layers=LAYERS, num_labels=CLASSES,
    )  # fmt: skip
    return classifier(lambda: m.ViTClassificationModel(config, rngs=nnx.Rngs(0)), lambda model, x: model(x, rngs=None))


def _bonsai_convnext(copies: Copies) -> Model:
    from bonsai.models.convnext import modeling as m

    config = m.ModelConfig(
        stage_depths=(1, 1), stage_dims=(32, WIDE), drop_path_rate=0.0, num_classes=CLASSES, layernorm_eps=1e-6
    )
    key = jax.random.key(0)
    return classifier(lambda: m.ConvNeXt(config, rngs=nnx.Rngs(0)), lambda model, x: model(x, rngs=key))


def _bonsai_efficientnet(copies: Copies) -> Model:
    from bonsai.models.efficientnet import modeling as m

    blocks = m.BlockConfigs([m.BlockConfig(32, 16, 3, 1, 1, 1, 0.25, 1), m.BlockConfig(16, 24, 3, 1, 6, 2, 0.25, 1)])
    config = m.ModelConfig(1.0, 1.0, SIDE, 0.0, 1, 0.99, 1e-5, blocks, CLASSES)
    return classifier(lambda: m.EfficientNet(config, rngs=nnx.Rngs(0)), lambda model, x: model(x, training=True))


def _bonsai_unet(copies: Copies) -> Model:
    from bonsai.models.unet import modeling as m

    config = m.ModelConfig(in_channels=3, num_classes=CLASSES, features=(8, 16, 32, WIDE, 2 * WIDE))
    return regression(lambda: m.UNet(config, rngs=nnx.Rngs(0)), lambda model, x: model(x), images())


def _bonsai_whisper(copies: Copies) -> Model:
    from bonsai.models.whisper import modeling as m

    config = dataclasses.replace(
        m.ModelConfig.whisper_tiny(), d_model=WIDE, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        encoder_ffn_dim=FFN, decoder_ffn_dim=FFN, encoder_layers=LAYERS, decoder_layers=LAYERS, vocab_size=VOCAB,
        max_length=SEQ, max_source_positions=SEQ, num_mel_bins=16,
    )  # fmt: skip
    spectrum = np.random.default_rng(3).normal(size=(ROWS, 2 * SEQ, 16)).astype(np.float32)

    def logits(model: Any, batch: Any) -> Any:
        return model.decoder(batch[1], None, model.encoder(batch[0]), None, False)

    return regression(lambda: m.Whisper(config, rngs=nnx.Rngs(0)), logits, (spectrum, token_ids()))


def _bonsai_dinov3(copies: Copies) -> Model:
    from bonsai.models.dinov3 import modeling as m

    config = m.ModelConfig(
        patch_size=(_PATCH, _PATCH), hidden_size=WIDE, intermediate_size=FFN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, image_size=SIDE,
    )  # fmt: skip

    def hidden(model: Any, pictures: Any) -> Any:
        return model(pictures)["last_hidden_state"]

    return regression(lambda: m.Dinov3ViTModel(config, rngs=nnx.Rngs(0)), hidden, images().transpose(0, 3, 1, 2).copy())


def _bonsai_vae(copies: Copies) -> Model:
    from bonsai.models.vae import modeling as m

    config = m.ModelConfig(block_out_channels=(16, 32), latent_channels=4, norm_num_groups=8)
    return regression(lambda: m.VAE(config, rngs=nnx.Rngs(0)), lambda model, x: model(x), images())


def _jraphx_gcn(copies: Copies) -> Model:
    from jraphx.nn.models import GCN

    rng = np.random.default_rng(4)
    nodes = rng.normal(size=(64, 32)).astype(np.float32)
    edges = rng.integers(0, 64, (2, 256)).astype(np.int32)
    return regression(
        lambda: GCN(in_features=32, hidden_features=WIDE, num_layers=LAYERS, out_features=CLASSES, rngs=nnx.Rngs(0)),
        lambda model, batch: model(*batch),
        (nodes, edges),
    )


SENSES = {
    "bonsai ViT": Stranger("bonsai", "vision", False, _bonsai_vit),
    "bonsai ConvNeXt": Stranger("bonsai", "vision", False, _bonsai_convnext),
    "bonsai EfficientNet": Stranger("bonsai", "vision", False, _bonsai_efficientnet),
    "bonsai UNet": Stranger("bonsai", "vision", False, _bonsai_unet),
    "bonsai DINOv3": Stranger("bonsai", "vision", False, _bonsai_dinov3),
    "bonsai VAE": Stranger("bonsai", "vision", False, _bonsai_vae),
    "bonsai Whisper": Stranger("bonsai", "audio", False, _bonsai_whisper),
    "jraphx GCN": Stranger("jraphx", "graph", False, _jraphx_gcn),
}
