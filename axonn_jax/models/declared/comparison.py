"""Comparison of two models by their sizes: the fields with which one computes another function than the other."""

from dataclasses import fields

from axonn_jax.models.config import ModelShape
from axonn_jax.models.presets import OF_EXPERTS
from axonn_jax.models.rope import amplitude, frequencies


def differences(given: ModelShape, stored: ModelShape) -> list[str]:
    """Fields with which a model computes another function than a stored one, as "model.heads = 4 (8 there)".

    Dropout and the spread of initial weights change none; nor do the length of sequences where positions are rotary, a
    window of that length, and fields that another one disables.
    """
    names = [f.name for f in fields(ModelShape)]
    same = {"dropout", "init_std"}
    if given.positions == stored.positions == "rope":
        same.add("seq_len")
    if _turns(given) == _turns(stored):
        same |= {name for name in names if name.startswith("rope_")}
    if _routed(given) == _routed(stored):
        unused = set(OF_EXPERTS) if not given.experts else {"moe_every", "moe_first"}
        unused |= {"ffn"} if all(_routed(given)) else set()
        same |= {name for name in names if name.startswith(tuple(unused))}
    if _windows(given, given.seq_len) == _windows(stored, given.seq_len):
        same |= {"window", "window_period"}
    return [
        f"model.{name} = {getattr(given, name)} ({getattr(stored, name)} there)"
        for name in names
        if name not in same and getattr(given, name) != getattr(stored, name)
    ]


def _turns(shape: ModelShape) -> object:
    """Rotation of queries and keys, however the fields express it."""
    try:
        return shape.positions == "rope" and (frequencies(shape).tolist(), amplitude(shape))
    except ArithmeticError:  # numbers that no model has
        return [getattr(shape, f.name) for f in fields(shape) if f.name.startswith("rope_")]


def _windows(shape: ModelShape, length: int) -> list[int]:
    """Tokens that a token of a sequence sees, by layer; 0: all before it."""
    windows = (shape.attention_rule(layer).window for layer in range(shape.layers))
    return [window if window < length else 0 for window in windows]


def _routed(shape: ModelShape) -> list[bool]:
    return [shape.experts_of(layer) is not None for layer in range(shape.layers)]
