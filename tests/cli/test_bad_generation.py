"""What `axonn-jax generate` and `axonn-jax loki` refuse, before jax starts, in one line."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from axonn_jax.files.huggingface.pretrained import shape_of
from axonn_jax.text.loki import components

CALIBRATE = "axonn-jax loki run --data DIR"
LONG = "the grid of 7 " * 9
ENTRY = '{"prompt": "x"}\n'

# What `axonn-jax generate run --prompt x` refuses with further flags: these, and what the line says.
FLAGS = [
    ("--prompts p.jsonl", "--prompt = 'x': either a text or --prompts FILE"),
    ("--tokens 0", "--tokens = 0: an integer of at least 1"),
    ("--tokens 16", "--tokens = 16: at most 15, as the prompt has 1 tokens and model.seq_len is 16"),
    ("--samples 0", "--samples = 0: an integer of at least 1"),
    ("--samples 99999999999", "--samples = 99999999999: an integer of at least 1 and at most 1,000,000"),
    ("--temperature -1", "--temperature = -1.0: 0, or a number from 0.0001"),
    ("--temperature nan", "--temperature = nan: 0, or a number"),
    ("--temperature 1e-50", "--temperature = 1e-50: 0, or a number"),
    ("--temperature hot", "--temperature = 'hot': a number"),
    ("--top-k -1", "--top-k = -1: an integer of at least 0"),
    ("--top-p 0", "--top-p = 0.0: a number above 0 and at most 1"),
    ("--top-p 1.5", "--top-p = 1.5: a number above 0 and at most 1"),
    ("--min-p -0.1", "--min-p = -0.1: a number from 0 to 1"),
    ("--min-p 2", "--min-p = 2.0: a number from 0 to 1"),
    ("--repetition-penalty 0", "--repetition-penalty = 0.0: a number from 0.0001"),
    ("--repetition-penalty 1e99", "--repetition-penalty = 1e+99: a number from 0.0001 to 10,000"),
    ("--seed -1", "--seed = -1: an integer of at least 0"),
    ("--seed 4294967296", "--seed = 4294967296: an integer from 0 to 4294967295"),
    ("--stop=", "--stop = '': a text of at least one character"),
    ("--stop", "--stop = (not given): a text"),
    ("--slots 0", "--slots = 0: an integer of at least 1"),
    ("--slots 3 --grid.data 2", "--slots = 3: a multiple of data*z = 2"),
    ("--logprobs", "--logprobs = True: --json beside it"),
    ("--precision fp16", "--precision = 'fp16': one of fp32, bf16, auto"),
    ("--grid.pipe 2", "grid.pipe = 2: 1 in generation"),
    ("--grid.z 2", "grid.z = 2: 1 in generation"),
    ("--grid.y 3", "model.kv_heads = 4: a multiple of y = 3; or grid.y one of 1, 2, 4"),
    ("--grid.expert 2", "grid.expert = 2: 1 for a model without experts"),
    ("--attention locky", "--attention = 'locky': one of full, loki"),
    ("--attention loki", f"--attention = 'loki': a calibration in run/loki.safetensors: {CALIBRATE}"),
    ("--attention loki --loki.features 0", "--loki.features = 0.0: a number above 0 and at most 1"),
    ("--attention loki --loki.features 2", "--loki.features = 2.0: a number above 0 and at most 1"),
    ("--attention loki --loki.keys 0", "--loki.keys = 0.0: a number above 0 and at most 1"),
    ("--attention loki --loki.block 3", "--loki.block = 3: 1, 2, 4, 8, 16, 32 or 64"),
    ("--loki.features 0.5", "--loki.features = 0.5: nothing with --attention full"),
    ("--loki.keys 0.5", "--loki.keys = 0.5: nothing with --attention full"),
]
# Files of prompts.
PROMPTS = {
    "missing": (None, "p.jsonl': a file with a JSON object a line; No such file or directory"),
    "empty": (b"", "p.jsonl': at least one line"),
    "blank": (b"\n \r\n", "p.jsonl': at least one line"),
    "no JSON": (ENTRY.encode() + b"\n{'prompt'\n", "p.jsonl, line 3': an object in JSON; Expecting"),
    "deep": (b"[" * 100_000, "p.jsonl, line 1': an object in JSON; nested too deeply"),
    "not UTF-8": (b'{"prompt": "caf\xe9"}', "p.jsonl, line 1': an object in JSON; 'utf-8' codec"),
    "half a character": (b'{"prompt": "\\ud800"}', "p.jsonl, line 1': a text in UTF-8"),
    "no object": (b'["x"]', 'p.jsonl, line 1\': an object whose "prompt" is a text'),
    "no prompt": (ENTRY.encode() + b'{"text": "x"}', 'p.jsonl, line 2\': an object whose "prompt" is a text'),
    "a number": (b'{"prompt": 7}', 'p.jsonl, line 1\': an object whose "prompt" is a text'),
    "a long prompt": (
        (2 * ENTRY + json.dumps({"prompt": LONG})).encode(),
        "p.jsonl, line 3': a prompt of at most 15 tokens (model.seq_len = 16); this one has ",
    ),
}
# What `axonn-jax loki run --data data` refuses with further flags.
LOKI = [
    ("--seq-len 17", "--seq-len = 17: at most model.seq_len = 16"),
    ("--seq-len 1", "--seq-len = 1: an integer of at least 2"),
    ("--tokens 0", "--tokens = 0: an integer of at least 1"),
    ("--tokens 63", "--tokens = 63: at least 64: 4 sequences of 16"),
    ("--tokens 64 --grid.data 3", "--tokens = 64: at least 96: 6 sequences of 16"),
    ("--keys past", "--keys = 'past': one of post, pre"),
    ("--grid.pipe 2", "grid.pipe = 2: 1 in generation"),
    ("--grid.y 8", "model.kv_heads = 4: a multiple of y = 8"),
]


@pytest.mark.parametrize(("flags", "says"), FLAGS)
def test_flags(run_dir, refused, flags, says):
    refused(["generate", "run", "--prompt", "x", *flags.split(" ")], f"error: {says}")


@pytest.mark.parametrize("case", PROMPTS)
def test_files_of_prompts(run_dir, place, refused, case):
    raw, says = PROMPTS[case]
    if raw is not None:
        (place / "p.jsonl").write_bytes(raw)
    refused(["generate", "run", "--prompts", "p.jsonl"], "error: --prompts = 'p.jsonl", says)


def test_prompts(run_dir, place, refused):
    refused(["generate", "run"], "--prompt = (not given): either a text or --prompts FILE")
    refused(
        ["generate", "run", "--prompts", "run"], "--prompts = 'run': a file with a JSON object a line; not a regular"
    )
    says = "tokens': a prompt of at most 15 tokens (model.seq_len = 16); this one has "
    refused(["generate", "run", "--prompt", LONG], "--prompt = '", says)
    (place / "p.jsonl").write_text(ENTRY + '{"prompt": "xy"}\n')
    says = "--tokens = 15: at most 14, as the prompt in p.jsonl, line 2 has 2 tokens and model.seq_len is 16"
    refused(["generate", "run", "--prompts", "p.jsonl", "--tokens", "15"], says)


@pytest.mark.parametrize(("command", "more"), [("generate", ["--prompt", "x"]), ("loki", ["--data", "nowhere"])])
def test_directories(run_dir, place, refused, command, more):
    says = "an existing directory left by `axonn-jax train`"
    refused([command, "nowhere", *more], "RUN_DIR = 'nowhere': ", says)
    refused([command, "run/config.toml", *more], "RUN_DIR = 'run/config.toml': ", says)
    refused([command, *more], "RUN_DIR = (not given): required")
    (place / "data").mkdir()
    (place / "data" / "manifest.json").write_text('{"eot_id": 0}')  # of `prepare`
    refused([command, "data", *more], "RUN_DIR = 'data': ", says)
    config = place / "run" / "config.toml"
    config.write_text(config.read_text().replace("vocab = 300", "vocab = 300\nwindow = 8"))
    if command == "loki":
        refused([command, "run", *more], "RUN_DIR = 'run': a model without windows of 8 tokens")
    else:
        refused([command, "run", *more, "--attention", "loki"], "--attention = 'loki': full for a model with")


@pytest.fixture
def calibration(run_dir):
    """Writes a calibration of the run's model, its sizes or what it says of itself changed."""
    path = run_dir / components.FILE

    def write(heads=4, weights=((1.0, 2.0),), **sizes):
        shape = replace(shape_of(run_dir), **sizes)
        vectors = np.broadcast_to(np.eye(8, dtype=np.float32), (2, heads, 8, 8)).copy()
        components.save(components.Components(vectors, vectors[0], vectors[0], 9), path, shape, weights, "post")
        return path

    return write


FILES = {
    "cut off": lambda write: os.truncate(write(), 999),
    "empty": lambda write: write().write_bytes(b""),
    "uneven": lambda write: write(weights=[[1.0], [1.0, 2.0]]),
    "no weights": lambda write: write(weights={"a": 1}),
    "not finite": lambda write: write(weights=[[float("nan")]]),
    "no rotation": lambda write: (path := write()).write_bytes(path.read_bytes().replace(b"\x80\x3f", b"\x80\x4f")),
    "without its facts": lambda write: (path := write()).write_bytes(path.read_bytes().replace(b"tokens", b"tokenz")),
}


@pytest.mark.parametrize("damage", FILES)
def test_damaged_calibrations(calibration, refused, damage):
    FILES[damage](calibration)
    says = "--attention = 'loki': a calibration: run/loki.safetensors is damaged ("
    refused(["generate", "run", "--prompt", "x", "--attention", "loki"], says, CALIBRATE)


@pytest.mark.parametrize("other", [{"layers": 3}, {"heads": 2}, {"rope_theta": 5.0}], ids=str)
def test_calibrations_of_another_model(calibration, refused, other):
    calibration(**other)
    says = "--attention = 'loki': a calibration of this model: run/loki.safetensors is of another model"
    refused(["generate", "run", "--prompt", "x", "--attention", "loki"], says, CALIBRATE)


@pytest.mark.parametrize(("flags", "says"), LOKI)
def test_flags_of_a_calibration(run_dir, prepared, refused, flags, says):
    refused(["loki", "run", "--data", str(prepared), *flags.split(" ")], f"error: {says}")


def test_data_of_a_calibration(run_dir, prepared, refused):
    refused(["loki", "run"], "--data PATH = (not given): required")
    refused(["loki", "run", "--data", "nowhere"], "--data = 'nowhere': no such directory")
    refused(["loki", "run", "--data", "run"], "--data = 'run': no manifest.json in it")
    words = ["loki", "run", "--data", str(prepared)]
    (run_dir / components.FILE).mkdir()
    refused(words, "RUN_DIR = 'run': a directory in which loki.safetensors can be written")
    file = run_dir / "tokenizer.json"
    raw = json.loads(file.read_text())
    vocab = raw["model"]["vocab"]
    vocab["xyz"] = vocab.pop(max(vocab, key=vocab.get))
    raw["model"]["merges"] = []
    file.write_text(json.dumps(raw))
    refused(words, "--data = '", "tokens of RUN_DIR's tokenizer: axonn-jax prepare", "--tokenizer run")
    config = run_dir / "config.toml"
    config.write_text(config.read_text().replace("vocab = 300", "vocab = 299"))
    refused(words, "--data = '", "tokens below model.vocab = 299; the largest is 299")
    config.write_text(config.read_text().replace("seq_len = 16", "seq_len = 99999"))
    refused(words, "--seq-len = 99999: at most ", "the valid split of ")
