"""Types in which layers are declared: parameters, and operations in program order; no jax.

A layer is a list of chains, and a chain is a list of operations. Sizes are per microbatch and device.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

Axes = tuple[str, ...]
Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]

FLOAT32 = 4
"""Bytes of a float32 element."""


class Param(NamedTuple):
    """A parameter of a layer."""

    name: str
    """Name in checkpoints; names in blocks begin with `blocks.`, without the block's number."""
    shape: tuple[int, ...]
    """Global shape."""
    split: tuple[Axes, ...] = ()
    """Mesh axes that split each dimension, as in a PartitionSpec."""
    prunable: bool = False
    """True if pruned training trains only a fraction of the entries."""
    trained: bool = True
    """False for a frozen parameter, which has no gradient."""
    partial: bool = False
    """True if gradients are partial sums over every axis that does not split the parameter, not just token axes."""

    @property
    def elements(self) -> int:
        """Number of entries over all devices."""
        return prod(self.shape)

    @property
    def axes(self) -> Axes:
        """Every mesh axis that splits a dimension."""
        return tuple(axis for dimension in self.split for axis in dimension)


class Collective(NamedTuple):
    """A collective of the forward pass and its transpose in the backward pass, over the same axes."""

    name: str
    """Name of the layer that communicates."""
    forward: Kind | None
    """Kind in the forward pass; None if nothing is communicated."""
    backward: Kind | None
    """Kind in the backward pass; None if nothing is communicated."""
    axes: Axes
    """Mesh axes, slowest first."""
    buffer: int
    """Bytes of the full buffer, after a gather or before a reduction."""
    backward_buffer: int | None = None
    """Bytes of the full buffer in the backward pass; None if equal to `buffer`."""
    weight_itemsize: int = 0
    """Bytes per element of a communicated weight, whose gradient may have another dtype; 0 for activations."""
    always_repeated: bool = False
    """True if the backward pass repeats the forward collective under every activation policy."""
    small: bool = False
    """True if the result is only a few numbers per token, negligible in memory."""
    of_param: bool = False
    """True if the backward pass communicates the gradient of a parameter that no axis splits."""


class Multiply(NamedTuple):
    """A matmul `[tokens, inner] @ [inner, columns]` with a weight; the weight's gradient reads the input."""

    tokens: float
    inner: float
    columns: float
    number: float = 1.0
    """Number of these matmuls on a device, which run one after the other."""
    shares_input: bool = False
    """True if the preceding matmul reads the same input."""
    stored_inner: float | None = None
    """Features of the input that are saved, if the backward pass gathers the remaining ones; None for `inner`."""
    always_recomputed: bool = False
    """True if the backward pass recomputes the matmul under every activation policy."""
    trained: bool = True
    """False if the weight is frozen: no gradient reads the input."""


class Read(NamedTuple):
    """Any other operation whose gradient reads its input, such as a norm or an activation function."""

    elements: float = 0.0
    """Elements read per token, in the compute dtype."""
    moved: float = 0.0
    """Bytes of memory traffic per token in the forward pass."""


class Attend(NamedTuple):
    """Attention of a token's queries to all keys of its sequence."""

    heads: float
    """Query heads on a device."""
    kv_heads: float
    """Key/value heads on a device."""
    head_dim: int
    """Features of a head."""
    seq_len: int
    """Tokens of a sequence."""
    scores: float
    """Bytes of scores saved per token: either statistics of their rows, or all of them."""
    copies: float
    """Bytes of copies saved per token: keys and values repeated per query head, and the result by heads."""

    @property
    def elements(self) -> float:
        """Elements of queries, keys and values per token, which the gradient reads."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def flops(self) -> float:
        """FLOPs per token of scores and of their product with values, without savings from causality."""
        return 4 * self.seq_len * self.heads * self.head_dim


class Add(NamedTuple):
    """An addition to the residual stream, whose gradient reads nothing."""

    moved: float
    """Bytes of memory traffic per token in the forward pass."""


class CustomBackward(NamedTuple):
    """Marks a chain with a custom backward pass (`jax.custom_vjp`), with the bytes that the chain saves."""

    by_policy: Mapping[str, float]
    """Bytes saved per token, by activation policy; 0 for an absent policy."""
    moved: float = 0.0
    """Bytes of memory traffic per token in the forward pass."""


Op = Collective | Multiply | Read | Attend | Add | CustomBackward


class Chain(NamedTuple):
    """A sequence of operations that each read the result of the preceding one."""

    ops: tuple[Op, ...]
    result_read: bool = True
    """True if a later gradient in the layer reads the last operation's result."""

    def repeated(self) -> tuple[Op, ...]:
        """Return the operations that recomputation repeats: all up to the last one whose result a gradient reads."""
        if self.result_read:
            return self.ops
        reads = (at + 1 for at, op in enumerate(self.ops) if not isinstance(op, Collective | Add))
        return self.ops[: max(reads, default=0)]


@dataclass(frozen=True)
class Layer:
    """A kind of layer of a model."""

    params: tuple[Param, ...]
    chains: tuple[Chain, ...]
    count: int = 1
    """Number of layers of this kind in the model."""
    in_block: bool = True
    """True for blocks, to which recomputation and the scan over layers apply."""


Part = tuple[tuple[Param, ...], tuple[Chain, ...]]
"""Parameters and chains of part of a layer."""


def merge_parts(parts: Iterable[Part], count: int = 1) -> Layer:
    """Combine parts into a layer that occurs `count` times in the model."""
    params: list[Param] = []
    chains: list[Chain] = []
    for part in parts:
        params += part[0]
        chains += part[1]
    return Layer(tuple(params), tuple(chains), count)


def gather(name: str, axes: Axes, buffer: int, **more: Any) -> Collective:
    """Declare an all-gather of `buffer` bytes, whose gradient is reduce-scattered."""
    return Collective(name, "all-gather", "reduce-scatter", axes, buffer, **more)


def scatter(name: str, axes: Axes, buffer: int) -> Collective:
    """Declare a reduce-scatter of `buffer` bytes, whose gradient is all-gathered."""
    return Collective(name, "reduce-scatter", "all-gather", axes, buffer)


def reduce(name: str, axes: Axes, buffer: int, **more: Any) -> Collective:
    """Declare an all-reduce of `buffer` bytes, whose gradient needs no communication because it is replicated."""
    return Collective(name, "all-reduce", None, axes, buffer, **more)


def reduce_gradient(name: str, axes: Axes, buffer: int, **more: Any) -> Collective:
    """Declare an all-reduce of the gradient of a replicated input, without communication in the forward pass."""
    return Collective(name, None, "all-reduce", axes, buffer, **more)


def exchange(name: str, axes: Axes, buffer: int) -> Collective:
    """Return an all-to-all, in both passes."""
    return Collective(name, "all-to-all", "all-to-all", axes, buffer)
