"""Values that settings may take, each list once: for configuration, commands, layers, memory, channels and planner."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from axonn_jax.errors import UserError

Optimizer = Literal["adamw", "adam", "sgd", "lion"]
Schedule = Literal["cosine", "linear", "constant"]
"""Schedule of the learning rate after the warm-up."""

Positions = Literal["learned", "rope"]
Norm = Literal["layernorm", "rmsnorm", "rmsnorm_1p"]
Mlp = Literal["gelu", "relu2", "swiglu", "geglu"]
Bias = Literal["all", "qkv", "none"]
RopeScaling = Literal["none", "linear", "llama3", "yarn"]
Router = Literal["softmax", "sigmoid"]
"""Function of a router's scores of the experts."""
Dispatch = Literal["gather", "capacity"]
"""Way of tokens to their experts: all are gathered, or each expert has slots for a fixed number."""
PruneMethod = Literal["magnitude", "random", "early_bird", "file"]
PruneScope = Literal["layer", "global"]
CachedKeys = Literal["full", "loki", "exact-topk", "random", "h2o", "window"]
"""Cached keys that a generated token attends to."""

AttentionKernel = Literal["auto", "cudnn", "splash", "blocked", "xla"]

Precision = Literal["fp32", "bf16", "fp16", "auto"]
InferencePrecision = Literal["fp32", "bf16", "auto"]
Accumulate = Literal["fp32", "compute"]
"""Dtype in which gradients add up: float32, or the layers' compute dtype."""
Offload = Literal["none", "optimizer"]
"""State in host memory: none, or the optimizer's state with the float32 weights."""
Zero = Literal[0, 1]
Activations = Literal["none", "full", "dots", "save_collectives", "offload"]
"""Activations that the backward pass computes again (`offload`: all, with a layer's input in host memory)."""
ReshardAfter = Literal["forward", "backward", "step"]
"""Time at which weights gathered over `z` are freed: after a layer's forward, a microbatch's backward, or the step."""

ResidualComm = Literal["all_reduce", "gather", "auto"]
"""Communication of a block's halves over `x`: all-reduces of wide features, or gathers of the residual stream."""
Order = Literal["auto", "package", "xla"]
"""Order of a step's computation: the package's or XLA's."""
ScanLayers = Literal["auto", "yes", "no"]
MatmulChoice = Literal["auto", "off", "measure"]

PipelinePolicy = Literal["message", "gpipe", "1f1b", "interleaved", "zero-bubble"]
"""Order of a rank's tasks: by arrival of their inputs (`message`), or a fixed one."""
ChannelName = Literal["auto", "local", "mpi4jax", "mpi4py"]


@dataclass(frozen=True)
class Range:
    """Range of an option's numbers, as a note of its annotation."""

    accepted: str
    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise ``UserError`` for a number outside the range."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        if not (above and below):  # written so that NaN fails
            raise UserError(name, value, self.accepted)


_INT32 = 2**31 - 1  # step counters live on the device as int32
_UINT32 = 2**32 - 1  # seeds of PRNG keys, without 64-bit mode
_POSITIVE = Range("a finite number above 0", 0, math.inf, open_low=True, open_high=True)

Count = Annotated[int, Range(f"an integer from 1 to {_INT32}", 1, _INT32)]
CountOrZero = Annotated[int, Range(f"an integer from 0 to {_INT32}", 0, _INT32)]
Seed = Annotated[int, Range(f"an integer from 0 to {_UINT32}", 0, _UINT32)]
Positive = Annotated[float, _POSITIVE]
PositiveOrNone = Annotated[float | None, _POSITIVE]
NotNegative = Annotated[float, Range("a finite number of at least 0", 0, math.inf, open_high=True)]
NotNegativeOrNone = Annotated[float | None, Range("a finite number of at least 0", 0, math.inf, open_high=True)]
Density = Annotated[float, Range("a number above 0 and at most 1", 0, 1, open_low=True)]
Share = Annotated[float, Range("a number from 0 to 1", 0, 1)]
Decay = Annotated[float, Range("a number of at least 0 and below 1", 0, 1, open_high=True)]
ProbabilityOrNone = Annotated[float | None, Range("a probability of at least 0 and below 1", 0, 1, open_high=True)]


def mlp_inputs(kind: Mlp) -> int:
    """Return the number of matmuls from the residual stream into a feed-forward layer: two with a gate, else one."""
    return 2 if kind in ("swiglu", "geglu") else 1
