"""``axonn-jax convert``: conversion of Hugging Face models to directories to train from, and of runs back."""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from axonn_jax.cli.adapters import write_adapter_of
from axonn_jax.cli.arguments import Arg
from axonn_jax.cli.compare import compare
from axonn_jax.cli.prepare import terminated
from axonn_jax.core.errors import UserError
from axonn_jax.core.terminal import Ticker, counted, printable, say, size

if TYPE_CHECKING:
    from axonn_jax.core.models.config import ModelShape

Dtype = Literal["keep", "bf16", "fp32"]
_CONFIG = "config.toml"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|config\.toml")
_USUAL_TOKENS = 2048
"""Longest sequences in a new config.toml: a model's own limit, 40,960 or more, rarely fits the memory."""


@dataclass(frozen=True)
class Convert:
    """Convert a Hugging Face model into a directory to train from, or a trained run into a Hugging Face model.

    The kind of SOURCE decides the direction. DEST appears complete or not at all. Both sides have config.json,
    safetensors and the tokenizer's files, byte for byte; a directory to train from also a config.toml with the whole
    [model] and, where positions are rotary, seq_len at most 2,048. Of a run that trained adapters (LoRA), they are
    written as PEFT has them (--adapter), or are added to their base (--merge).
    """

    source: Annotated[Path, Arg(positional="SOURCE")]
    """A Hugging Face directory (config.json and safetensors), a converted one, a run directory, or one of its step_N;
    with --merge also PEFT's directory of an adapter. Where there is no such path: a model on the Hub, as org/name or
    org/name@revision."""
    dest: Annotated[Path, Arg(positional="DEST")]
    """The directory to write; new, or empty."""
    dtype: Dtype = "keep"
    """Dtype of the written weights; keep: as in SOURCE, which is fp32 in a run."""
    check: bool = False
    """Also compare logits of 64 random tokens: of this package's model of one side, and of transformers (in torch) on
    the other; print the largest difference. Both must be installed."""
    adapter: bool = False
    """Write the adapters of a run in PEFT's format."""
    merge: bool = False
    """Add the adapters in SOURCE to their base, and write the Hugging Face model."""
    base: Path | None = None
    """The base of the adapters in SOURCE, a directory or a model on the Hub, if it is not where they say."""
    shard_size: float = 5.0
    """The most GB in one file."""
    push: Annotated[str | None, Arg(default="stays here")] = None
    """Also upload DEST to the model org/name on the Hub; a new one is private."""
    force: bool = False
    """Replace DEST if an earlier convert made it."""
    json: bool = False
    """Print one JSON object with the result, and nothing else, on standard output."""


def run(args: Convert) -> int:
    """Convert, print the result and return the exit status.

    Raises:
        UserError: SOURCE is damaged or unsupported, or DEST cannot be written.
    """
    if not 1e-6 <= args.shard_size <= 1e6:
        raise UserError("--shard-size", args.shard_size, "a number of GB, from 0.000001 to 1000000")
    # Check flags before any import of jax or access to the network.
    if args.check and (missing := [name for name in ("torch", "transformers") if find_spec(name) is None]):
        raise UserError("--check", True, f"{' and '.join(missing)} installed beside this package; or no --check")
    if args.adapter and (args.merge or args.check or args.dtype != "keep"):
        raise UserError("--adapter", True, "without --merge, --check and --dtype: it writes adapters alone, in fp32")
    if args.base is not None and not args.merge:
        raise UserError("--base", str(args.base), "left out without --merge")
    from axonn_jax.files.huggingface.hub import check_push, push, resolve_path

    started, accepted = time.perf_counter(), "an existing directory of a Hugging Face model or of a run"
    base = args.base and resolve_path(args.base, "--base", "the directory of the adapters' base")
    args = replace(args, source=resolve_path(args.source, "SOURCE", accepted), base=base)
    if not args.source.is_dir():
        raise UserError("SOURCE", str(args.source), accepted)
    if args.push is not None:
        check_push(args.push, "--push")
    with terminated(), Ticker("reading") as ticker:
        if args.adapter:
            result = write_adapter_of(args.source, args.dest, force=args.force)
        else:
            side = _merged(args) if args.merge else _opened(args.source)
            if side.to_run and args.push is not None:
                raise UserError("--push", args.push, "left out where DEST is a directory to train from")
            result = _write(side, args, ticker)
        if args.check:
            ticker.now("comparing logits")
            run_side, transformers_side = (args.dest, args.source) if side.to_run else (args.source, args.dest)
            result |= compare(run_side, transformers_side, side.shape)
    if args.push is not None:
        result["pushed"] = push(args.dest, args.push, "--push")
    result |= {"path": str(args.dest), "seconds": round(time.perf_counter() - started, 3)}
    uploaded = f"\nuploaded as {result['pushed']}" if args.push is not None else ""
    print(json.dumps(result) if args.json else _lines(result) + uploaded)
    return 0


@dataclass(frozen=True)
class Conversion:
    """Model to convert: its weights under Hugging Face's names, and its small files."""

    shape: "ModelShape"
    weights: Any
    """`Pretrained`, `StoredParameters` or `MergedTensors`: `tensors`, and `span` and `pieces` of each."""
    small: Mapping[str, bytes]
    to_run: bool
    trained: bool = False
    """True if the weights are of a run, whose dtype may differ from that of config.json."""


def _opened(source: Path, field: str = "SOURCE") -> Conversion:
    from axonn_jax.files.huggingface.pretrained import is_pretrained, small_files

    if not is_pretrained(source):
        return _opened_run(source, field)
    from axonn_jax.files.data.tokenize import check_files
    from axonn_jax.files.huggingface.reader import Pretrained

    pretrained = Pretrained(source, field)
    small, to_run = dict(small_files(source, field)), not (source / _CONFIG).exists()
    check_files(source, field)
    return Conversion(pretrained.shape, pretrained, small, to_run)


def _opened_run(source: Path, field: str) -> Conversion:
    from axonn_jax.core.adapters.stored import adapters_in
    from axonn_jax.core.checkpoint.restore import resolve_checkpoint, stored_shape
    from axonn_jax.core.distributed.host_sync import LocalSync
    from axonn_jax.files.data.tokenize import check_files
    from axonn_jax.files.huggingface.from_checkpoint import StoredParameters
    from axonn_jax.files.huggingface.pretrained import FOLDER, check_shape, small_files

    checkpoint = resolve_checkpoint(source, LocalSync(), say, field)
    if adapters_in(checkpoint, field) is not None:
        raise UserError(field, str(source), "a whole model; of adapters alone, --adapter or --merge")
    folder = _run_of(checkpoint.path)
    shape = stored_shape(checkpoint, field)
    weights = StoredParameters(checkpoint, shape, field)
    if (folder / FOLDER).is_dir():
        check_shape(shape, folder / FOLDER, field)
        small = _with_trained_templates(dict(small_files(folder / FOLDER, field)), folder, field)
        check_files(folder / FOLDER, field)
        return Conversion(shape, weights, small, False, trained=True)
    return Conversion(shape, weights, _generated_small_files(folder, shape), False, trained=True)


def _run_of(checkpoint: Path) -> Path:
    folder = checkpoint.absolute().parent
    return folder.parent if folder.name == "checkpoints" else folder


def _with_trained_templates(small: Mapping[str, bytes], run: Path, field: str) -> dict[str, bytes]:
    # The run's chat templates replace all of the base's. If one of these stayed, transformers could choose it, for
    # example for a conversation with tools.
    from axonn_jax.files.data.instructions.chat import FILE
    from axonn_jax.files.huggingface.pretrained import TEMPLATES, small_files

    templates = re.compile(rf"{re.escape(FILE)}|{TEMPLATES}/.*")
    trained = dict(small_files(run, field, templates))
    return {name: raw for name, raw in small.items() if not (trained and templates.fullmatch(name))} | trained


def _merged(args: Convert) -> Conversion:
    from axonn_jax.core.adapters.stored import adapters_in, base_of
    from axonn_jax.core.checkpoint.restore import resolve_checkpoint
    from axonn_jax.core.distributed.host_sync import LocalSync
    from axonn_jax.files.adapters.export import MergedTensors, checked_base, stored_adapters
    from axonn_jax.files.adapters.peft import is_adapter, read_adapter, read_config
    from axonn_jax.files.huggingface.hub import resolve_path

    if is_adapter(args.source):
        base_name = read_config(args.source, "SOURCE")[1]
        folder = args.base or resolve_path(base_name, "--base", "the directory of the adapter's base")
        if (not base_name and args.base is None) or not folder.is_dir():
            raise UserError("--base", str(args.base or ""), f"the directory of the adapter's base, {base_name!r} to it")
        if args.check:
            raise UserError("--check", True, "left out with an adapter of PEFT: it compares with a run")
        side = _opened(folder, "--base")
        config, arrays, _ = read_adapter(args.source, side.shape, "SOURCE")
    else:
        checkpoint = resolve_checkpoint(args.source, LocalSync(), say, "SOURCE")
        if (stored := adapters_in(checkpoint, "SOURCE")) is None:
            raise UserError("--merge", True, f"for adapters; {args.source} is a whole model")
        folder = args.base or base_of(stored, checkpoint, "SOURCE")
        if not folder.is_dir():
            raise UserError("--base", str(folder), f"the directory of the adapters' base, {stored.base!r} to them")
        side = _opened(folder, "--base")
        checked_base(side.weights, stored, str(folder))  # PEFT's files have no checksum of the base
        small = _with_trained_templates(side.small, _run_of(checkpoint.path), "SOURCE")
        side = replace(side, small=small)
        config, arrays = stored.config, stored_adapters(checkpoint, stored, side.shape, "SOURCE")
    return replace(side, weights=MergedTensors(side.weights, side.shape, config, arrays), to_run=False)


def _generated_small_files(folder: Path, shape: "ModelShape") -> dict[str, bytes]:
    # A model trained from random weights has no files of a base to copy.
    from axonn_jax.core.checkpoint.readers import CONFIG
    from axonn_jax.files.data.tokenize import begin_of, end_of, load, naming_end
    from axonn_jax.files.huggingface.families import config_from_shape
    from axonn_jax.files.huggingface.pretrained import OF_TOKENIZER, SETTINGS, TOKENIZER, small_files

    files, end, begin = dict(small_files(folder, "SOURCE", OF_TOKENIZER)), None, None
    if TOKENIZER in files:
        tokenizer = load(folder / TOKENIZER, "SOURCE")
        begin = next(iter(begin_of(tokenizer)), None)
        if (end := end_of(folder, tokenizer, "SOURCE")) is not None:
            files = naming_end(files, tokenizer, end)
            files[SETTINGS] = _json({"model_max_length": shape.seq_len} | json.loads(files[SETTINGS]))
    files[CONFIG] = _json(config_from_shape(shape, "float32", end, begin))
    return files


def _write(side: Conversion, args: Convert, ticker: Ticker) -> dict[str, object]:
    import ml_dtypes
    import numpy as np

    from axonn_jax.core.checkpoint.readers import CONFIG
    from axonn_jax.core.models.presets import table_of
    from axonn_jax.files.data.output import OutputKind, appearing
    from axonn_jax.files.huggingface.export import Planned, dtype_name, write_tensors
    from axonn_jax.files.huggingface.hub import commit_of
    from axonn_jax.files.huggingface.pretrained import SMALL, with_dtype
    from axonn_jax.run.config_file import table_toml

    kinds = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp32": np.dtype(np.float32)}
    planned = [Planned(name, kinds.get(args.dtype, dtype), shape) for name, dtype, shape in side.weights.tensors]
    # --force may remove only what an earlier convert can have written.
    ours = re.compile(f"{_WEIGHTS.pattern}|{SMALL.pattern}")
    kind = OutputKind("convert", "converted", "SOURCE", "DEST", ours, CONFIG)
    small = dict(side.small)
    if args.dtype != "keep" or side.trained:
        small[CONFIG] = with_dtype(small[CONFIG], dtype_name(planned))
    if side.to_run:
        model = table_toml("model", table_of(trained_shape(side.shape)))
        hub = f"# The weights are {commit} of the Hub.\n\n" if (commit := commit_of(args.source)) else ""
        small[_CONFIG] = f"{hub}{model}\n\n{table_toml('checkpoint', {'weights': '{folder}'})}\n".encode()
    source, dest = args.source.resolve(), args.dest.resolve()
    with appearing(source, dest, kind, force=args.force) as partial:

        def report(done: int, total: int) -> None:
            ticker.now("writing", total >> 20, "MiB", done >> 20)

        write_tensors(partial, planned, side.weights, int(args.shard_size * 1e9), report)
        for name, raw in small.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(raw)
        files = len(list(partial.glob("*.safetensors")))
    return {
        "to": "run" if side.to_run else "huggingface",
        "parameters": side.shape.params(),
        "dtype": dtype_name(planned),
        "bytes": sum(tensor.nbytes for tensor in planned),
        "files": files,
        **({"seq_len": trained_shape(side.shape).seq_len, "longest": side.shape.seq_len} if side.to_run else {}),
    }


def trained_shape(shape: "ModelShape") -> "ModelShape":
    """Return the shape with shorter sequences, except for learned positions, whose table would be truncated."""
    return shape if shape.positions == "learned" else replace(shape, seq_len=min(shape.seq_len, _USUAL_TOKENS))


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _lines(result: Mapping[str, Any]) -> str:
    if result["to"] == "adapter":
        base = result["base"] or "a model given from Python"
        written = printable(f"{result['path']} is an adapter as PEFT has it, of {base}")
        return f"{result['parameters']:,} parameters of adapters, {size(result['bytes'])}\n{written}"
    count, stored = f"{result['parameters']:,} parameters", f"{size(result['bytes'])} of {result['dtype']}"
    noun = "a directory to train from" if result["to"] == "run" else "a Hugging Face model"
    lines = [f"{count}, {stored} in {counted(result['files'], 'file')}"]
    if "largest_difference" in result:
        pair = f"{result['largest_difference']:.3g}, of logits up to {result['largest_logit']:.3g}"
        lines.append(f"largest difference of logits to transformers: {pair}")
    if (seq_len := result.get("seq_len", 0)) < (longest := result.get("longest", 0)):
        lines.append(f"trains on sequences of {seq_len:,} tokens; up to {longest:,} by model.seq_len in config.toml")
    return "\n".join([*lines, printable(f"{result['path']} is {noun}, written in {result['seconds']:.1f} s")])
