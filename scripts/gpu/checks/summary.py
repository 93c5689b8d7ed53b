"""The lines to paste: one a figure, each complete in itself."""

from collections.abc import Sequence
from typing import Any

from checks.report import Row


def paste_lines(rows: Sequence[Row], preset: str, quick: bool) -> list[str]:
    """One line a figure: device, versions, what was measured, the figure."""
    device = next((row for row in rows if row.section == "device" and row.status == "ok"), None)
    if device is None:
        return []
    versions = device.figures["versions"]
    model = f"{preset} cut down (--quick)" if quick else preset
    lines = []
    for row in rows:
        text = _text(row, model)
        if text:
            made_by = f"torch {versions.get('torch', '?')}" if row.section == "torch" else f"jax {versions['jax']}"
            lines.append(" | ".join(("axonn_jax gpu/check", device.figures["kind"], made_by, text)))
    good, bad = (sum(row.section == "parity" and row.status == status for row in rows) for status in ("ok", "failed"))
    if good or bad:
        lines.insert(0, f"axonn_jax gpu/check | {device.figures['kind']} | jax {versions['jax']} | "
                        f"parity: {good} rows ok, {bad} failed")  # fmt: skip
    return lines


def _text(row: Row, model: str) -> str:
    figures = row.figures
    if row.section in ("training", "torch") and row.status == "does not fit":
        return f"{model} bf16 {row.name} | does not fit"
    if row.status != "ok" or figures.get("device") == "cpu":  # PyTorch's bf16 on a CPU is no yardstick
        return ""
    if row.section == "matmul":
        share = "" if figures["of_peak"] is None else f" = {100 * figures['of_peak']:.1f} % of the published peak"
        return f"bf16 matmul {row.name} | {figures['flops_per_s'] / 1e12:.1f} TFLOP/s{share}"
    if row.section in ("training", "torch"):
        ratio = f" | axonn_jax / torch {figures['ratio']:.3f}" if "ratio" in figures else ""
        return f"{model} bf16 {row.name} | {_throughput(figures)}{ratio}"
    return ""


def _throughput(figures: dict[str, Any]) -> str:
    parts = [f"{figures['tokens_per_s']:,.0f} tokens/s", f"step {figures['step_s']:.4f} s"]
    for key, label in (("mfu", "MFU"), ("hfu", "HFU"), ("of_ceiling", "of the matmul ceiling")):
        if figures[key] is not None:
            parts.append(f"{label} {100 * figures[key]:.1f} %")
    if figures["peak_bytes"] is not None:
        parts.append(f"peak {figures['peak_bytes'] / 1e9:.1f} GB")
    return " | ".join(parts)
