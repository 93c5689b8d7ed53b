"""Reference of a transformer in float64, with its loss and gradients: formulas that import nothing of the package.

Of papers and docs: attention with grouped heads, rotary or learned positions and windows, norms, feed-forward layers,
experts (Mixtral, arXiv 2401.04088; DeepSeek-V3, arXiv 2412.19437, with its balance loss, eq. 17 to 20), capacity (TED,
ICS 23), packed rows, pruned weights. A shape is any object with the fields of the package's `ModelShape`.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = Any
ID, COUNTS = (1 << 24) - 1, 1 << 30  # a packed word: its id, whether it is trained on; below zero: a document begins


class Rows(NamedTuple):
    """What a batch says, each [rows, seq]."""

    ids: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    """What each target counts in the loss: 1 or 0."""
    document: np.ndarray
    place: np.ndarray
    """In its document."""
    text: np.ndarray
    """Whether a token is text; the others are padding."""


class Answer(NamedTuple):
    """What a step must give."""

    loss: float
    held_out: float
    """The loss where no token is dropped."""
    grads: dict[str, np.ndarray]
    loads: dict[str, np.ndarray]
    """Choices of each expert, by the layer's number."""
    undecided: int
    """Choices that rounding may turn: the last expert chosen and the next one have nearly the same score."""


def rows_of(batch: np.ndarray, *, packed: bool) -> Rows:
    """Takes a batch [rows, seq + 1] apart."""
    place = np.broadcast_to(np.arange(batch.shape[1] - 1), batch[:, 1:].shape)
    if not packed:
        every = np.ones(place.shape, bool)
        return Rows(batch[:, :-1], batch[:, 1:], every.astype(float), np.zeros_like(place), place, every)
    starts, trained = batch < 0, batch & COUNTS != 0
    document = np.cumsum(starts, axis=1)
    begins = np.maximum.accumulate(np.where(starts[:, :-1], place, 0), axis=1)
    text = [[trained[row, document[row] == number].any() for number in document[row, :-1]] for row in range(len(batch))]
    weights = (trained & ~starts)[:, 1:].astype(float)
    ids = batch & ID
    return Rows(ids[:, :-1], ids[:, 1:], weights, document[:, :-1], place - begins, np.asarray(text))


class Reference:
    """A model's parameters, by the package's names, on one batch."""

    def __init__(
        self,
        params: Mapping[str, np.ndarray],
        shape: Any,
        batch: np.ndarray,
        *,
        packed: bool = False,
        balance: float = 0.0,
        capacity: float | None = None,
        sent: Sequence[np.ndarray] = (),
        masks: Mapping[str, np.ndarray] | None = None,
    ):
        """`sent` are groups of tokens, numbered through the batch, that one device sends to experts with a capacity."""
        self.shape, self.rows, self.balance, self.sent = shape, rows_of(batch, packed=packed), balance, sent
        self.capacity, self.masks = capacity, masks or {}
        self.params = {name: np.asarray(value, np.float64) for name, value in params.items()}
        self._compiled: Any = None

    def answer(self, near: float = 0.0, moved: float = 0.0) -> Answer:
        """Computes it; where two experts' scores differ by less than `near`, with the one that is not the larger.

        Of weights that are `moved` up or down by so much of themselves, at random, each on its own.
        """
        draw = np.random.default_rng(0)
        params = {name: value * (1 + moved * draw.choice([-1, 1], value.shape)) for name, value in self.params.items()}
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            if self._compiled is None:
                self._compiled = jax.jit(jax.value_and_grad(self._objective, has_aux=True))
            (_, notes), grads = self._compiled(params, near)
        loss, held_out, loads, undecided = jax.tree.map(np.asarray, notes)
        kept = {name: np.asarray(grad) for name, grad in grads.items()}
        return Answer(float(loss), float(held_out), kept, loads, int(undecided))

    def _objective(self, params: Mapping[str, Array], near: Array) -> tuple[Array, Any]:
        params = {name: value * self.masks.get(name, 1.0) for name, value in params.items()}
        count = self.rows.weights.sum()
        loss, balance, loads, undecided = self._forward(params, near, self.capacity)
        held_out = loss if self.capacity is None else self._forward(params, near, None)[0]
        return (loss + self.balance * balance) / count, (loss / count, held_out / count, loads, undecided)

    def _forward(self, params: Mapping[str, Array], near: Array, capacity: float | None) -> tuple[Any, ...]:
        """Sums over targets of the loss and of imbalances; choices of each layer's experts; those undecided."""
        shape, rows = self.shape, self.rows
        x = params["embedding.table"][rows.ids][..., : shape.hidden]
        if shape.embedding_scale:
            x = x * math.sqrt(shape.hidden)
        if shape.positions == "learned":
            x = x + params["positions.table"][rows.place]
        balance, undecided, loads = 0.0, 0, {}
        for layer in range(shape.layers):
            start = f"blocks.{layer}."
            own = {name.removeprefix(start): value for name, value in params.items() if name.startswith(start)}
            window = (
                0 if shape.window_period and layer % shape.window_period == shape.window_period - 1 else shape.window
            )
            x = x + after(
                own, "attention", shape, attention(own, shape, norm(own, "attention_norm", shape, x), rows, window)
            )
            h = norm(own, "mlp_norm", shape, x)
            if "mlp.router.kernel" not in own:
                x = x + after(own, "mlp", shape, feed_forward(own, "mlp", shape.mlp, h))
                continue
            routing = Routing(own, shape, h, rows, near)
            weights = routing.weights if capacity is None else routing.weights * self._kept(routing.chosen, capacity)
            x = x + experts(own, shape.mlp, h, weights.sum(axis=2))
            if shape.shared_experts:
                x = x + feed_forward(own, "mlp.shared", shape.mlp, h)
            balance, undecided = balance + routing.imbalance(rows), undecided + routing.undecided
            loads[str(layer)] = routing.chosen.sum(axis=(0, 1, 2))
        x = norm(params, "norm", shape, x)
        logits = x @ (params["embedding.table"].T if shape.tied else params["head.kernel"])
        logits = bounded(logits[..., : shape.vocab], shape.logits_cap)
        of_target = jnp.take_along_axis(logits, rows.targets[..., None], axis=-1)[..., 0]
        loss = jnp.sum((jax.nn.logsumexp(logits, axis=-1) - of_target) * rows.weights)
        return loss, balance, loads, undecided

    def _kept(self, chosen: Array, capacity: float) -> Array:
        """Which choices [rows, seq, k, experts] find a slot: first ones before second ones, tokens in their order."""
        k, count = chosen.shape[2:]
        flat = chosen.reshape(-1, k, count)
        kept = jnp.zeros_like(flat)
        for group in self.sent:
            slots = min(len(group), max(1, math.ceil(Fraction(capacity) * len(group) * k / count)))
            queue = flat[group].transpose(1, 0, 2).reshape(-1, count)
            fits = queue * (jnp.cumsum(queue, axis=0) <= slots)
            kept = kept.at[group].set(fits.reshape(k, -1, count).transpose(1, 0, 2))
        return kept.reshape(chosen.shape)


class Routing:
    """A router's choices for tokens [rows, seq, hidden]."""

    def __init__(self, p: Mapping[str, Array], shape: Any, h: Array, rows: Rows, near: Array):
        self.experts, self.k = shape.experts, shape.experts_per_token
        scores = h @ p["mlp.router.kernel"]
        sigmoid = shape.router == "sigmoid"
        gates = 1 / (1 + jnp.exp(-scores)) if sigmoid else softmax(scores)
        self.shares = gates / gates.sum(axis=-1, keepdims=True)
        ranked = jax.lax.stop_gradient(gates + p["mlp.router.bias"])
        turned = jnp.zeros(ranked.shape[:-1], bool)
        if shape.router_groups > 1:
            groups = ranked.reshape(*ranked.shape[:-1], shape.router_groups, -1)
            of_group = jnp.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
            kept, turned = best(of_group, shape.router_groups_kept, near)
            ranked = jnp.where(kept.any(axis=-2)[..., None], groups, -jnp.inf).reshape(ranked.shape)
        chosen, close = best(ranked, self.k, near)
        text = rows.text[..., None, None]
        self.chosen = jnp.where(text, chosen, False).astype(jnp.float64)
        """[rows, seq, k, experts]: 1 or 0; padding chooses none."""
        self.undecided = jnp.sum((close | turned) & rows.text)
        weights = chosen * gates[..., None, :]
        if shape.router_norm:
            weights = weights / weights.sum(axis=(2, 3), keepdims=True)
        self.weights = shape.router_scale * weights * text

    def imbalance(self, rows: Rows) -> Array:
        """Sum over rows of their imbalance, each times its number of targets that count."""
        tokens = np.maximum(rows.text.sum(axis=1, keepdims=True), 1)
        often = self.chosen.sum(axis=(1, 2)) * self.experts / (self.k * tokens)
        mean = jnp.sum(self.shares * rows.text[..., None], axis=1) / tokens
        return jnp.sum((often * mean).sum(axis=-1) * rows.weights.sum(axis=1))


def best(ranked: Array, count: int, near: Array) -> tuple[Array, Array]:
    """The `count` largest of [..., n] as 1s in [..., count, n]; of equal ones the first; and whether the last is near.

    Where it is, the next one is in its place.
    """
    order = jnp.argsort(-ranked, axis=-1, stable=True)
    close = jnp.zeros(ranked.shape[:-1], bool)
    first = order[..., :count]
    if count < ranked.shape[-1]:
        last, behind = (jnp.take_along_axis(ranked, order[..., at, None], axis=-1)[..., 0] for at in (count - 1, count))
        close = last - behind < near
        first = first.at[..., -1].set(jnp.where(close, order[..., count], first[..., -1]))
    return first[..., None] == jnp.arange(ranked.shape[-1]), close


def softmax(x: Array) -> Array:
    x = jnp.exp(x - jax.lax.stop_gradient(x.max(axis=-1, keepdims=True)))
    return x / x.sum(axis=-1, keepdims=True)


def norm(p: Mapping[str, Array], name: str, shape: Any, x: Array, kind: str = "") -> Array:
    kind = kind or shape.norm
    if kind == "layernorm":
        x = x - x.mean(axis=-1, keepdims=True)
    scale = p[f"{name}.scale"] + (kind == "rmsnorm_1p")
    return x / jnp.sqrt((x**2).mean(axis=-1, keepdims=True) + shape.norm_eps) * scale + p.get(f"{name}.shift", 0.0)


def after(p: Mapping[str, Array], half: str, shape: Any, x: Array) -> Array:
    """What half a block adds to the stream."""
    return norm(p, f"{half}_post_norm", shape, x) if shape.post_norms else x


def bounded(x: Array, cap: float) -> Array:
    return cap * jnp.tanh(x / cap) if cap else x


def linear(p: Mapping[str, Array], name: str, x: Array) -> Array:
    return x @ p[f"{name}.kernel"] + p.get(f"{name}.bias", 0.0)


def rotated(x: Array, place: np.ndarray, theta: float) -> Array:
    """Features i and i + d/2 of [rows, seq, heads, d] are real and imaginary part; the place turns them."""
    half = x.shape[-1] // 2
    angle = (place[..., None] * theta ** -(np.arange(half) / half))[:, :, None]
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def attention(p: Mapping[str, Array], shape: Any, x: Array, rows: Rows, window: int) -> Array:
    """A token sees itself and those before it, of its document and in its window."""
    count, seq, _ = x.shape
    groups, width = shape.kv_heads, shape.head_dim
    qkv = linear(p, "attention.qkv", x).reshape(count, seq, groups, -1, width)
    q, k, v = qkv[..., :-2, :].reshape(count, seq, shape.heads, width), qkv[..., -2, :], qkv[..., -1, :]
    if shape.qk_norm:
        q, k = (norm(p, f"attention.{name}_norm", shape, value, "rmsnorm") for name, value in (("q", q), ("k", k)))
    if shape.positions == "rope":
        q, k = (rotated(value, rows.place, shape.rope_theta) for value in (q, k))
    q = q.reshape(count, seq, groups, -1, width)
    scores = jnp.einsum("bqgnd,bkgd->bgnqk", q, k) / math.sqrt(shape.score_dim)
    scores = bounded(scores, shape.attention_cap)
    back = np.arange(seq)[:, None] - np.arange(seq)
    seen = (back >= 0) & (back < (window or seq)) & (rows.document[:, :, None] == rows.document[:, None])
    weights = softmax(jnp.where(seen[:, None, None], scores, -1e30))
    mixed = jnp.einsum("bgnqk,bkgd->bqgnd", weights, v)
    return linear(p, "attention.out", mixed.reshape(count, seq, -1))


def activated(kind: str, gate: Array | None, up: Array) -> Array:
    """GELU in its tanh form, or what a gate lets pass."""
    x = up if gate is None else gate
    if kind == "swiglu":
        passed = x / (1 + jnp.exp(-x))
    else:
        passed = x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    return passed if gate is None else passed * up


def feed_forward(p: Mapping[str, Array], name: str, kind: str, x: Array) -> Array:
    gate = None if kind == "gelu" else linear(p, f"{name}.gate", x)
    return linear(p, f"{name}.down", activated(kind, gate, linear(p, f"{name}.up", x)))


def experts(p: Mapping[str, Array], kind: str, x: Array, weights: Array) -> Array:
    """Every expert on every token [rows, seq, hidden], times its weight [rows, seq, experts], zero if not chosen."""

    def each(name: str) -> Array:
        return jnp.einsum("bsh,ehf->bsef", x, p[f"mlp.experts.{name}.kernel"])

    inner = activated(kind, None if kind == "gelu" else each("gate"), each("up"))
    return jnp.einsum("bsef,efh,bse->bsh", inner, p["mlp.experts.down.kernel"], weights)
