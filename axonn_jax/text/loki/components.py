"""Principal components of a model's keys: computed over batches, saved to a file, loaded for generation."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from numpy.typing import NDArray

from axonn_jax.core.documents import parse_json, write_atomically
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import BATCH_AXES
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.options import CachedKeys, typed
from axonn_jax.core.tensor.attention import causal_attention
from axonn_jax.core.tensor.collectives import all_reduce
from axonn_jax.core.tensor.kernel_choice import AttentionRule
from axonn_jax.core.tensor.params import Params, SplitModule
from axonn_jax.core.tensor.specs import shard_mapped
from axonn_jax.text.inference.attend import FullAttention
from axonn_jax.text.inference.weights import at_first_copies
from axonn_jax.text.loki.attention import LokiAttention
from axonn_jax.text.loki.options import LokiOptions

FILE = "loki.safetensors"
_ORTHONORMAL = 1e-3
_PROJECTIONS = 4
# Tolerance of projections as a share of a kernel's norm. Rounding to bfloat16 moves a projection by 0.0017, RMS.
_SAME = 0.01


class Components(NamedTuple):
    """Principal components of the keys of every layer and KV head, by decreasing variance."""

    vectors: NDArray[np.float32]
    """[layers, kv_heads, D, D]; the columns are components."""
    means: NDArray[np.float32]
    """[layers, kv_heads, D], of the keys; not used in generation, as only a rotation leaves scores unchanged."""
    variances: NDArray[np.float32]
    """[layers, kv_heads, D]."""
    tokens: int

    def ranks(self, share: float = 0.9) -> NDArray[np.int64]:
        """Return the number of components that explain this share of the variance, [layers, kv_heads]."""
        sums = np.cumsum(self.variances.astype(np.float64), -1)
        return np.asarray((sums < share * sums[..., -1:]).sum(-1) + 1)


Moments = Callable[[Params, np.ndarray | jax.Array], dict[str, list[tuple[jax.Array, ...]]]]
"""Program of `moments`."""


def moments(parts: SplitModule, mesh: Mesh, dtype: DTypeLike) -> Moments:
    """Return a program: (params, tokens [rows, seq]) -> moments of the keys of every layer.

    The moments are sums of keys [kv_heads, D] and of their outer products [kv_heads, D, D], in float32, under "post"
    and "pre" for keys after and before the rotary embedding. Collectives: an all-reduce over `data` of
    2 kv_heads D (D + 1) float32 numbers per layer.
    """

    def local(params: Params, tokens: jax.Array) -> dict[str, list[tuple[jax.Array, ...]]]:
        model: Any = parts.merge(params)
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x, by = model.embed_at(tokens, places, dtype)
        keys: dict[str, list[tuple[jax.Array, ...]]] = {"post": [], "pre": []}

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, rule: AttentionRule) -> tuple[jax.Array, jax.Array]:
            return causal_attention(q, k, v, rule=rule), k

        for block in model.blocks:
            unrotated = block.attention.project(block.attention_norm(x), None)[1]
            x, k = block.attend_by(attend, x, by)
            x = block.feed_forward(x)
            keys["post"].append(_sums(k))
            keys["pre"].append(_sums(unrotated))
        return keys

    heads = parts.merge(parts.params).blocks[0].attention.qkv.comm  # type: ignore[attr-defined]
    spec = P(("y", "x") if heads == "gather" else "y")
    region = shard_mapped(local, mesh, (parts.specs, P(BATCH_AXES)), spec, differentiated=False)
    return jax.jit(region, out_shardings=NamedSharding(mesh, P()))


def _sums(k: jax.Array) -> tuple[jax.Array, ...]:
    k = k.astype(jnp.float32)
    sums = jnp.sum(k, (0, 1)), jnp.einsum("bskd,bske->kde", k, k, precision=lax.Precision.HIGHEST)
    return tuple(all_reduce(total, BATCH_AXES) for total in sums)


def calibrate(program: Moments, params: Params, batches: Iterable[np.ndarray | jax.Array]) -> dict[str, Components]:
    """Return the principal components of keys, "post" and "pre" rotary embedding, over batches of tokens [rows, seq].

    Args:
        program: Result of `moments`.
        params: Weights of the model.
        batches: Batches of tokens.
    """
    # Only moments reach the host, never keys; accumulate them in float64, as the variance is a difference of sums.
    total: Any = None
    tokens = 0
    for batch in batches:
        sums = jax.tree.map(lambda a: np.asarray(a, np.float64), jax.device_get(program(params, batch)))
        total = sums if total is None else jax.tree.map(np.add, total, sums)
        tokens += batch.size
    return {kind: _components(layers, tokens) for kind, layers in total.items()}


def _components(layers: Sequence[tuple[np.ndarray, ...]], tokens: int) -> Components:
    means, products = (np.stack([layer[at] for layer in layers]) / tokens for at in (0, 1))
    values, vectors = np.linalg.eigh(products - means[..., :, None] * means[..., None, :])
    components, centers, variances = (
        np.ascontiguousarray(a, np.float32) for a in (vectors[..., ::-1], means, np.maximum(values[..., ::-1], 0))
    )
    return Components(components, centers, variances, tokens)


def fingerprint(parts: SplitModule, params: Params, kv_heads: int) -> list[list[float]]:
    """Return random projections and the norm of every layer's query, key and value weights, equal on every grid.

    Args:
        parts: The model.
        params: Its weights.
        kv_heads: Number of KV heads without the copies that a grid may have.
    """

    def project(params: Params) -> list[jax.Array]:
        model: Any = parts.merge(params)
        signs, projected = np.random.default_rng(0), []
        for block in model.blocks:
            layer = block.attention.qkv
            kernel = layer.kernel.get_value().astype(jnp.float32)
            kernel = kernel.T if layer.turned else kernel
            sizes = kernel.shape[0], (model.shape.heads + 2 * kv_heads) * model.shape.head_dim
            rows, columns = (2 * signs.integers(0, 2, (_PROJECTIONS, size)) - 1 for size in sizes)
            columns = at_first_copies(columns.astype(np.float32), model.shape, kv_heads)
            operands = (rows.astype(np.float32), kernel, columns)
            sums = jnp.einsum("pi,ij,pj->p", *operands, precision=lax.Precision.HIGHEST)
            projected.append(jnp.append(sums, jnp.linalg.norm(kernel * np.abs(columns[:1]))))
        return projected

    return [layer.tolist() for layer in jax.device_get(jax.jit(project)(params))]


def save(components: Components, path: Path, shape: ModelShape, weights: Sequence[Sequence[float]], keys: str) -> None:
    """Write the components to a file, with the model's sizes and the `fingerprint` of its weights."""
    from safetensors.numpy import save as bytes_of

    facts = {"model": json.dumps(asdict(shape), sort_keys=True), "weights": json.dumps(weights)}
    arrays = {name: getattr(components, name) for name in ("vectors", "means", "variances")}
    write_atomically(path, bytes_of(arrays, {**facts, "tokens": str(components.tokens), "keys": keys}))


def load(path: Path, run: Path, shape: ModelShape) -> tuple[Components, Mapping[str, str]]:
    """Read components and the file's metadata.

    Raises:
        UserError: The file is missing, damaged or of another model.
    """
    from safetensors import SafetensorError, safe_open

    command = f"axonn-jax loki {run} --data DIR"
    if not path.is_file():
        raise UserError("--attention", "loki", f"a calibration in {path}: {command}")
    try:
        with safe_open(path, "numpy") as file:
            arrays = {name: file.get_tensor(name) for name in ("vectors", "means", "variances")}
            facts = dict(file.metadata() or {})
        components = Components(**arrays, tokens=int(facts["tokens"]))
        np.array(typed(tuple[tuple[float, ...], ...], parse_json(facts["weights"].encode()), "weights"))
        same = facts["model"] == json.dumps(asdict(shape), sort_keys=True)
        same &= components.vectors.shape == (shape.layers, shape.kv_heads, shape.head_dim, shape.head_dim)
        if same and not _orthonormal(components.vectors):
            raise ValueError("its components are not orthonormal")
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise UserError("--attention", "loki", f"a calibration: {path} is damaged ({error}); {command}") from None
    if not same:
        raise UserError("--attention", "loki", f"a calibration of this model: {path} is of another model; {command}")
    return components, facts


def _orthonormal(vectors: NDArray[np.generic]) -> bool:
    if vectors.dtype != np.float32:
        return False
    return np.allclose(np.swapaxes(vectors, -1, -2) @ vectors, np.eye(vectors.shape[-1]), atol=_ORTHONORMAL)


def check_weights(facts: Mapping[str, str], parts: SplitModule, params: Params, run: Path) -> None:
    """Check that components belong to these weights.

    Raises:
        UserError: They are of other weights.
    """
    theirs = np.array(json.loads(facts["weights"]))
    ours = np.array(fingerprint(parts, params, json.loads(facts["model"])["kv_heads"]))
    if theirs.shape != ours.shape or not (np.abs(theirs - ours) <= _SAME * ours[:, -1:]).all():
        accepted = f"a calibration of these weights, which have been trained since: axonn-jax loki {run} --data DIR"
        raise UserError("--attention", "loki", accepted)


def laid_out(components: Components, spec: P, mesh: Mesh, *, times: int = 1) -> list[jax.Array]:
    """Lay out each layer's components like the cache's heads, with every head repeated `times` times."""
    sharding = NamedSharding(mesh, spec)
    layers = [np.repeat(layer, times, 0) for layer in components.vectors]
    return [jax.make_array_from_callback(layer.shape, sharding, layer.__getitem__) for layer in layers]


def attention_of(name: CachedKeys, options: LokiOptions, shape: ModelShape) -> FullAttention:
    """Return the attention that a command line names."""
    if name == "full":
        return FullAttention()
    return LokiAttention(options.first(shape), options.keys, options.block)
