"""Low-rank adapters in a transformer's projections: creation, lookup, and merging into the kernels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from axonn_jax.core.adapters.config import TARGETS, Columns, LoraConfig, Target, check_shape, layers_of
from axonn_jax.core.backend.workarounds import over_rows
from axonn_jax.core.errors import UserError, integer, typed_arguments
from axonn_jax.core.models.transformer import Transformer
from axonn_jax.core.options import typed
from axonn_jax.core.tensor.elementwise import DropoutKey
from axonn_jax.core.tensor.elementwise import dropout as dropped
from axonn_jax.core.tensor.linear import Linear, matmul
from axonn_jax.core.tensor.params import constant_param, key_of, layout, split_module, uniform_param


class Adapter(nnx.Module):
    """Adapters of one layer, `s (X A) B`: one for all columns of its kernel, or one for each of several `Columns`.

    With several targets, their A [in, rank] are concatenated side by side, and their B [rank, out] share one array that
    has the kernel's columns. Source: LoRA (Hu et al., arXiv 2106.09685).
    """

    # A is split over the axis of the layer's input and B over that of its output, so that the products are partial sums
    # like the layer's own and one all-reduce serves both.

    def __init__(self, layer: Linear, targets: Mapping[Target, Columns | None], config: LoraConfig, key: jax.Array):
        kernel = layer.kernel
        rows, columns = kernel.get_value().shape
        rows_over, columns_over = (*layout(kernel.get_metadata()), None)[:2]
        self.targets, self.columns = tuple(targets), tuple(targets.values())
        self.config = config
        # `z` splits neither: A would have to be gathered for each use, and the memory saved is negligible.
        axes = rows_over if isinstance(rows_over, tuple) else (rows_over,)
        self.inner = tuple(axis for axis in axes if axis not in (None, "z"))
        bound = rows**-0.5  # as in PEFT: Kaiming uniform with a = sqrt(5)
        sizes = (rows, len(targets) * config.rank)
        self.a = uniform_param(key, sizes, bound, P(self.inner or None, None), role="adapter")
        self.b = constant_param((config.rank, columns), 0.0, P(None, columns_over), role="adapter")

    def __call__(self, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """Return partial sums [batch, seq, out/Gout] for `x` [batch, seq, in/Gin], in its dtype; no collectives.

        With a `key`, input features are dropped with an independent mask for each target.
        """
        a, b = self.a.get_value().astype(x.dtype), self.spread().astype(x.dtype)

        def inner(x: jax.Array, a: jax.Array) -> jax.Array:
            return over_rows(lambda rows: matmul(rows, a), x)

        rate = self.config.dropout
        if key is None or rate == 0.0:
            h = inner(x, a)
        else:
            keys = [key.fold_in(_DROPOUT + TARGETS.index(target)) for target in self.targets]
            parts = zip(keys, jnp.split(a, len(keys), 1), strict=True)
            h = jnp.concatenate(
                [inner(dropped(x, rate, target_key, axes=self.inner), a) for target_key, a in parts], -1
            )
        return over_rows(lambda rows: matmul(rows * jnp.asarray(self.config.scale, x.dtype), b), h)

    def spread(self) -> jax.Array:
        """Return B of all adapters stacked, [adapters * rank, out]; zero outside each adapter's columns."""
        return spread(self.b.get_value(), self.columns, jnp)


def spread(b: jax.Array | np.ndarray, columns: Sequence[Columns | None], numbers: ModuleType) -> Any:
    """Return B [rank, out] in the form of `Adapter.spread`; `numbers` is jax.numpy or numpy."""
    column = numbers.arange(b.shape[1])

    def only(target: Columns | None) -> Any:
        if target is None:
            return b
        at = column % target.period
        return numbers.where((at >= target.start) & (at < target.stop), b, 0)

    return numbers.concatenate([only(target) for target in columns])


def added(
    kernel: jax.Array, a: jax.Array, b: jax.Array, scale: ArrayLike, columns: Sequence[Columns | None]
) -> jax.Array:
    """Return the kernel with adapters merged in, computed in float32; no collectives."""
    delta = scale * jnp.dot(a, spread(b, columns, jnp), precision=jax.lax.Precision.HIGHEST)
    return (kernel.astype(jnp.float32) + delta).astype(kernel.dtype)


# Constants folded into keys: dropout of adapters comes after that of a block's two halves (0 and 1), and the adapters'
# initial values must not share a stream with the model's layers, which may have the same seed.
_DROPOUT = 2
_STREAM = 0x10A


@typed_arguments
def lora(
    model: Any,
    *,
    rank: int,
    alpha: float = LoraConfig.alpha,
    targets: Sequence[str] = TARGETS,
    rslora: bool = False,
    dropout: float = 0.0,
    seed: int = 0,
) -> Any:
    """Add low-rank adapters to a transformer; a `Trainer` then trains only them. Initially they add nothing.

    Args:
        model: A `models.Transformer`, modified in place, or a function that creates one.
        rank: Rank of every adapter.
        alpha: Scale of the adapters' output, which is multiplied by alpha / rank.
        targets: Projections that get adapters, among q, k, v, o, gate, up and down; gate only if the model has one.
        rslora: True to divide alpha by the square root of the rank instead.
        dropout: Probability of dropping an input feature of an adapter in training.
        seed: Seed of the adapters' initial values.

    Returns:
        The same model, or a function that creates it with adapters.

    Raises:
        UserError: A number is out of range, a target is unknown, or the model cannot have adapters.
    """
    listed = [targets] if isinstance(targets, str) else [*targets]
    seed = integer("seed", seed, 0)
    settings = {"rank": rank, "alpha": alpha, "targets": listed, "rslora": rslora, "dropout": dropout}
    config = typed(LoraConfig, settings, "lora")
    if not config.adapts:
        raise UserError("lora.rank", rank, "an integer of at least 1")
    if callable(model) and not isinstance(model, nnx.Module):
        make: Callable[[], Transformer] = model
        return lambda: with_adapters(make(), config, seed)
    return with_adapters(model, config, seed)


def with_adapters(model: Transformer, config: LoraConfig, seed: int) -> Transformer:
    """Add adapters to the model's layers in place and return it; raises ``UserError`` if it cannot have them."""
    check_adaptable(model, config)
    root = jax.random.fold_in(key_of(seed), _STREAM)
    for adapted in layers_of(model.shape, config):
        layer: Linear = attrgetter(adapted.path)(model.blocks[adapted.block])
        # Keyed by block and target, so that initial values do not depend on which other layers have adapters.
        key = jax.random.fold_in(jax.random.fold_in(root, adapted.block), TARGETS.index(next(iter(adapted.targets))))
        layer.adapt(Adapter(layer, adapted.targets, config, key))
    model.drops_out |= config.dropout > 0.0
    return model


def check_adaptable(model: object, config: LoraConfig) -> None:
    """Raise ``UserError`` if the model cannot have adapters with these settings."""
    config.check()
    if not isinstance(model, Transformer):
        accepted = "a models.Transformer: no other model's layers take adapters, nor those of ax.parallelize"
        raise UserError("lora", type(model).__name__, accepted)
    check_shape(model.shape, config)
    if model.moe.balance_rate:
        accepted = "0 beside adapters, whose base is frozen, routers' biases too"
        raise UserError("moe.balance_rate", model.moe.balance_rate, accepted)
    if settings_of(model) is not None:
        raise UserError("lora", "a model with adapters", "a model without: adapters on adapters are not trained")


def check_no_adapters(model: nnx.Module) -> None:
    """Raise ``UserError`` if the model has adapters; for trainers that would train all of its parameters."""
    if settings_of(model) is not None:
        raise UserError("loss", "a model with adapters", "left out: adapters are trained by the model's own loss")


def settings_of(model: object) -> LoraConfig | None:
    """Return the settings of a model's adapters; None if it has none."""
    adapters = list(adapters_of(model))
    if not adapters:
        return None
    used = {target for adapter in adapters for target in adapter.targets}
    targets = tuple(target for target in TARGETS if target in used)
    return replace(adapters[0].config, targets=targets, dropout=0.0)


def adapters_of(model: object) -> Iterator[Adapter]:
    """Yield the adapters of a model."""
    if isinstance(model, Transformer):
        for _, module in nnx.iter_modules(model):
            if isinstance(module, Adapter):
                yield module


def merged(model: Transformer) -> Transformer:
    """Return a copy with adapters merged into the kernels, or the model itself if it has none; no collectives."""
    if settings_of(model) is None:
        return model
    parts = split_module(model)
    plain: Any = parts.merge(parts.params)
    for _, layer in nnx.iter_modules(plain):
        if isinstance(layer, Linear) and isinstance(layer.adapter, Adapter):
            adapter, a, b = layer.adapter, layer.adapter.a.get_value(), layer.adapter.b.get_value()
            layer.kernel.set_value(added(layer.kernel.get_value(), a, b, adapter.config.scale, adapter.columns))
            layer.adapt(None)
    return plain  # type: ignore[no-any-return]
