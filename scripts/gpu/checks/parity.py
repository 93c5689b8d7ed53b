"""Parity: the same small models on the device and on the CPU, kernels against each other, the Trainer's promises."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from axonn_jax.core.engines.program import StageProgram
from axonn_jax.core.grid import GridShape, build_grid
from axonn_jax.core.memory.precision import precisions
from axonn_jax.core.settings import MemoryConfig
from axonn_jax.core.tensor.params import SplitModule, split_module
from axonn_jax.models import ModelShape, Transformer
from checks import attention, promises
from checks.report import Emit, Row, attempt
from checks.sizes import parity_shape

# Tolerances, all relative (a gradient's: Euclidean norm of the difference over the norm).
FP32_LOSS = 1e-5
FP32_WORST = 5e-5
"""Sums in another order differ by some tens of float32 roundings (6e-8); TF32 sneaking in would show as 1e-3."""
BF16_LOSS = 2.0**-8
"""One rounding to bf16 is at most 2^-9 of a value; the loss is a mean over all tokens, so theirs mostly cancel."""
BF16_ALL = 2.0**-5
"""All gradients as one vector: some sixteen roundings in sequence on the way back through two blocks."""
BF16_WORST = 2.0**-3
"""The worst parameter: sums that nearly cancel (norms, biases) magnify a rounding. A wrong formula shows as about 1."""


class Result(NamedTuple):
    """Loss, norm and gradients of one program."""

    loss: float
    norm: float
    gradients: dict[str, np.ndarray]

    def against(self, reference: "Result") -> dict[str, Any]:
        """Relative differences, and the parameter whose gradient is worst."""
        errors = {name: distance(self.gradients[name], other) for name, other in reference.gradients.items()}
        worst = max(errors, key=lambda name: (not math.isfinite(errors[name]), errors[name]))
        pairs = [(self.gradients[name], other) for name, other in reference.gradients.items()]
        flat = (np.concatenate([pair[side].ravel() for pair in pairs]) for side in (0, 1))
        return {
            "loss": abs(self.loss - reference.loss) / abs(reference.loss),
            "norm": abs(self.norm - reference.norm) / reference.norm,
            "gradients": distance(*flat),
            "worst": errors[worst],
            "name": worst,
        }


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Euclidean distance over the norm of `b`, in float64."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def _weight(rng: np.random.Generator, name: str, size: tuple[int, ...], std: float) -> np.ndarray:
    """Matrices as initialised; biases and norms, which start at 0 and 1, moved off those values."""
    mean = 1.0 if name.endswith("scale") else 0.0
    return (mean + std * rng.standard_normal(size)).astype(np.float32)


class Subject:
    """One small model with fixed weights and tokens, to be run on any device, dtype, policy and kernel."""

    def __init__(self, kind: str, quick: bool):
        self.kind = kind
        self.shape: ModelShape = parity_shape(kind, quick)
        rng = np.random.default_rng(1)
        self.tokens = rng.integers(0, self.shape.vocab, (2, 2, self.shape.seq_len + 1), dtype=np.int32)
        self._programs: dict[tuple[Any, ...], Callable[[], Any]] = {}
        # From numpy: drawn by jax on two backends they would differ in the last bits.
        self.weights = {
            name: _weight(rng, name, value.shape, self.shape.init_std)
            for name, value in self._parts("auto").params.items()
        }

    def _parts(self, kernel: Any) -> SplitModule:
        """The model's structure, without weights."""
        return split_module(nnx.eval_shape(lambda: Transformer(self.shape, rngs=nnx.Rngs(0), attention=kernel)))

    def result(self, device: jax.Device, dtype: str, activations: str = "none", kernel: str = "auto") -> Result:
        """Loss, norm and gradients of two accumulated microbatches; fp32 in full precision (no TF32)."""
        key = (device, dtype, activations, kernel)
        if key not in self._programs:
            self._programs[key] = self._compile(*key)
        gradients, loss, norm = self._programs[key]()
        return Result(float(loss), float(norm), {name: np.asarray(g) for name, g in gradients.items()})

    def _compile(self, device: jax.Device, dtype: str, activations: Any, kernel: Any) -> Callable[[], Any]:
        dtypes = precisions("fp32" if dtype == "float32" else "bf16")
        grid = build_grid(GridShape(), [device])
        program = StageProgram(self._parts(kernel), grid, dtypes, MemoryConfig(activations=activations))
        params = jax.device_put(self.weights, program.shardings())
        tokens = jax.device_put(self.tokens, program.batch_sharding())
        with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
            compiled = jax.jit(program.gradients).lower(params, tokens, None).compile()
        return lambda: compiled(params, tokens, None)

    @functools.cached_property
    def reference(self) -> Result:
        """float32 on the CPU, with the kernel that is plain matmuls and a softmax."""
        return self.result(jax.devices("cpu")[0], "float32", kernel="blocked")

    @functools.cached_property
    def plain_fp32(self) -> Result:
        """float32 on the device, by XLA's attention."""
        return self.result(jax.devices()[0], "float32", kernel="xla")

    @functools.cached_property
    def plain_bf16(self) -> Result:
        """bfloat16 on the device, by the kernel that `auto` picks."""
        return self.result(jax.devices()[0], "bfloat16")


def verdict(name: str, errors: dict[str, Any], limits: dict[str, float]) -> Row:
    """A row that is ok where every error is within its limit (and none is NaN)."""
    good = all(errors[key] <= limit for key, limit in limits.items())
    shown = "; ".join(f"{key} {errors[key]:.1e} (<= {limit:.1e})" for key, limit in limits.items())
    return Row(
        "parity", name, "ok" if good else "failed", f"{shown} {errors['name']}", {"errors": errors, "limits": limits}
    )


def run(spec: dict[str, Any], emit: Emit) -> None:
    """All rows of the section."""
    here, quick = jax.devices()[0].platform, spec["quick"]
    gpt, llama = (Subject(kind, quick) for kind in ("gpt", "llama"))
    fp32 = {"loss": FP32_LOSS, "norm": FP32_LOSS, "worst": FP32_WORST}
    bf16 = {"loss": BF16_LOSS, "gradients": BF16_ALL, "worst": BF16_WORST}
    for model in (gpt, llama):
        name = f"{model.kind} fp32, {here} / cpu"
        attempt(emit, "parity", name, functools.partial(_against_cpu, model, "float32", name, fp32))
        name = f"{model.kind} bf16, {here} / cpu fp32"
        attempt(emit, "parity", name, functools.partial(_against_cpu, model, "bfloat16", name, bf16))
    attention.run(quick, emit)
    for policy in ("full", "dots"):
        attempt(emit, "parity", f"activations {policy} fp32", functools.partial(_policy, gpt, policy, "float32", fp32))
        attempt(emit, "parity", f"activations {policy} bf16", functools.partial(_policy, gpt, policy, "bfloat16", bf16))
    attempt(emit, "parity", "repeated step", functools.partial(_repeat, gpt))
    attempt(emit, "parity", "Trainer, 5 steps, donation", functools.partial(promises.trainer, gpt.shape))
    attempt(emit, "parity", "messages in device memory", promises.messages)


def _against_cpu(model: Subject, dtype: str, name: str, limits: dict[str, float]) -> Row:
    result = model.plain_fp32 if dtype == "float32" else model.plain_bf16
    return verdict(name, result.against(model.reference), limits)


def _policy(model: Subject, policy: str, dtype: str, limits: dict[str, float]) -> Row:
    kernel, plain = ("xla", model.plain_fp32) if dtype == "float32" else ("auto", model.plain_bf16)
    result = model.result(jax.devices()[0], dtype, policy, kernel)
    short = "fp32" if dtype == "float32" else "bf16"
    return verdict(f"activations {policy} {short}", result.against(plain), limits)


def _repeat(model: Subject) -> Row:
    """Not a promise: fused attention's backward may add up in any order. The figure says what to expect."""
    errors = model.result(jax.devices()[0], "bfloat16").against(model.plain_bf16)
    same = errors["worst"] == 0.0
    note = "bitwise equal" if same else f"not bitwise: gradients {errors['gradients']:.1e}"
    return Row("parity", "repeated step", "ok", note, {"bitwise": same, "errors": errors})
