"""Small models whose next tokens are far from ties, and their texts without a cache."""

from functools import partial

import grids
import jax
import numpy as np
from flax import nnx

import axonn_jax as ax
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.vocabulary import fit_vocabulary
from axonn_jax.core.tensor.params import split_module
from axonn_jax.text.inference.programs import logits

LLAMA = {
    "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 97, "seq_len": 160,
    "positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": "none", "tied": False,
}  # fmt: skip
GPT = {**LLAMA, "kv_heads": 4, "positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": "all", "tied": True}
KINDS = {
    "gpt": GPT,
    "llama": LLAMA,
    "window": {**LLAMA, "window": 20},
    "experts": {**LLAMA, "experts": 4, "expert_ffn": 16},
}
PROMPTS = [np.random.default_rng(n).integers(0, 97, n).tolist() for n in (1, 5, 30, 100)]


def model(**sizes):
    made = ax.models.Transformer(ax.models.ModelShape(**sizes), rngs=nnx.Rngs(1))
    graph, state = nnx.split(made)
    return nnx.merge(graph, jax.tree.map(lambda a: 4 * a if a.ndim > 1 else a, state))


def forward(made):
    """Logits of whole sequences, on one device."""
    grid = grids.lay(GridShape())
    parts = split_module(fit_vocabulary(made, grid.shape))
    return partial(jax.jit(partial(logits, parts, grid.mesh)), parts.params)


def continued(made, prompts, tokens):
    """Each prompt's likeliest continuation, the whole text computed anew for every token."""
    scores, texts = forward(made), []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(tokens):
            padded = np.zeros((1, len(prompt) + tokens), np.int32)
            padded[0, : len(ids)] = ids
            ids.append(int(np.argmax(scores(padded)[0, len(ids) - 1])))
        texts.append(ids[len(prompt) :])
    return texts
