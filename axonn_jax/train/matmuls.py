"""Which layout every matmul of a run is computed in: the same on all processes, measured or remembered."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from axonn_jax.grid import Grid
from axonn_jax.memory.precision import precisions
from axonn_jax.models.matmuls import local_products
from axonn_jax.models.shape import ModelShape
from axonn_jax.state.agree import Agreement
from axonn_jax.tensor.matmul import AS_WRITTEN, FORMS, PLAIN, Form, MatmulLayouts, Product, choosing
from axonn_jax.train.check import inner_of
from axonn_jax.train.config import Config
from axonn_jax.train.program import streams_of
from axonn_jax.tuned import cache_file, load, save
from axonn_jax.tuning import measure

BUDGET_S = 20.0
"""Seconds that measuring may take; what is not measured by then is computed as written."""


def choose_layouts(
    config: Config, shape: ModelShape, grid: Grid, agreed: Agreement, file: Path | None = None
) -> tuple[MatmulLayouts, list[str]]:
    """The layouts of a run's matmuls by `train.matmul_layouts`, and lines for people.

    The first process remembers or measures, on one of its devices, and tells the others: all of them must call it.
    """
    if config.train.matmul_layouts == "off":
        return PLAIN, []
    tokens, inner = local_tokens(config, shape), inner_of(config, shape)
    products = local_products(shape, grid.shape, tokens, _dtype(config), inner)
    lines: list[str] = []
    text = ""
    if agreed.rank == 0:
        wanted = sorted(products, key=lambda one: -one.flops * products[one])
        device = jax.local_devices()[0]
        forms, lines = _found(wanted, device, file or cache_file(), measures=config.train.matmul_layouts == "measure")
        text = "".join(str(FORMS.index(forms.get(str(one), AS_WRITTEN))) for one in products)
    told = agreed.gather(text)[0]
    layouts = choosing({one: FORMS[int(digit)] for one, digit in zip(products, told, strict=True)})
    return layouts, [*lines, *_lines(layouts, products)]


def local_tokens(config: Config, shape: ModelShape) -> int:
    """Tokens of one matmul on one device: a microbatch's, or a stream's part of them."""
    rows = config.train.global_batch // config.train.microbatches // config.grid.batch_shards
    streams = streams_of(config.overlap.streams, config.grid, rows) if config.grid.pipe == 1 else 1
    return rows // streams * shape.seq_len


def _dtype(config: Config) -> str:
    return precisions(config.memory.precision).compute.name


def _found(wanted: list[Product], device: Any, file: Path, *, measures: bool) -> tuple[dict[str, Form], list[str]]:
    forms, complaint = load(file, device)
    lines = [complaint] if complaint else []
    missing = [one for one in wanted if str(one) not in forms]
    if not missing or not measures:
        return forms, lines
    begin = time.monotonic()
    measured = measure(missing, device, budget_s=BUDGET_S)
    forms |= {str(one.product): one.best for one in measured}
    lines.append(
        f"matmul layouts: {len(measured)} of {len(missing)} products measured in {time.monotonic() - begin:.1f} s"
    )
    return forms, [*lines, *filter(None, [save(file, device, measured)])]


def _lines(layouts: MatmulLayouts, products: Mapping[Product, int]) -> list[str]:
    if not layouts.chosen:
        return []
    turned = "; ".join(f"{product}: {form}" for product, form in layouts.chosen)
    return [f"matmul layouts: {len(layouts.chosen)} of {len(products)} products not as written: {turned}"]
