"""Text from the weights of a run or a pretrained directory: token by token, the window so far computed anew."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.checkpoint.restore import load_weights, named_checkpoint
from axonn_jax.data.tokenize import prompt_ids
from axonn_jax.distributed.host_sync import LocalSync
from axonn_jax.errors import UserError
from axonn_jax.grid import BATCH_AXES, Grid
from axonn_jax.models.config import ModelShape
from axonn_jax.models.huggingface.load import load_into
from axonn_jax.models.huggingface.pretrained import is_pretrained
from axonn_jax.models.huggingface.reader import Pretrained
from axonn_jax.models.transformer import Transformer
from axonn_jax.tensor.params import Params, SplitModule, split_module
from axonn_jax.tensor.specs import shard_mapped
from axonn_jax.tensor.weight_gather import gather_weights

_ROUND = 64
"""Windows are multiples of it or the model's whole sequence, so that prompts share what was compiled."""


class Generator:
    """A trained model and its tokenizer, ready to continue prompts on one device."""

    def __init__(
        self,
        run: Path,
        shape: ModelShape,
        tokenizer: Any,
        grid: Grid,
        warn: Callable[[str], None] = lambda text: None,
    ):
        if grid.shape.devices != 1:
            raise UserError("grid", grid.shape, "one device: generation on several is not supported by this version")
        self.shape, self.tokenizer = shape, tokenizer
        pretrained = Pretrained(run, "RUN_DIR") if is_pretrained(run) else None
        checkpoint = None if pretrained else named_checkpoint(run, LocalSync(), warn, "checkpoint")
        if checkpoint and shape.layers > len(checkpoint.manifest.arrays):  # before all of them are traced
            accepted = f"the layers of the checkpoint, whose arrays are {len(checkpoint.manifest.arrays)}"
            raise UserError("model.layers", shape.layers, accepted)
        parts = split_module(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0))))
        abstract = {
            name: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=NamedSharding(grid.mesh, parts.specs[name]))
            for name, p in parts.params.items()
        }
        self._path = checkpoint.path if checkpoint else run
        self.params: Params = {}
        if pretrained:
            self.params = load_into(pretrained, abstract)
        elif checkpoint:
            self.params = load_weights(checkpoint, abstract)

        def scores(params: Params, window: jax.Array, last: jax.Array) -> jax.Array:
            return logits(parts, grid.mesh, params, window)[0, last]

        self._parts, self._mesh, self._scores = parts, grid.mesh, jax.jit(scores)

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Float32 logits [sequences, seq, vocab] of [sequences, seq] tokens."""
        return np.asarray(jax.jit(partial(logits, self._parts, self._mesh))(self.params, tokens))

    def continue_prompt(self, prompt: str, *, tokens: int, temperature: float, top_k: int, seed: int) -> Iterator[str]:
        """Yields the continuation piece by piece; temperature 0 always takes the likeliest token.

        Raises ``UserError`` for a prompt without tokens.
        """
        ids = prompt_ids(self.tokenizer, prompt)
        draw, shown = np.random.default_rng(seed), ""
        start = len(ids)
        width = min(self.shape.seq_len, -(-(start + tokens) // _ROUND) * _ROUND)
        for _ in range(tokens):
            recent = ids[-width:]
            window = np.zeros((1, width), np.int32)
            window[0, : len(recent)] = recent  # causal: what stands behind the last token does not matter
            scores = np.asarray(self._scores(self.params, window, len(recent) - 1), np.float64)
            if not np.isfinite(scores).all():
                raise UserError("checkpoint", str(self._path), "weights that give finite scores for the next token")
            ids.append(_sample(scores[: self.tokenizer.get_vocab_size()], temperature, top_k, draw))
            text = self.tokenizer.decode(ids[start:])
            if not text.endswith("�"):  # a character whose bytes are not all there yet
                yield text[len(shown) :]
                shown = text


def logits(parts: SplitModule, mesh: Mesh, params: Params, tokens: jax.Array) -> jax.Array:
    """Float32 logits [sequences, seq, vocab] of [sequences, seq] tokens, laid out over `data`, `z` and `y`."""

    def local(params: Params, tokens: jax.Array) -> jax.Array:
        model: Any = parts.merge(params)
        dtype = jnp.dtype("float32")
        return gather_weights(model, dtype, skip=model.layer_list)(tokens, dtype=dtype)  # type: ignore[no-any-return]

    region = shard_mapped(local, mesh, (parts.specs, P(BATCH_AXES)), P(BATCH_AXES, None, "y"))
    return region(params, tokens)  # type: ignore[no-any-return]


def _sample(scores: Any, temperature: float, top_k: int, draw: np.random.Generator) -> int:
    if temperature == 0:
        return int(scores.argmax())
    if 0 < top_k < len(scores):
        scores = np.where(scores < np.partition(scores, -top_k)[-top_k], -np.inf, scores)
    weights = np.exp((scores - scores.max()) / temperature)
    return int(draw.choice(len(weights), p=weights / weights.sum()))
