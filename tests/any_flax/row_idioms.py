"""Idioms of losses in public scripts, and what their programs say about parts of the rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

ROWS, WIDTH, CLASSES = 24, 8, 6


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.norm = nnx.Linear(WIDTH, 16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
        self.last = nnx.Linear(16, CLASSES, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        return self.last(self.norm(nnx.silu(self.first(x))))


def batches(count: int) -> list[dict[str, np.ndarray]]:
    """Batches with masks that are alike in all parts of the first three, as in a corpus sorted by length."""
    made = []
    for seed in range(count):
        draw = np.random.default_rng(seed)
        mask = draw.uniform(size=ROWS) < 0.6 if seed > 2 else np.ones(ROWS)
        x, label = draw.normal(size=(ROWS, WIDTH)).astype(np.float32), draw.integers(0, CLASSES, ROWS)
        columns = (draw.uniform(size=(ROWS, CLASSES)) < 0.6).astype(np.float32)
        made.append({"x": x, "label": label, "mask": mask.astype(np.float32), "columns": columns})
    return made


def counted(batch):
    return batch["mask"].sum()


def cross_entropy(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"])


def masked_mean(model, batch):
    return (cross_entropy(model, batch) * batch["mask"]).sum() / batch["mask"].sum()


def mean_by_task(model, batch):
    task = batch["label"] % 3
    sums = jax.ops.segment_sum(cross_entropy(model, batch), task, 3)
    return (sums / jnp.maximum(jax.ops.segment_sum(jnp.ones(len(task)), task, 3), 1)).mean()


def mask_over_its_columns(model, batch):
    return (jnp.square(model(batch["x"])) * (batch["columns"] / batch["columns"].sum(0))).sum()


def class_weights(model, batch):
    counts = jnp.bincount(batch["label"], length=CLASSES)
    weights = len(batch["label"]) / (CLASSES * jnp.maximum(counts, 1))
    return (cross_entropy(model, batch) * weights[batch["label"]]).mean()


def leave_one_out(model, batch):
    losses = cross_entropy(model, batch)
    reward = lax.stop_gradient(losses)
    return ((reward - (reward.sum() - reward) / (len(reward) - 1)) * losses).mean()


def capacity(model, batch):
    chosen = jax.nn.one_hot(model(batch["x"]).argmax(-1), CLASSES)
    place = (jnp.cumsum(chosen, 0) * chosen).sum(-1)
    return jnp.where(place <= ROWS // 2, cross_entropy(model, batch), 0.0).mean()


def later_by_a_counter(model, batch):
    model.calls[...] = model.calls[...] + 1
    logits = model(batch["x"])
    spread = lax.cond(model.calls[...] > 3, lambda z: z.var(0).mean(), lambda z: 0.0, logits)
    return cross_entropy(model, batch).mean() + spread


def rare_branch(model, batch):
    logits = model(batch["x"])
    return cross_entropy(model, batch).mean() + lax.cond(
        jnp.abs(logits).max() > 3, lambda z: jnp.square(z).mean(), lambda z: 0.0, logits
    )


def second_mean(model, batch):
    return masked_mean(model, batch) + 0.3 * jnp.square(model(batch["x"])).mean()


def mapped_over_rows(model, batch):
    def one(row):
        return cross_entropy(model, {"x": row[0][None], "label": row[1][None]})[0]

    return lax.map(one, (batch["x"], batch["label"])).mean()


def added_up_over_rows(model, batch):
    def one(total, row):
        return total + cross_entropy(model, {"x": row[0][None], "label": row[1][None]})[0], None

    return lax.scan(one, 0.0, (batch["x"], batch["label"]))[0] / len(batch["x"])


def running_mean(model, batch):
    def one(average, value):
        average = 0.9 * average + 0.1 * value
        return average, average

    return lax.scan(one, 0.0, cross_entropy(model, batch))[1].mean()


def safe_mean(model, batch):
    count = batch["mask"].sum()
    mean = (cross_entropy(model, batch) * batch["mask"]).sum() / jnp.where(count > 0, count, 1)
    return jnp.where(count > 0, mean, 0.0)


def only_with_many(model, batch):
    count = batch["mask"].sum()
    return jnp.where(count > ROWS // 3, (cross_entropy(model, batch) * batch["mask"]).sum() / count, 0.0)


def doubled_over_rows(model, batch):
    return lax.scan(lambda total, value: (total + total + value, None), 0.0, cross_entropy(model, batch))[0]


def one_row_behind(model, batch):
    def one(carry, value):
        _, total = carry
        return (total, total + value), None

    return lax.scan(one, (0.0, 0.0), cross_entropy(model, batch))[0][0] / len(batch["x"])


def mean_over_a_floor(model, batch):
    return (cross_entropy(model, batch) * batch["mask"]).mean() / jnp.maximum(batch["mask"].mean(), 1)


def neighbours_in_pairs(model, batch):
    score = model(batch["x"])[:, 0]
    return -jax.nn.log_sigmoid(score[0::2] - score[1::2]).mean()


def halves_in_pairs(model, batch):
    score = model(batch["x"])[:, 0]
    return -jax.nn.log_sigmoid(score[: len(score) // 2] - score[len(score) // 2 :]).mean()


def groups_of_four(model, batch):
    losses = cross_entropy(model, batch).reshape(-1, 4)
    return jnp.square(losses - losses.mean(-1, keepdims=True)).mean() + losses.mean()


def looked_up_by_arange(model, batch):
    logs = jax.nn.log_softmax(model(batch["x"]))
    return -logs[jnp.arange(len(logs)), batch["label"]].mean()


def weights_by_place(model, batch):
    return (cross_entropy(model, batch) * jnp.linspace(0.5, 1.5, len(batch["x"]))).mean()


def recall_beside(model, batch):
    positive = batch["label"] > 2
    right = (model(batch["x"]).argmax(-1) == batch["label"]) & positive
    return cross_entropy(model, batch).mean(), {"recall": right.sum() / jnp.maximum(positive.sum(), 1)}


def correlation(model, batch):
    a, b = model(batch["x"])[:, 0], batch["x"][:, 0]
    a, b = a - a.mean(), b - b.mean()
    return 1 - (a * b).sum() / jnp.sqrt(jnp.square(a).sum() * jnp.square(b).sum() + 1e-6)


def dice(model, batch):
    p, y = jax.nn.sigmoid(model(batch["x"])[:, 0]), (batch["label"] > 2).astype(jnp.float32)
    return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())


def triplet_by_roll(model, batch):
    z = model(batch["x"])
    return jax.nn.relu(jnp.square(z - jnp.roll(z, 1, 0)).sum(-1) - jnp.square(z).sum(-1) + 1).mean()


def contrast(model, batch):
    z = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z))).mean()


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, grad: (jnp.clip(grad, -0.01, 0.01),))


@jax.custom_vjp
def reversed_gradient(x):
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, grad: (-0.1 * grad,))


def squares(model, batch, through=lambda x: x):
    return jnp.square(through(model(batch["x"])) - batch["x"][:, :CLASSES]).mean()


def penalty(model, batch):
    grads = jax.grad(lambda x: model(x).sum())(batch["x"])
    return jnp.square(jnp.square(grads).sum(-1) - 1).mean()


def queue(model, batch):
    z = model(batch["x"])
    return jax.nn.logsumexp(z @ jnp.concatenate([z, jnp.ones((10, CLASSES))]).T, -1).mean()


def drawn_mask(model, batch, key):
    mask = jax.random.bernoulli(key, 0.5, (len(batch["x"]),)).astype(jnp.float32)
    return (cross_entropy(model, batch) * mask).sum() / mask.sum()


def shuffled_pairs(model, batch, key):
    z = model(batch["x"])
    return jnp.square(z - z[jax.random.permutation(key, len(z))]).mean()


def diffusion(model, batch, key):
    first, second = jax.random.split(key)
    x, time = batch["x"], jax.random.uniform(first, (len(batch["x"]), 1))
    return jnp.square(model(x * time + jax.random.normal(second, x.shape)) - x[:, :CLASSES]).mean()


class Idiom(NamedTuple):
    loss: Callable[..., Any]
    kind: str
    said: str = ""
    """What the reason says."""
    weight: Any = None


IDIOMS = {
    "mean": Idiom(lambda m, b: cross_entropy(m, b).mean(), "proven"),
    "mean of a mask": Idiom(masked_mean, "weighted", "a mean over what a mask counts (div, row_idioms.py:"),
    "mean of a mask, weight=": Idiom(masked_mean, "proven", weight=counted),
    "weight= of another count": Idiom(masked_mean, "not understood", "in another way", lambda b: b["columns"].sum()),
    "jnp.average": Idiom(lambda m, b: jnp.average(cross_entropy(m, b), weights=b["mask"]), "proven", weight=counted),
    "mean where": Idiom(
        lambda m, b: jnp.mean(cross_entropy(m, b), where=b["mask"] > 0),
        "proven",
        weight=lambda b: (b["mask"] > 0).sum(),
    ),
    "mean of a mask or 0": Idiom(safe_mean, "proven", weight=counted),
    "mean of a mask of many": Idiom(only_with_many, "coupled", "no sum over rows", counted),
    "weight= that is no sum": Idiom(
        lambda m, b: cross_entropy(m, b).mean(), "not understood", "weight=, ", lambda b: jnp.sqrt(b["mask"].sum())
    ),
    "a mean over a floor of 1": Idiom(mean_over_a_floor, "coupled", "no sum over rows (max, ", counted),
    "mean by task": Idiom(mean_by_task, "coupled", "no sum over rows"),
    "mask over its columns": Idiom(mask_over_its_columns, "coupled", "(div, "),
    "class weights by bincount": Idiom(class_weights, "coupled", "(gather, "),
    "leave one out": Idiom(leave_one_out, "coupled", "(sub, "),
    "capacity that is reached later": Idiom(capacity, "coupled", "(cumsum, "),
    "a term switched on by a counter": Idiom(later_by_a_counter, "coupled", "row_idioms.py:"),
    "a rare branch": Idiom(rare_branch, "coupled", "the largest over rows (reduce_max, "),
    "weight= beside a second mean": Idiom(second_mean, "coupled", "beside another mean", counted),
    "two means": Idiom(second_mean, "coupled", "beside another mean"),
    "lax.map over rows": Idiom(mapped_over_rows, "proven"),
    "lax.scan over rows": Idiom(added_up_over_rows, "proven"),
    "a running mean over rows": Idiom(running_mean, "coupled", "a running sum over rows (mul, "),
    "a sum that doubles over rows": Idiom(doubled_over_rows, "coupled", "a running sum over rows (add, "),
    "a sum that is one row behind": Idiom(one_row_behind, "coupled", "what a loop over rows carries"),
    "pairs of neighbours": Idiom(neighbours_in_pairs, "proven"),
    "pairs of halves": Idiom(halves_in_pairs, "coupled", "rows chosen by their place (slice, "),
    "groups of four": Idiom(groups_of_four, "proven"),
    "looked up by arange": Idiom(looked_up_by_arange, "proven"),
    "weights by a row's place": Idiom(weights_by_place, "coupled", "row_idioms.py:"),
    "recall beside": Idiom(recall_beside, "coupled", "beside a mean over something else"),
    "a sum": Idiom(lambda m, b: cross_entropy(m, b).sum(), "coupled", "a sum over rows where parts are averaged"),
    "a sum by a constant": Idiom(lambda m, b: cross_entropy(m, b).sum() / ROWS, "coupled", "parts are averaged"),
    "root mean square": Idiom(lambda m, b: jnp.sqrt(jnp.square(m(b["x"])).mean()), "coupled", "(sqrt, "),
    "correlation": Idiom(correlation, "coupled", "(sub, "),
    "dice": Idiom(dice, "coupled", "that the model or a draw is in"),
    "triplets by roll": Idiom(triplet_by_roll, "coupled", "(slice, "),
    "contrast": Idiom(contrast, "coupled", "rows beside other rows (dot_general, "),
    "clipped cotangents": Idiom(lambda m, b: squares(m, b, clipped), "coupled", "in the backward pass"),
    "a reversed gradient": Idiom(lambda m, b: squares(m, b, reversed_gradient), "proven"),
    "gradient penalty": Idiom(penalty, "proven"),
    "a queue of negatives": Idiom(queue, "coupled", "rows beside others in one array (concatenate, "),
    "largest of a row": Idiom(lambda m, b: lax.top_k(m(b["x"]), 2)[0].mean(), "proven"),
    "a row sorted": Idiom(lambda m, b: (jnp.sort(m(b["x"]), -1) * jnp.arange(1.0, 1 + CLASSES)).mean(), "proven"),
    "dot with a mask": Idiom(lambda m, b: jnp.dot(cross_entropy(m, b), b["mask"]) / len(b["mask"]), "proven"),
    "a mask that is drawn": Idiom(drawn_mask, "coupled", "row_idioms.py:"),
    "pairs that are drawn": Idiom(shuffled_pairs, "coupled", "row_idioms.py:"),
    "diffusion": Idiom(diffusion, "proven"),
}
