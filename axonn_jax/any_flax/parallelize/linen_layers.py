"""NNX counterparts of Linen layers, through which a Linen loss runs its layers sharded."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import linen, nnx
from jax.sharding import Mesh

from axonn_jax.any_flax.parallelize.convolution import ByRows
from axonn_jax.any_flax.parallelize.kinds import Kernel, Norm, describe

LayerParams = Mapping[str, Any]
"""A layer's parameters by name."""


@dataclass(frozen=True)
class Counterpart:
    """NNX type that computes the same as a Linen type."""

    kind: type[nnx.Module]
    params: tuple[str, ...]
    """Names of the parameters; a layer with an option `use_<name>` may lack that parameter."""
    arguments: Callable[[Any, Any, LayerParams], dict[str, Any]]
    """Builds the NNX type's arguments from a Linen layer, its input and its parameters."""
    unsupported: tuple[str, ...] = ()
    """Options of the Linen type without an equivalent in the NNX type."""
    norm: bool = False

    def build(self, module: Any, x: Any, params: LayerParams, dtype: Any) -> nnx.Module:
        """Return an NNX layer that computes in `dtype` and shares the given parameters without a copy."""
        inits = {f"{name}_init": _constant_init(value) for name, value in params.items()}
        # Norms compute in float32 regardless of their input's dtype; `LayerCall.run` casts the result afterwards.
        common = {"dtype": None} if self.norm else {"dtype": dtype, "promote_dtype": _promoter(module)}
        common |= {"param_dtype": module.param_dtype, "rngs": _NoKeys()}
        layer: Any = self.kind(**inits, **common, **self.arguments(module, x, params))
        # nnx.Embed replaces a dtype of None by its table's, so restore what the Linen layer asked for.
        layer.dtype = common["dtype"]
        return layer  # type: ignore[no-any-return]


class _NoKeys:
    """Stand-in for `nnx.Rngs`: the initializers return existing parameters and need no key."""

    def params(self) -> None:
        """Return None in place of a key."""


def _constant_init(value: Any) -> Callable[..., Any]:

    def init(_: None, shape: tuple[int, ...], dtype: Any) -> Any:
        if math.prod(shape) != value.size:
            # `LayerCall.described` catches this and reports the layer as unsplittable.
            raise ValueError(f"{value.shape} is not {shape}")
        return value

    return init


def _promoter(module: Any) -> Callable[..., Any]:
    # Linen passes the operands as separate arguments, NNX as one tuple.
    return lambda args, /, *, dtype=None, inexact=True: module.promote_dtype(*args, dtype=dtype, inexact=inexact)


def _options(module: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


def _dense(module: Any, x: Any, params: LayerParams) -> dict[str, Any]:
    return {"in_features": x.shape[-1], "out_features": module.features, **_options(module, "use_bias", "precision")}


def _dense_general(module: Any, x: Any, params: LayerParams) -> dict[str, Any]:
    axes = module.axis if isinstance(module.axis, tuple | list) else (module.axis,)
    axis = tuple(sorted(dim if dim < 0 else dim - x.ndim for dim in axes))
    sizes = tuple(x.shape[dim] for dim in axis)
    sides = {"in_features": sizes, "out_features": module.features, "axis": axis}
    return {**sides, **_options(module, "use_bias", "precision")}


def _einsum(module: Any, x: Any, params: LayerParams) -> dict[str, Any]:
    return {
        "kernel_shape": tuple(module.shape),
        "bias_shape": params["bias"].shape if "bias" in params else None,
        **_options(module, "einsum_str", "precision", "preferred_element_type"),
    }


def _conv(module: Any, x: Any, params: LayerParams) -> dict[str, Any]:
    names = ("kernel_size", "strides", "padding", "input_dilation", "kernel_dilation", "feature_group_count")
    return {**_dense(module, x, params), **_options(module, *names)}


def _conv_transpose(module: Any, x: Any, params: LayerParams) -> dict[str, Any]:
    names = ("kernel_size", "strides", "padding", "kernel_dilation", "transpose_kernel", "preferred_element_type")
    return {**_dense(module, x, params), **_options(module, *names)}


def _embed(module: Any, x: Any, params: LayerParams) -> dict[str, Any]:
    return _options(module, "num_embeddings", "features")


def _rms_norm(module: Any, x: Any, params: LayerParams) -> dict[str, Any]:
    names = ("use_scale", "epsilon", "reduction_axes", "feature_axes", "axis_name", "axis_index_groups")
    return {"num_features": x.shape[-1], **_options(module, *names)}


def _layer_norm(module: Any, x: Any, params: LayerParams) -> dict[str, Any]:
    return {**_rms_norm(module, x, params), "use_bias": module.use_bias}


_KERNEL = ("kernel", "bias")
_DOT = ("dot_general", "dot_general_cls")

COUNTERPARTS: dict[type[linen.Module], Counterpart] = {
    linen.Dense: Counterpart(nnx.Linear, _KERNEL, _dense, _DOT),
    linen.DenseGeneral: Counterpart(nnx.LinearGeneral, _KERNEL, _dense_general, ("batch_dims", *_DOT)),
    linen.Einsum: Counterpart(nnx.Einsum, _KERNEL, _einsum),
    linen.Conv: Counterpart(nnx.Conv, _KERNEL, _conv, ("mask", "conv_general_dilated", "conv_general_dilated_cls")),
    linen.ConvTranspose: Counterpart(nnx.ConvTranspose, _KERNEL, _conv_transpose, ("mask",)),
    linen.Embed: Counterpart(nnx.Embed, ("embedding",), _embed),
    linen.LayerNorm: Counterpart(nnx.LayerNorm, ("scale", "bias"), _layer_norm, norm=True),
    linen.RMSNorm: Counterpart(nnx.RMSNorm, ("scale",), _rms_norm, norm=True),
}
"""Linen types with an NNX counterpart."""

# Keyed by the unwrapped function, which is what Flax hands to an interceptor as the original method.
_METHODS: dict[Any, tuple[Any, str]] = {
    inspect.unwrap(getattr(base, method)): (base, method)
    for base in (*COUNTERPARTS, linen.BatchNorm)
    for method in ("__call__", "attend")
    if hasattr(base, method)
}
"""Flax layer and method name, by the function that implements the method."""


@dataclass(frozen=True)
class LayerCall:
    """Call of a Linen layer that has an NNX counterpart."""

    module: Any
    base: type[linen.Module]
    """Flax type of the layer; `module` may be an instance of a subclass."""
    entry: str
    x: Any
    params: dict[str, jax.Array]
    dtype: Any
    """Dtype of the computation; None promotes the dtypes of input and parameters."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Path, type and parameter shapes, which identify the layer in every call."""
        return self.module.path, self.base, tuple((name, value.shape) for name, value in self.params.items())

    @property
    def layer(self) -> nnx.Module:
        """The NNX layer that shares the parameters of this call."""
        return COUNTERPARTS[self.base].build(self.module, self.x, self.params, self.dtype)

    def described(self) -> Kernel | Norm | str:
        """Return the dims along which the layer can be split, or the reason why there are none."""
        try:
            described = describe(self.layer)
        except ValueError as error:
            # Invalid arguments: the layer runs as Flax wrote it, whose call raises the proper error.
            return str(error)
        if isinstance(described, str) or not described.stack:
            return described
        return f"its parameters have dims {described.stack} in front"

    def in_dtype(self, dtype: Any) -> "LayerCall":
        """Return the call with `dtype` as the default; a dtype set on the layer takes precedence."""
        return self if self.dtype is not None else replace(self, dtype=dtype)

    def run(self, layer: nnx.Module) -> jax.Array:
        """Return the output of an NNX layer, sharded or not, on this call's input, in the dtype that Linen returns."""
        y: jax.Array = getattr(layer, self.entry)(self.x)
        return y.astype(self.dtype) if COUNTERPARTS[self.base].norm and self.dtype is not None else y


@dataclass(frozen=True)
class MethodCall:
    """Call of a method of a Linen module."""

    module: Any
    base: type[linen.Module] | None
    """Flax layer that implements the method, or None; a subclass that wraps the method reaches it through super()."""
    layer: LayerCall | str
    """The call on the NNX counterpart, or the reason why there is none; "" for a module without a counterpart."""
    plain: Callable[[], Any]
    """Runs the call unchanged."""
    of: Callable[[Any], Any]
    """Runs the same call on another module of type `base`."""

    def by_rows(self, mesh: Mesh, row_axes: tuple[str, ...]) -> Any:
        """Return the result of the call; a convolution runs on local rows in a manual region (see `ByRows`).

        Args:
            mesh: The mesh of the manual region.
            row_axes: Mesh axes that split the rows; without any the call runs unchanged.
        """
        if not row_axes or self.base is not linen.Conv or isinstance(self.module.conv_general_dilated_cls, _ConvClass):
            return self.plain()
        make = self.module.conv_general_dilated_cls
        convolve = make() if make is not None else self.module.conv_general_dilated or jax.lax.conv_general_dilated
        wrapped = _ConvClass(ByRows(mesh, convolve, row_axes))
        return self.of(self.module.clone(parent=self.module.scope, conv_general_dilated_cls=wrapped))


@dataclass(frozen=True)
class _ConvClass:
    """Value for `conv_general_dilated_cls`, which Linen calls without arguments to get the convolution."""

    convolve: ByRows

    def __call__(self) -> ByRows:
        return self.convolve


def _method_call(
    context: Any, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> MethodCall:
    module: Any = context.module
    base, name = _METHODS.get(context.orig_method.func, (None, ""))

    def plain() -> Any:
        return method(*args, **kwargs)

    # While a module initializes, its parameters do not exist yet, so there is nothing to shard.
    if base is None or not isinstance(module, base) or module.scope is None or module.is_initializing():
        return MethodCall(module, None, "", plain, lambda _: None)
    layer = _layer_call(module, base, name, inspect.signature(context.orig_method).bind(*args, **kwargs).arguments)
    return MethodCall(module, base, layer, plain, lambda same: getattr(base, name)(same, *args, **kwargs))


def _layer_call(module: Any, base: type[linen.Module], method: str, arguments: Mapping[str, Any]) -> LayerCall | str:
    """Return the call on the NNX counterpart, or the reason why there is none; "" where Flax raises its own error."""
    counterpart = COUNTERPARTS.get(base)
    if counterpart is None:
        return ""
    names = [name for name in counterpart.params if getattr(module, f"use_{name}", True)]
    x, *extras = arguments.values()
    if not hasattr(x, "shape") or not all(module.has_variable("params", name) for name in names):
        return ""
    params: dict[str, jax.Array] = {name: module.get_variable("params", name) for name in names}
    options = _options(module, *counterpart.unsupported)
    # A sequence counts as set only if it has entries: `batch_dims` defaults to an empty tuple instead of None.
    unsupported = [name for name, value in options.items() if value is not None and not isinstance(value, tuple | list)]
    unsupported += [name for name, value in options.items() if isinstance(value, tuple | list) and len(value)]
    if any(value is not None for value in extras) or unsupported:
        return f"{base.__name__} with {', '.join(unsupported or list(arguments)[1:])} stays as it is"
    return LayerCall(module, base, method, x, params, module.dtype)


_TRACED_BY = jax.make_user_context()
"""Component of jax's cache keys. A function jitted inside a loss is traced once per interceptor, so that it does not
reuse a trace in which another interceptor, or none, replaced the layers."""


@contextmanager
def intercepted(by: object, run: Callable[[MethodCall], Any]) -> Iterator[None]:
    """Enter a context in which `run` replaces every method call of a Linen module, without logical axis rules.

    Args:
        by: Owner of `run`, part of jax's cache keys: functions compiled for another owner are not reused.
        run: Function that receives the call and returns its result.
    """

    def intercept(method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        # The loss may have entered its own rules since: clear them again around each call.
        with linen.logical_axis_rules(()):
            return run(_method_call(context, method, args, kwargs))

    with _TRACED_BY(by), linen.logical_axis_rules(()), linen.intercept_methods(intercept):
        yield
