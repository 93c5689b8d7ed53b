"""Entries of experts: our kernel of all of them beside their tensors, of which each expert has its own."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from axonn_jax.models.config import ModelShape
from axonn_jax.models.huggingface.tensor_map import Array, Bounds, ReadPart, TensorMap, piece_ranges

ExpertNames = Literal["mixtral", "qwen3_moe"]
_ROUTER: Mapping[ExpertNames, str] = {"mixtral": "block_sparse_moe.gate", "qwen3_moe": "mlp.gate"}
_EXPERTS: Mapping[ExpertNames, str] = {"mixtral": "block_sparse_moe.experts", "qwen3_moe": "mlp.experts"}
_KERNELS: Mapping[ExpertNames, Mapping[str, str]] = {
    "mixtral": {"gate": "w1", "up": "w3", "down": "w2"},
    "qwen3_moe": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
}


@dataclass(frozen=True)
class StackedMap(TensorMap):
    """Our kernels of all experts [experts, in, out], and theirs [out, in], one an expert in their order."""

    def read(self, bounds: Bounds, part: ReadPart, dtype: np.dtype[Any]) -> Array:  # noqa: D102
        (first, last), *inner = bounds
        made = np.empty([b - a for a, b in bounds], dtype)
        for at, name in enumerate(list(self.theirs)[first:last]):
            made[at] = part(name, tuple(inner[::-1])).T
        return made

    def chunks(self, number: int, part: Callable[[Bounds], Array], itemsize: int) -> Iterator[Array]:  # noqa: D102
        _, inner, outer = self.size
        for ends in piece_ranges(outer, inner * outer * itemsize):
            yield np.ascontiguousarray(part(((number, number + 1), (0, inner), ends))[0].T)


@dataclass(frozen=True)
class ZeroMap(TensorMap):
    """A parameter of ours that they do not have: zeros, and to be nothing else on the way back."""

    def read(self, bounds: Bounds, part: ReadPart, dtype: np.dtype[Any]) -> Array:  # noqa: D102
        return np.zeros([b - a for a, b in bounds], dtype)


def expert_block(shape: ModelShape, index: int, names: ExpertNames) -> Iterator[TensorMap]:
    """The router and the experts of a layer."""
    assert shape.moe is not None
    ours, theirs, count = f"blocks.{index}.mlp", f"model.layers.{index}", shape.experts
    hidden, ffn = shape.hidden, shape.expert_ffn
    router = {f"{theirs}.{_ROUTER[names]}.weight": (count, hidden)}
    yield TensorMap(f"{ours}.router.kernel", (hidden, count), router, transposed=True)
    yield ZeroMap(f"{ours}.router.bias", (count,), {})
    for our, their in _KERNELS[names].items():
        inner, outer = (ffn, hidden) if our == "down" else (hidden, ffn)
        tensors = {f"{theirs}.{_EXPERTS[names]}.{e}.{their}.weight": (outer, inner) for e in range(count)}
        yield StackedMap(f"{ours}.experts.{our}.kernel", (count, inner, outer), tensors)
