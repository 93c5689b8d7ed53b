"""Layouts in which a run's matmuls are computed: measured on a device, kept in a file, the same on all processes."""

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from axonn_jax.backend.repairs import device_kind
from axonn_jax.distributed.host_sync import HostSync
from axonn_jax.documents import read_json, replace_whole
from axonn_jax.grid import GridShape
from axonn_jax.memory.precision import precisions
from axonn_jax.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.models.config import ModelShape
from axonn_jax.options import typed
from axonn_jax.tensor.matmul import AS_WRITTEN, FORMS, PLAIN, Form, MatmulLayouts, Product, multiply, products
from axonn_jax.train.config import Config
from axonn_jax.train.engines.program import sub_batches_of

BUDGET_S = 20.0
"""Seconds that measuring may take; products not measured by then are computed as written."""
GAIN = 1.05
"""A form is chosen only where it is faster than the product as written by at least this factor."""
_ROUND_S = 0.004  # of one form in one round, so that a timer's and a dispatch's own time do not count
_MOST_CALLS = 64


@dataclass(frozen=True)
class Measured:
    """Times of one product's forms, measured in turns."""

    product: Product
    seconds: Mapping[Form, tuple[float, ...]]
    """Seconds of one call, by round."""

    def gain(self, form: Form) -> float:
        """Speed-up over the product as written, as the median over the rounds, since a slow round slows both."""
        pairs = zip(self.seconds[AS_WRITTEN], self.seconds[form], strict=True)
        return median(written / this for written, this in pairs)

    @property
    def best(self) -> Form:
        """The fastest form, or as written where none is faster by `GAIN`."""
        form = max(self.seconds, key=self.gain)
        return form if self.gain(form) >= GAIN else AS_WRITTEN

    def rate(self, form: Form) -> float:
        """FLOP/s, from the median round."""
        return self.product.flops / median(self.seconds[form])


def measure(
    products: Iterable[Product], device: Any, *, rounds: int = 5, budget_s: float = float("inf")
) -> list[Measured]:
    """Times every form of every product on one device, in the order given, until the seconds are used up.

    A product that is begun is finished. Compiles a small program a form (`_surrounded`); nothing stays on the device.
    """
    end = time.monotonic() + budget_s
    measured = []
    alone = Mesh([device], ("device",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(alone):  # not the run's, of which this is one device
        for product in products:
            if time.monotonic() >= end:
                break
            measured.append(_measure(product, device, rounds))
    return measured


def _measure(product: Product, device: Any, rounds: int) -> Measured:
    given = tuple(_operand(shape, product.dtype, device) for shape in (*product.shapes, (product.m, product.n)))
    programs = {form: jax.jit(partial(_surrounded, product, form)).lower(*given).compile() for form in FORMS}
    for program in programs.values():
        jax.block_until_ready(program(*given))  # a first call does more than compute
    taken: dict[Form, list[float]] = {form: [] for form in FORMS}
    calls = max(1, min(_MOST_CALLS, round(_ROUND_S / _seconds(programs[AS_WRITTEN], given, 1))))
    for _ in range(rounds):
        for form, program in programs.items():
            taken[form].append(_seconds(program, given, calls))
    return Measured(product, {form: tuple(times) for form, times in taken.items()})


def _surrounded(product: Product, form: Form, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """A product with the surroundings of a step: operands that were just computed, and an addition of the result.

    XLA fuses a copy with the operand's computation, and the loop that does both may take longer than the product saves:
    a form that was 1.8 times as fast on operands from memory took 1.3 times as long behind a GELU, and slowed the step
    down. So a GELU it is, for both: few operations of a step cost more to run element by element, against the grain.
    """
    return c + multiply(jax.nn.gelu(a), jax.nn.gelu(b), product.stored, form)


def _seconds(program: Any, given: tuple[jax.Array, ...], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        last = program(*given)
    jax.block_until_ready(last)  # a device runs its programs in order
    return (time.perf_counter() - begin) / calls


def _operand(shape: tuple[int, int], dtype: str, device: Any) -> jax.Array:
    """Random numbers, some of them over and over: a GPU clocks higher on zeros."""
    values = np.resize(np.random.default_rng(0).standard_normal(65_537).astype(np.float32), shape)
    return jax.device_put(values.astype(jnp.dtype(dtype)), device)


_MOST_BYTES = 10_000_000
_FORMS = {str(form): form for form in FORMS}


def cache_file() -> Path:
    """File with the choices of all machines of this user: below `XDG_CACHE_HOME`, or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "axonn_jax" / "matmuls.json"


def setting(device: Any) -> str:
    """Setting in which a measurement holds: jax's version, the kind of device, on a CPU also its number of cores."""
    return f"jax {jax.__version__}, {device_kind(device)}"


def load(file: Path, device: Any) -> tuple[dict[str, Form], str]:
    """The forms measured on such a device, by the product's name, and a line for people where a file is no use."""
    try:
        kept = _read(file).get(setting(device), {})
        return {name: _FORMS[form] for name, form in kept.items()}, ""
    except (OSError, ValueError, KeyError) as error:
        return {}, f"{file} cannot be read as matmul layouts, so it is ignored ({type(error).__name__}: {error})"


def _read(file: Path) -> dict[str, dict[str, str]]:
    """Names of forms by setting and product; none where there is no file."""
    return typed(dict[str, dict[str, str]], read_json(file, _MOST_BYTES)) if file.exists() else {}


def save(file: Path, device: Any, measured: Iterable[Measured]) -> str:
    """Add measurements to the file, or make it; return a line for people where that fails.

    The file is replaced as a whole: readers see the old or the new one.
    """
    try:
        settings = {} if load(file, device)[1] else _read(file)
        settings.setdefault(setting(device), {}).update({str(each.product): str(each.best) for each in measured})
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(file, (json.dumps(settings, indent=1) + "\n").encode())
    except OSError as error:
        return f"matmul layouts are not kept for later runs: {error.strerror or error} ({file})"
    return ""


def choose_layouts(
    config: Config, shape: ModelShape, comm: BlockComm, agreed: HostSync, file: Path | None = None
) -> tuple[MatmulLayouts, list[str]]:
    """Return the layouts of a run's matmuls by `tensor.matmul_layouts`, and lines for people.

    The first process remembers or measures, on one of its devices, and tells the others: all processes must call it.
    """
    if config.tensor.matmul_layouts == "off":
        return PLAIN, []
    tokens, dtype = local_tokens(config, shape), precisions(config.memory.precision).compute.name
    products = local_products(shape, config.grid, tokens, dtype, comm)
    lines: list[str] = []
    text = ""
    if agreed.rank == 0:
        wanted = sorted(products, key=lambda product: -product.flops * products[product])
        device = jax.local_devices()[0]
        known, lines = _found(wanted, device, file or cache_file(), measures=config.tensor.matmul_layouts == "measure")
        text = "".join(str(FORMS.index(known.get(str(product), AS_WRITTEN))) for product in products)
    digits = agreed.gather(text)[0]
    forms = {product: FORMS[int(digit)] for product, digit in zip(products, digits, strict=True)}
    layouts = MatmulLayouts.of_forms(forms)
    if layouts.chosen:
        turned = "; ".join(f"{product}: {form}" for product, form in layouts.chosen)
        lines.append(f"matmul layouts: {len(layouts.chosen)} of {len(products)} products not as written: {turned}")
    return layouts, lines


def local_tokens(config: Config, shape: ModelShape) -> int:
    """Tokens of one matmul on one device: a microbatch's, or a sub-batch's part of them."""
    parts = sub_batches_of(config.tensor.sub_batches, config.grid, config.rows) if config.grid.pipe == 1 else 1
    return config.rows // parts * shape.seq_len


def _found(wanted: list[Product], device: Any, file: Path, *, measures: bool) -> tuple[dict[str, Form], list[str]]:
    forms, complaint = load(file, device)
    lines = [complaint] if complaint else []
    missing = [product for product in wanted if str(product) not in forms]
    if not missing or not measures:
        return forms, lines
    begin = time.monotonic()
    measured = measure(missing, device, budget_s=BUDGET_S)
    forms |= {str(each.product): each.best for each in measured}
    count, taken = f"{len(measured)} of {len(missing)}", time.monotonic() - begin
    lines += [f"matmul layouts: {count} products measured in {taken:.1f} s", save(file, device, measured)]
    return forms, [line for line in lines if line]


def local_products(
    shape: ModelShape, grid: GridShape, tokens: int, dtype: str, comm: BlockComm = ALL_REDUCE
) -> dict[Product, int]:
    """Return the distinct products of a forward and backward pass with their counts, for a device's `tokens`."""
    stream = shape.hidden // grid.x
    read, over = (shape.hidden, grid.y * grid.x) if comm.attention else (stream, grid.y)
    qkv, width = shape.qkv_width // over, shape.heads * shape.head_dim // over
    hidden, ffn = (shape.hidden, shape.ffn // grid.y // grid.x) if comm.mlp else (stream, shape.ffn // grid.y)
    dense = shape.layers - shape.routed_layers
    layers = [
        (products(tokens, read, qkv, dtype), shape.layers),
        (products(tokens, width, read, dtype), shape.layers),
        (products(tokens, hidden, ffn, dtype), dense * shape.mlp_inputs),
        (products(tokens, ffn, hidden, dtype), dense),
        (products(tokens, stream, shape.padded_vocab(grid.y * grid.z) // grid.y, dtype, turned=shape.tied), 1),
    ]
    times: dict[Product, int] = {}
    for three, count in layers:
        for product in three if count else ():
            times[product] = times.get(product, 0) + count
    return times
