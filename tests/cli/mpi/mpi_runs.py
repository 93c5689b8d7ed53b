"""Runs whose curves tests/cli/mpi compares: models, cases, and as many runs of one start as can share it."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from launched import finished, flags, mpirun, write_config

WORKER = Path(__file__).with_name("several_train.py")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MPI4JAX = {"pipeline_channel": "mpi4jax"}
OFFLOAD = {"memory_offload": "optimizer", "memory_bucket": 12000, "tensor_scan_layers": "no"}
FP16 = {"memory_precision": "fp16"}
SMALL = {"train_steps": 6, "train_warmup": 1, "model_layers": 2, "model_seq_len": 64, "train_global_batch": 8}
UNTIED = {"model_tied": "false", "model_norm": "rmsnorm", "model_positions": "rope", "model_mlp": "swiglu"}
WIDE = {"model_hidden": 64, "model_seq_len": 64, "train_steps": 10, "train_global_batch": 8, "train_eval_every": 5}

# Name: the config, of so many layers or of an example, and its options in one process.
MODELS = {
    "gpt": (2, {}),
    "llama": (3, UNTIED),
    "dropout": (2, {"model_dropout": 0.1}),
    "wide": (2, {**WIDE, "train_microbatches": 1}),
    "short": (2, {"train_steps": 10}),
    "experts": ("experts-tiny.toml", SMALL),
    "pruned": ("pruned-tiny.toml", {**SMALL, "prune_method": "magnitude", "train_microbatches": 2}),
    "early bird": ("pruned-tiny.toml", {**SMALL, "prune_every": 1, "prune_threshold": 0.5}),
}

# Name: ranks, model, options. Together they have every kind of grid with every channel, every channel with every policy
# and every kind of grid with every memory mode that is here at least once.
CASES = {
    "mpi4jax": (2, "gpt", {"grid_pipe": 2, **MPI4JAX}),
    "untied zero-bubble": (2, "llama", {"grid_pipe": 2, "pipeline_policy": "zero-bubble"}),
    "pruned, pipe": (2, "pruned", {"grid_pipe": 2}),
    "pipe 4 1f1b": (4, "gpt", {"grid_pipe": 4, "pipeline_policy": "1f1b", "pipeline_channel": "mpi4py"}),
    "two processes a stage": (4, "gpt", {"grid_pipe": 2, "grid_x": 2}),
    "data, offload, ZeRO": (2, "short", {"grid_data": 2, "memory_zero": 1, **OFFLOAD}),
    "early bird, data": (2, "early bird", {"grid_data": 2}),
    "early bird, data, goes on": (2, "early bird", {"grid_data": 2, "train_steps": 8, "log_dir": "early_bird_data"}),
    "z": (2, "wide", {"grid_z": 2, "train_microbatches": 2}),
    "experts": (2, "experts", {"grid_expert": 2}),
}
SLOW_CASES = {
    "pruned, data, ZeRO": (2, "pruned", {"grid_data": 2, "memory_zero": 1}),
    "virtual stages": (2, "gpt", {"grid_pipe": 2, "pipeline_virtual_stages": 2}),
    "mpi4py": (2, "gpt", {"grid_pipe": 2, "pipeline_channel": "mpi4py"}),
    "pipe 4": (4, "gpt", {"grid_pipe": 4}),
    "1f1b": (2, "gpt", {"grid_pipe": 2, "pipeline_policy": "1f1b"}),
    "gpipe": (2, "gpt", {"grid_pipe": 2, "pipeline_policy": "gpipe"}),
    "gpipe mpi4jax": (2, "gpt", {"grid_pipe": 2, "pipeline_policy": "gpipe", **MPI4JAX}),
    "1f1b mpi4jax pipe 4": (4, "gpt", {"grid_pipe": 4, "pipeline_policy": "1f1b", **MPI4JAX}),
    "interleaved": (2, "llama", {"grid_pipe": 2, "pipeline_policy": "interleaved", "pipeline_virtual_stages": 2}),
    "zero-bubble pipe 4": (4, "llama", {"grid_pipe": 4, "pipeline_policy": "zero-bubble"}),
    "message mpi4jax pipe 4": (4, "llama", {"grid_pipe": 4, **MPI4JAX}),
    "virtual stages mpi4jax": (2, "llama", {"grid_pipe": 2, "pipeline_virtual_stages": 2, **MPI4JAX}),
    "pipe 4 in flight 2": (4, "gpt", {"grid_pipe": 4, "pipeline_in_flight": 2}),
    "fused backward": (2, "gpt", {"grid_pipe": 2, "pipeline_split_backward": "false"}),
    "dropout": (2, "dropout", {"grid_pipe": 2}),
    "dropout, two processes a stage": (4, "dropout", {"grid_pipe": 2, "grid_data": 2}),
    "two devices a process": (2, "gpt", {"grid_pipe": 2, "grid_x": 2}),
    "four devices a process": (2, "llama", {"grid_pipe": 2, "grid_z": 2, "grid_y": 2}),
    "two devices a process mpi4jax": (2, "gpt", {"grid_pipe": 2, "grid_data": 2, **MPI4JAX}),
    "data in a stage": (4, "llama", {"grid_pipe": 2, "grid_data": 2}),
    "z in a stage": (4, "llama", {"grid_pipe": 2, "grid_z": 2}),
    "y in a stage, mpi4jax": (4, "gpt", {"grid_pipe": 2, "grid_y": 2, **MPI4JAX}),
    "1f1b in stages of two": (4, "gpt", {"grid_pipe": 2, "grid_x": 2, "pipeline_policy": "1f1b"}),
    "virtual in stages of two": (4, "llama", {"grid_pipe": 2, "grid_x": 2, "pipeline_virtual_stages": 2}),
    "four processes a stage": (8, "gpt", {"grid_pipe": 2, "grid_z": 2, "grid_x": 2}),
    "recomputed": (2, "gpt", {"grid_pipe": 2, "memory_activations": "full"}),
    "two processes a stage, offload": (4, "short", {"grid_pipe": 2, "grid_x": 2, **OFFLOAD}),
    "z x": (4, "wide", {"grid_z": 2, "grid_x": 2, "train_microbatches": 2}),
    "data y": (4, "wide", {"grid_data": 2, "grid_y": 2, "train_microbatches": 2}),
    "experts and data": (4, "experts", {"grid_data": 2, "grid_expert": 2}),
    "y": (2, "wide", {"grid_y": 2, "train_microbatches": 2}),
    "data": (2, "wide", {"grid_data": 2, "train_microbatches": 2}),
    "x": (2, "wide", {"grid_x": 2, "train_microbatches": 2}),
    "data, offload and ZeRO, fp16": (2, "short", {"grid_data": 2, "memory_zero": 1, **OFFLOAD, **FP16}),
    "pipe and data, ZeRO, fp16": (4, "short", {"grid_pipe": 2, "grid_data": 2, "memory_zero": 1, **FP16}),
    "pipe and data, all": (4, "short", {"grid_pipe": 2, "grid_data": 2, "memory_zero": 1, **OFFLOAD, **FP16}),
}
EVERY_CASE = {**CASES, **SLOW_CASES}


def start_of(name):
    """What cases of the same start have in common: processes that are a pipeline's stages keep their grid."""
    ranks, _, options = EVERY_CASE[name]
    grid = [f"{key[5:]}{size}" for key, size in options.items() if key.startswith("grid_") and "grid_pipe" in options]
    return "-".join([f"n{ranks}", *grid, *["slow"] * (name in SLOW_CASES)])


def words(model, folder, data, directory, **options):
    """Those of `axonn-jax train` for a model, which takes steps on `data`."""
    config, own = MODELS[model]
    if isinstance(config, int):
        path = write_config(folder / f"{config}.toml", data, config)
    else:
        path, own = EXAMPLES / config, {**own, "data_path": data}
    return [str(path), *flags({**own, "log_dir": directory, **options})]


def directory_of(name):
    return EVERY_CASE[name][2].get("log_dir", re.sub(r"\W+", "_", name))


def run_start(start, folder, data):
    """Runs all cases of a start, one after another; what mpirun gave back, and the text of each that began."""
    runs = []
    for name, (_, model, options) in EVERY_CASE.items():
        missing = options.get("pipeline_channel") == "mpi4jax" and find_spec("mpi4jax") is None
        if missing or start_of(name) != start:
            continue
        options = {key: value for key, value in options.items() if key != "log_dir"}
        runs.append((name, words(model, folder, data, folder / directory_of(name), **options)))
    listed = folder / f"{start}.json"
    listed.write_text(json.dumps(runs))
    ranks = start.partition("-")[0][1:]
    done = finished(mpirun(ranks, sys.executable, WORKER, listed), timeout=120 + 60 * len(runs))
    texts = re.split(r"^=== (.*)\n", done.stderr, flags=re.MULTILINE)[1:]
    return done, dict(zip(texts[::2], texts[1::2], strict=True))
