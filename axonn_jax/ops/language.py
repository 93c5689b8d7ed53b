"""The language of a layer's declaration: parameters, and operations in program order; no jax.

A layer is a list of chains, and a chain a list of operations. Sizes are for one microbatch on one device.
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
    """Name in checkpoints; a block's begins with `blocks.`, without its number."""
    shape: tuple[int, ...]
    """Global shape."""
    split: tuple[Axes, ...] = ()
    """Mesh axes that split each dimension, as in a PartitionSpec."""
    prunable: bool = False
    """True if pruned training keeps a share of the entries."""
    trained: bool = True
    """False for a frozen parameter, which has no gradient."""
    partial: bool = False
    """True if gradients are partial sums over every axis that does not split the parameter, else over tokens' axes."""

    @property
    def elements(self) -> int:
        """Number of entries on all devices together."""
        return prod(self.shape)

    @property
    def axes(self) -> Axes:
        """Every mesh axis that splits a dimension."""
        return tuple(axis for dimension in self.split for axis in dimension)


class Collective(NamedTuple):
    """A collective of the forward pass and its transpose in the backward pass, over the same axes."""

    name: str
    """Layer that communicates."""
    forward: Kind | None
    """Kind in the forward pass; None: nothing is communicated."""
    backward: Kind | None
    """Kind in the backward pass; None: nothing is communicated."""
    axes: Axes
    """Mesh axes, slowest first."""
    buffer: int
    """Bytes of the whole buffer: gathered, or to be reduced."""
    backward_buffer: int | None = None
    """Bytes of the whole buffer in the backward pass; None: equal to `buffer`."""
    weight_itemsize: int = 0
    """Bytes of an element of a weight, whose gradient travels in another dtype; 0: activations travel."""
    always_repeated: bool = False
    """True if the backward pass repeats the forward collective under every activation policy."""
    small: bool = False
    """True if the result is a few numbers for each token, too few to count in memory."""
    of_param: bool = False
    """True if the backward pass communicates the gradient of a parameter that no axis splits."""


class Multiply(NamedTuple):
    """A matmul `[tokens, inner] @ [inner, columns]` with a weight, whose gradient reads the input."""

    tokens: float
    inner: float
    columns: float
    number: float = 1.0
    """Number of such matmuls on a device, one after the other."""
    shares_input: bool = False
    """True if the matmul before reads the same input."""
    stored_inner: float | None = None
    """Features of the input that stay in memory where the rest is gathered again; None: `inner`."""
    run_again: bool = False
    """True if the backward pass runs the matmul again under every activation policy."""
    trained: bool = True
    """False if the weight is frozen: no gradient reads the input."""


class Read(NamedTuple):
    """Any other operation whose gradient reads its input: a norm, an activation function."""

    elements: float = 0.0
    """Elements read for each token, in the compute dtype."""
    moved: float = 0.0
    """Bytes that the forward pass reads and writes in memory for each token."""


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
    """Bytes kept of scores for each token: statistics of their rows, or all of them."""
    copies: float
    """Bytes kept for each token of copies: keys and values for every query head, the result by heads."""

    @property
    def elements(self) -> float:
        """Elements of queries, keys and values for each token, which the gradient reads."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def flops(self) -> float:
        """FLOPs for each token, in full: of scores and of their product with values."""
        return 4 * self.seq_len * self.heads * self.head_dim


class Add(NamedTuple):
    """An addition to the residual stream, whose gradient reads nothing."""

    moved: float
    """Bytes that the forward pass reads and writes in memory for each token."""


class OwnBackward(NamedTuple):
    """A chain's own backward pass (`jax.custom_vjp`), with the bytes kept by the whole chain."""

    by_policy: Mapping[str, float]
    """Bytes kept for each token, by activation policy; 0 for an absent policy."""
    moved: float = 0.0
    """Bytes that the forward pass reads and writes in memory for each token."""


Op = Collective | Multiply | Read | Attend | Add | OwnBackward


class Chain(NamedTuple):
    """Operations in a row, each of which reads the result of the one before."""

    ops: tuple[Op, ...]
    result_read: bool = True
    """True if a gradient later in the layer reads the last operation's result."""

    def repeated(self) -> tuple[Op, ...]:
        """Return the operations repeated by recomputation: up to the last one whose result a gradient reads."""
        if self.result_read:
            return self.ops
        reads = (at + 1 for at, op in enumerate(self.ops) if not isinstance(op, Collective | Add))
        return self.ops[: max(reads, default=0)]


@dataclass(frozen=True)
class Layer:
    """One kind of layer of a model."""

    params: tuple[Param, ...]
    chains: tuple[Chain, ...]
    count: int = 1
    """Number of layers of this kind in the model."""
    in_block: bool = True
    """True for blocks, on which recomputation and the scan over layers act."""


Part = tuple[tuple[Param, ...], tuple[Chain, ...]]
"""Parameters and chains of a part of a layer."""


def joined(parts: Iterable[Part], count: int = 1) -> Layer:
    """Return the layer of several parts, `count` times in the model."""
    params: list[Param] = []
    chains: list[Chain] = []
    for part in parts:
        params += part[0]
        chains += part[1]
    return Layer(tuple(params), tuple(chains), count)


def gather(name: str, axes: Axes, buffer: int, **more: Any) -> Collective:
    """Return an all-gather; the gradient is reduce-scattered."""
    return Collective(name, "all-gather", "reduce-scatter", axes, buffer, **more)


def scatter(name: str, axes: Axes, buffer: int) -> Collective:
    """Return a reduce-scatter; the gradient is all-gathered."""
    return Collective(name, "reduce-scatter", "all-gather", axes, buffer)


def reduce(name: str, axes: Axes, buffer: int, **more: Any) -> Collective:
    """Return an all-reduce; the gradient is replicated already."""
    return Collective(name, "all-reduce", None, axes, buffer, **more)


def reduce_gradient(name: str, axes: Axes, buffer: int, **more: Any) -> Collective:
    """Return the all-reduce of the gradient of a replicated input; nothing is communicated forward."""
    return Collective(name, None, "all-reduce", axes, buffer, **more)


def exchange(name: str, axes: Axes, buffer: int) -> Collective:
    """Return an all-to-all, in both passes."""
    return Collective(name, "all-to-all", "all-to-all", axes, buffer)
