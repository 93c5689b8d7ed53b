"""Pretrained directories of every family: tiny configs, random weights, and a tokenizer."""

import json
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy
import tokenizers

from axonn_jax.files.data.prepare import prepare
from axonn_jax.files.huggingface.entries import entries_of
from axonn_jax.files.huggingface.families import shape_from_config

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
_SIZES = {
    "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 301, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "gpt2": {
        "model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_inner": None, "n_layer": 2, "n_positions": 64,
        "vocab_size": 301, "layer_norm_epsilon": 1e-5, "dtype": "float32", "bos_token_id": 0, "eos_token_id": 0,
    },
    "llama": {"model_type": "llama", **_SIZES, "rope_theta": 1e4, "rope_scaling": None},
    "llama3": {
        "model_type": "llama", **_SIZES, "rope_theta": 5e5, "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "linear": {"model_type": "llama", **_SIZES, "rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "yarn": {
        "model_type": "qwen3", **_SIZES, "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16,
        },
    },
    "mistral": {"model_type": "mistral", **_SIZES, "head_dim": 16, "sliding_window": 16, "rope_theta": 1e6},
    "qwen2": {"model_type": "qwen2", **_SIZES, "use_sliding_window": False, "rope_theta": 1e6},
    "qwen2 window": {
        "model_type": "qwen2", **_SIZES, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0,
    },
    "qwen3": {
        "model_type": "qwen3", **_SIZES, "head_dim": 16, "tie_word_embeddings": True, "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "gemma": {"model_type": "gemma", **_SIZES, "hidden_act": "gelu_pytorch_tanh", "head_dim": 16, "rope_theta": 1e4},
    "gemma2": {
        "model_type": "gemma2", **_SIZES, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 16, "rope_theta": 1e4, "sliding_window": 16, "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 4.0, "final_logit_softcapping": 10.0, "pad_token_id": None,
        "tie_word_embeddings": False,
    },
    "mixtral": {"model_type": "mixtral", **_SIZES, "num_local_experts": 4, "rope_theta": 1e6, "sliding_window": None},
    "qwen3_moe": {
        "model_type": "qwen3_moe", **_SIZES, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 16, "norm_topk_prob": True, "mlp_only_layers": [0],
    },
}  # fmt: skip
LENGTHS = ("n_positions", "max_position_embeddings")
SMALL = {
    "generation_config.json": b'{ "eos_token_id":0 }',
    "tokenizer_config.json": b'{"eos_token": "<|endoftext|>"}\n\n',
    "chat_template.jinja": (
        "{% for m in messages %}\u00e9 {{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}\u00e9 assistant: {% endif %}"
    ).encode(),
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "special_tokens_map.json": b"{}",
}


def weights(config: dict, dtype: np.dtype = F32) -> dict[str, np.ndarray]:
    """A random state dict under the names of files; norms near 1, the rest small."""
    state = {}
    for entry in entries_of(shape_from_config(config)):
        for name, size in entry.theirs.items():
            drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(size, np.float32)
            norm = name.endswith("norm.weight") or ".ln_" in name
            state[name] = (0.2 * drawn + (norm and name.endswith("weight"))).astype(dtype)
    return state


def write_model(folder: Path, config: dict, state: dict[str, np.ndarray], files: int = 1) -> Path:
    """A directory as transformers writes it, by the library's own writer; its tensors in several files if asked."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "additional_chat_templates").mkdir()
    for name, raw in SMALL.items():
        (folder / name).write_bytes(raw)
    if files == 1:
        safetensors.numpy.save_file(state, folder / "model.safetensors", {"format": "pt"})
        return folder
    index = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {key: state[key] for key in sorted(state)[number::files]}
        safetensors.numpy.save_file(part, folder / name, {"format": "pt"})
        index |= dict.fromkeys(part, name)
    total = sum(value.nbytes for value in state.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def directory(folder: Path, family: str, files: int = 1, **changes) -> Path:
    """A family's directory, of its random weights and a config with some fields changed."""
    config = CONFIGS[family] | changes
    return write_model(folder, config, weights(config), files)


def converted(root: Path, dtype: np.dtype = F32, files: int = 1) -> Path:
    """A llama in `hf` with a foreign tokenizer, data prepared with it, and `base`, the directory it is converted to."""
    from axonn_jax.cli.main import main  # of the other models here none needs a command

    source = write_model(root / "hf", CONFIGS["llama"], weights(CONFIGS["llama"], dtype), files)
    # Its end is not number 0.
    (source / "tokenizer.json").write_text(bpe(290, ["<pad>", "<|endoftext|>"]).to_str())
    (root / "text").mkdir()
    for number in range(4):
        (root / "text" / f"{number}.txt").write_text("the token of the mesh and the shard\n" * (20 + number))
    prepare(root / "text", root / "data", tokenizer=source, holdout=0.3)
    assert main(["convert", str(source), str(root / "base")]) == 0
    return root


def read_model(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a directory, by the library's own reader."""
    state: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= safetensors.numpy.load_file(path)
    return state


def generating(family: str) -> dict:
    """A family's config with room for longer texts."""
    longer = {name: 128 for name in LENGTHS if name in CONFIGS[family]}
    return CONFIGS[family] | longer


def bpe(vocab_size, special_tokens=()):
    """A BPE of another kind than `prepare` trains: with a normalizer."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.normalizer = tokenizers.normalizers.NFC()
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special_tokens), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the token of the mesh and the shard of the token"] * 50, trainer)
    return made
