"""Comparison of two model shapes: the fields that make them compute different functions."""

from dataclasses import fields

from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.presets import OF_EXPERTS
from axonn_jax.core.models.rope import amplitude, frequencies


def differences(shape: ModelShape, stored: ModelShape) -> list[str]:
    """Return the fields that make a model differ from a stored one, as "model.heads = 4 (8 there)".

    Fields without an effect on the function are ignored.
    """
    # Dropout and initialization never matter; sequence length does not with rotary positions; a window as long as the
    # sequence is no window; and fields that another field disables are compared by their effect.
    names = [f.name for f in fields(ModelShape)]
    same = {"dropout", "init_std"}
    if shape.positions == stored.positions == "rope":
        same.add("seq_len")
    if _turns(shape) == _turns(stored):
        same |= {name for name in names if name.startswith("rope_")}
    if _routed(shape) == _routed(stored):
        unused = set(OF_EXPERTS) if not shape.experts else {"moe_every", "moe_first"}
        unused |= {"ffn"} if all(_routed(shape)) else set()
        same |= {name for name in names if name.startswith(tuple(unused))}
    if _windows(shape, shape.seq_len) == _windows(stored, shape.seq_len):
        same |= {"window", "window_period"}
    return [
        f"model.{name} = {getattr(shape, name)} ({getattr(stored, name)} there)"
        for name in names
        if name not in same and getattr(shape, name) != getattr(stored, name)
    ]


def _turns(shape: ModelShape) -> object:
    # Compare the rotation itself: different fields may describe the same one.
    try:
        return shape.positions == "rope" and (frequencies(shape).tolist(), amplitude(shape))
    except ArithmeticError:  # extreme values overflow: fall back to comparing the fields
        return [getattr(shape, f.name) for f in fields(shape) if f.name.startswith("rope_")]


def _windows(shape: ModelShape, length: int) -> list[int]:
    windows = (shape.attention_rule(layer).window for layer in range(shape.layers))
    return [window if window < length else 0 for window in windows]


def _routed(shape: ModelShape) -> list[bool]:
    return [shape.experts_of(layer) is not None for layer in range(shape.layers)]
