"""Every bad input ends with status 2 and one line that names the field, the value and what is accepted."""

import os
from contextlib import contextmanager

import pytest
from commands import alone
from launched import AXONN, finished

from axonn_jax.cli.arguments import parse
from axonn_jax.cli.inspect import Inspect
from axonn_jax.cli.main import main
from axonn_jax.core.errors import UserError


def test_the_base_configuration_is_good(write_config, capsys):
    write_config()
    assert main(["train", "run.toml"]) == 1  # it got as far as train
    assert "training was started" in capsys.readouterr().err


TABLES = "model, data, grid, train, goldfish, pipeline, memory, tensor, moe, prune, lora, checkpoint, log"

LONG = "9" * 5000
# Keys with values that are wrong beside others: name, value as typed, value as shown, what the line says besides.
# The range and the type of each key alone: run/test_keys.py.
KEYS = [
    ("train.stepz", "5", "5", "not a known key; did you mean 'steps'?"),
    ("log.qqqq", "1", "1", "the keys of [log] are dir, every, tensorboard"),
    ("trian.steps", "5", None, "did you mean 'train'?"),
    ("zzz.steps", "5", None, f"the tables are {TABLES}"),
    ("train.steps", "1e3", "1000.0", "an integer"),
    ("train.microbatches", "3", None, "train.global_batch = 8: a multiple of data*z*microbatches = 3; nearest: 6 or 9"),
    ("train.lr", "-1e-3", "-0.001", "a finite number above 0"),
    (
        "train.optimizer",
        '"adamx"',
        "'adamx'",
        "lion, adafactor, muon, adamw_bf16; did you mean 'adam",
    ),
    (
        "train.schedule",
        '"Cosine"',
        "'Cosine'",
        "one of cosine, linear, constant, wsd, inverse_sqrt; did you mean 'cosine'?",
    ),
    ("data.path", '"nowhere"', "'nowhere'", "axonn-jax prepare"),
    ("data.path", '""', "''", "axonn-jax prepare"),
    ("grid.tp", "2", "2", "not a known key; did you mean 'y'?"),
    ("grid.x", "0", "0", "an integer of at least 1"),
    ("grid.x", "3", None, "model.hidden = 32: a multiple of x*z = 3; or x*z one of 1, 2, 4, 8, 16, 32"),
    ("grid.y", "8", None, "model.kv_heads = 4: a multiple of y = 8; or grid.y one of 1, 2, 4"),
    ("grid.data", "3", None, "train.global_batch = 8: a multiple of data*z*microbatches = 3; nearest: 6 or 9"),
    ("grid.pipe", "0", "0", "an integer of at least 1"),
    ("grid.pipe", "7", "7", "at most 6: each of the 1 * pipe virtual stages needs one of the model's 6 segments"),
    ("grid.expert", "2", "2", "1 for a model without experts; grid.data splits the batch too"),
    ("model.experts_per_token", "3", "3", "left out in a model without model.experts"),
    ("model.router", '"sigmoid"', "'sigmoid'", "left out in a model without model.experts"),
    ("model.experts", "-1", "-1", "an integer of at least 0"),
    ("model.experts", "1", None, "model.experts_per_token = 2: an integer from 1 to model.experts = 1"),
    ("prune.at_step", "3", None, "prune.density = 1.0: below 1 where other settings of [prune] are given"),
    ("prune.at_step", "100000", "100000", "below train.steps, which is"),
    ("prune.method", '"file"', None, "prune.mask_file = '': the path of an .npz file"),
    ("prune.mask_file", '"none.npz"', "'none.npz'", "not given, or prune.method = file"),
    ("model.heads", "5", "5", "a divisor of hidden (32); the nearest is 4"),
    ("model.kv_heads", "3", "3", "a divisor of heads (4); the nearest is 2"),
    ("model.layers", "0", "0", "an integer of at least 1"),
    ("model.vocab", "256", "256", "at least 300, or data without token 299"),
    ("model.seq_len", "1000000", "1000000", "at most"),
    ("model.dropout", "1", "1.0", "a probability"),
    ("model.init_std", "inf", "inf", "a finite number above 0"),
    ("model.preset", '"gpt3"', "'gpt3'", "did you mean 'gpt2'?"),
    ("model.preset", '"gpt2"', None, "model.vocab"),
    ("tensor.sub_batches", "3", "3", "0 or a divisor of a device's 8 sequences of a microbatch"),
    ("tensor.scan_layers", '"yes"', None, "model.layers = 1: to scan layers, at least 2"),
    ("memory.resident", '"20000"', "'20000'", "auto, or an amount such as 28GB or 26GiB; a number needs its unit"),
    ("pipeline.virtual_stages", "2", "2", 'pipeline.policy "1f1b" has 1; "interleaved" is the 1F1B order for more'),
    ("pipeline.virtual_stages", "4", None, "grid.pipe = 2: at most 1: each of the 4 * pipe virtual stages"),
    ("pipeline.virtual_stages", "2147483647", "2147483647", "at most 3: "),
    (
        "pipeline.split",
        '"9,9"',
        "[9, 9]",
        "2 numbers of at least 1 that add up to the model's 6 segments; these add up to 18",
    ),
    ("pipeline.split", '"6"', "[6]", "one a virtual stage; these are 1 numbers"),
    ("pipeline.split", '"6,0"', "[6, 0]", "stage 1 is empty"),
    ("pipeline.split", '"a,b"', "'a,b'", "numbers of segments with commas"),
    ("pipeline.split", '"-1,7"', "'-1,7'", "numbers of segments with commas"),
    ("pipeline.split", f'"{LONG}"', f"'{LONG[:299]}...", "numbers of segments with commas"),
    ("pipeline.channel", '"mpi"', "'mpi'", "one of auto, local, mpi4jax, mpi4py; did you mean 'mpi4py'?"),
    ("checkpoint.keep_every", "5", "5", "a multiple of checkpoint.every, which is 2"),
    ("checkpoint.resume", '""', "''", "auto, never, or the path of a checkpoint"),
    ("checkpoint.resume", '"newest"', "'newest'", "auto, never, or the directory of a checkpoint"),
    ("checkpoint.weights", '"nowhere"', "'nowhere'", "the directory of a checkpoint (step_N) or of a run"),
    ("log.dir", '""', "''", "a directory that can be written"),
    ("log.dir", '"DATA"', None, "a directory of its own; prepared data, or a checkpoint, is in this one"),
    ("log.dir", '"run.toml"', "'run.toml'", "a directory that can be written; is not a directory"),
    ("log.dir", '"run.toml/deeper"', "'run.toml/deeper'", "run.toml is not a directory"),
]
# Cases that need more than the key itself: the rest of the configuration they are tried in.
PIPE_2 = {"grid": ["pipe = 2"]}
WITH = {
    ("pipeline.virtual_stages", "2"): {**PIPE_2, "pipeline": ['policy = "1f1b"']},
    ("pipeline.virtual_stages", "4"): PIPE_2,
    ("pipeline.virtual_stages", "2147483647"): PIPE_2,
    **{(name, typed): PIPE_2 for name, typed, *_ in KEYS if name == "pipeline.split"},
    ("tensor.scan_layers", '"yes"'): {"model": ["layers = 1"]},
    ("memory.resident", '"20000"'): {"memory": ['offload = "optimizer"']},
    ("prune.at_step", "100000"): {"prune": ["density = 0.5"]},
    ("prune.mask_file", '"none.npz"'): {"prune": ["density = 0.5"]},
    ("checkpoint.keep_every", "5"): {"checkpoint": ["every = 2"]},
    ("model.preset", '"gpt2"'): {"model": ["vocab = 299", "heads = 4", "hidden = 32", "seq_len = 16"]},
}


TYPED = {
    "train.stepz": "5",
    "grid.tp": "2",
    "train.lr": "-1e-3",
    "data.path": '""',
    "grid.x": "3",
    "pipeline.split": '"6,0"',
}
"""Those of `KEYS` that are tried as flags too, which are read as the file's values."""


def ways():
    for name, typed, shown, says in KEYS:
        for way in ("file", "flag", "flag=") if TYPED.get(name) == typed else ("file",):
            yield pytest.param(way, name, typed, shown, says, id=f"{name}={typed:.40}-{way}")


@pytest.mark.parametrize(("way", "name", "typed", "shown", "says"), list(ways()))
def test_bad_keys(write_config, refused, way, name, typed, shown, says):
    table, _, key = name.partition(".")
    changes = {table: list(lines) for table, lines in WITH.get((name, typed), {}).items()}
    if way == "file":
        changes[table] = [*changes.get(table, []), f"{key} = {typed}"]
    write_config(changes)
    text = typed[1:-1] if typed.startswith('"') else typed
    flags = {"file": [], "flag": [f"--{name}", text], "flag=": [f"--{name}={text}"]}[way]
    exact = [f"{name} = {shown}: "] if shown is not None else []
    refused(["train", "run.toml", *flags], *exact, says)


FILES = {
    "not TOML": ("[train\nsteps = 5", "valid TOML"),
    "no value": ("[train]\nsteps = = 5", "Invalid value"),
    "key twice": ("[train]\nsteps = 1\nsteps = 2", "valid TOML"),
    "nested deeply": ("a = " + "[" * 5000, "valid TOML"),
    "long number": ("[train]\nsteps = " + "9" * 5000, "valid TOML"),
    "empty": ("", "data.path = '': a directory written by `axonn-jax prepare`; or several with weights, data.mix"),
    "key outside tables": ("steps = 5", "not inside a table; the tables are " + TABLES + "; did you mean train.steps?"),
    "table as value": ("train = 5", "train = 5: a table"),
    "list of tables": ("[[train]]\nsteps = 5", "a table, [train]"),
    "a key that is gone": ('[memory]\noffload_to = "/nvme"', "memory.offload_to = '/nvme': not a known key"),
    "unknown empty table": ("[tarin]", "not a known table; did you mean 'train'?"),
    "table below a key": ("[train.steps]\nx = 1", "train.steps = {'x': 1}: an integer"),
    "list for a number": ("[train]\nlr = [1e-3]", "train.lr = [0.001]: a number"),
    "date for a text": ("[log]\ndir = 2026-01-01", "log.dir = 2026-01-01: a text"),
    "NUL in a path": ('[log]\ndir = "a\\u0000b"', "a text without NUL"),
    "no model": ('[data]\npath = "DATA"', "model.preset = (not given): a preset (gpt2, "),
    "half a model": (
        '[data]\npath = "DATA"\n[model]\nlayers = 1\nhidden = 32',
        "model.heads, model.seq_len = (not given)",
    ),
    "newline in a key": ('[train]\n"st\\neps" = 1', "st\\neps"),
    "unknown choice of the wrong type": ("[train]\noptimizer = 3", "train.optimizer = 3: one of adamw"),
}


@pytest.mark.parametrize("case", FILES)
def test_bad_files(prepared, place, refused, case):
    text, says = FILES[case]
    (place / "run.toml").write_text(text.replace("DATA", str(prepared)))
    refused(["train", "run.toml"], says)


COMMANDS = {
    "unknown command": (
        ["trian"],
        [
            "command = 'trian': one of train, launch, inspect, prepare, generate, evaluate, loki, convert, prune, ",
            "did you mean 'train'?",
        ],
    ),
    "unknown flag": (["--verbose"], ["'--verbose'", "one of train"]),
    "no config file": (["train"], ["CONFIG.toml = (not given)", "axonn-jax train CONFIG.toml"]),
    "missing config file": (["train", "none.toml"], ["CONFIG.toml = 'none.toml': no such file"]),
    "directory as config": (["train", "."], ["CONFIG.toml = '.': is a directory"]),
    "binary config": (["train", "binary.toml"], ["CONFIG.toml = 'binary.toml': a TOML file, which is UTF-8 text"]),
    "file below a file": (["train", "run.toml/x"], ["CONFIG.toml = 'run.toml/x': a TOML file that can be read"]),
    "two config files": (["train", "run.toml", "more.toml"], ["argument = 'more.toml': only flags such as"]),
    "flag without a table": (["train", "run.toml", "--steps", "5"], ["steps = 5: ", "did you mean 'train.steps'?"]),
    "single dash": (["train", "run.toml", "-train.steps", "5"], ["'-train.steps'", "two dashes, as in --train.steps"]),
    "flag without a value": (["train", "run.toml", "--train.steps"], ["train.steps = (not given): an integer"]),
    "flag before a flag": (
        ["train", "run.toml", "--train.lr", "--log.tensorboard"],
        ["train.lr = (not given): a number"],
    ),
    "switch with a word": (
        ["train", "run.toml", "--log.tensorboard", "yes"],
        ["log.tensorboard = 'yes': true or false"],
    ),
    "a sequence that does not split": (
        ["train", "run.toml", "--grid.y", "2", "--model.seq_len", "15", "--memory.sequence_parallel"],
        ["model.seq_len = 15: a multiple of y (memory.sequence_parallel) = 2; nearest: 14 or 16; or grid.y one"],
    ),
    "heads that do not split over y and x": (
        ["train", "run.toml", "--grid.x", "4", "--model.heads", "2", "--tensor.residual_comm", "gather"],
        ["model.kv_heads = 2: a multiple of y*x (tensor.residual_comm) = 4; nearest: 4"],
    ),
    "prepare: nothing given": (["prepare"], ["SOURCE, OUT_DIR = (not given): required"]),
    "prepare: no source": (
        ["prepare", "none", "out", "--vocab", "300"],
        ["SOURCE = 'none': an existing folder or file"],
    ),
    "prepare: a variable that is not set": (
        ["prepare", "", "out", "--vocab", "300"],
        ["SOURCE = '': a path; this text is empty"],
    ),
    "inspect: a variable that is not set": (["inspect", ""], ["RUN_DIR = '': a path; this text is empty"]),
    "prepare: unknown flag": (
        ["prepare", ".", "out", "--vocap", "300"],
        ["--vocap = '300'", "did you mean '--vocab'?"],
    ),
    "prepare: vocab a word": (["prepare", ".", "out", "--vocab", "big"], ["--vocab = 'big': an integer"]),
    "prepare: vocab too small": (["prepare", ".", "out", "--vocab", "-1"], ["vocab = -1: "]),
    "prepare: vocab missing": (["prepare", ".", "out", "--vocab"], ["--vocab = (not given): an integer"]),
    "prepare: holdout": (["prepare", ".", "out", "--vocab", "300", "--holdout", "2"], ["--holdout = 2.0: a share"]),
    "prepare: holdout a word": (["prepare", ".", "out", "--vocab=300", "--holdout=x"], ["--holdout = 'x': a number"]),
    "prepare: one more": (["prepare", ".", "out", "more", "--vocab", "300"], ["argument = 'more': not taken by"]),
    "a table as a flag": (
        ["train", "run.toml", "--grid", "2"],
        ["grid = 2: not a known flag, which are --table.key; its keys are grid.pipe, grid.data,"],
    ),
    "processes of train": (["train", "run.toml", "-n", "4"], ["-n = 'behind train': a flag of `axonn-jax launch`"]),
    "plan: no configuration": (
        ["plan", "--model", "none.toml", "--machine", "laptop", "--devices", "2"],
        ["--model = 'none.toml': a configuration (.toml), the directory of a run"],
    ),
    "prune: nothing given": (["prune"], ["RUN_DIR, OUT_DIR = (not given): required"]),
    "prune: no run": (["prune", "none", "out"], ["RUN_DIR = 'none': an existing directory left by `axonn-jax train`"]),
    "prune: all kept": (["prune", "none", "out", "--density", "1"], ["--density = 1.0: a number above 0 and below 1"]),
    "prune: a scope": (["prune", "none", "out", "--scope", "row"], ["--scope = 'row': one of layer, global"]),
    "doctor: unknown flag": (["doctor", "--jason"], ["--jason", "did you mean '--json'?"]),
    "doctor: timeout": (["doctor", "--timeout", "-1"], ["--timeout = -1.0: "]),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_bad_command_lines(write_config, place, refused, case):
    argv, parts = COMMANDS[case]
    write_config()
    (place / "binary.toml").write_bytes(b"\xff\xfe\x00")
    refused(argv, *parts)


LONG = "n" * 300
PATHS = ["data.path", "log.dir", "train.sample_prompts", "prune.mask_file"]
PATHS += [f"checkpoint.{key}" for key in ("resume", "weights", "adapter")]
UNREACHABLE = {
    **{name: ["train", "run.toml", f"--{name}", LONG] for name in PATHS},
    "RUN_DIR": ["inspect", LONG],
    "SOURCE": ["convert", LONG, "out"],
    "OUT_DIR": ["prepare", ".", LONG, "--vocab", "300"],
    "--tokenizer": ["prepare", ".", "out", "--tokenizer", LONG],
    "--mix": ["prepare", ".", "out", "--instructions", "--seq-len", "9", "--tokenizer", ".", "--mix", f"{LONG}:1"],
    "--prompts": ["generate", "run", "--prompts", LONG],
    "--data": ["loki", "run", "--data", LONG],
    "--png": ["plan", "--model", "gpt-1.3b", "--png", f"{LONG}.png"],
    "--generations": ["evaluate", "--generations", LONG],
}


@pytest.mark.parametrize("name", UNREACHABLE)
def test_a_path_that_cannot_be_looked_at(write_config, refused, name):
    write_config()
    refused(UNREACHABLE[name], f"error: {name} = 'nnn", "...: a path that can be looked at; File name too long\n")


@contextmanager
def as_nobody():
    """Another user in this process, where the superuser runs it, whom no folder is closed to."""
    own = os.getresuid()
    if own[0] == 0:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(*own)


def test_a_closed_folder_cannot_be_looked_into(tmp_path):
    tmp_path.chmod(0)
    with as_nobody():
        for path in (tmp_path, tmp_path / "run"):
            with pytest.raises(UserError, match=r"RUN_DIR = .*a path that can be looked at; Permission denied"):
                parse(Inspect, [str(path)], "axonn-jax inspect")
    tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--grid.y", "8"], "error: model.kv_heads = 4: a multiple of y = 8; or grid.y one of 1, 2, 4\n"),
        (["--train.stepz", "5"], "error: train.stepz = 5: not a known key; did you mean 'steps'?\n"),
        (
            ["--grid.pipe", "2", "--pipeline.split", "9,9"],
            "error: pipeline.split = [9, 9]: 2 numbers of at least 1 that add up to the model's 6 segments; "
            "these add up to 18\n",
        ),
        (["--train.lr", "nan"], "error: train.lr = nan: a finite number above 0\n"),
    ],
)
def test_in_a_process_of_its_own(write_config, tmp_path, flags, line):
    """Which also shows that no jax was imported to find the mistake."""
    write_config()
    done = alone("train", "run.toml", *flags, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{line}[]\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_a_channel_between_processes_is_refused_in_one(write_config, tmp_path):
    """How many processes take part is known only once the run starts; still nothing is compiled or left behind."""
    write_config()
    argv = ["train", "run.toml", "--grid.pipe", "2", "--pipeline.channel", "mpi4jax"]
    done = finished([*AXONN, *argv], cwd=tmp_path)
    line = "error: pipeline.channel = 'mpi4jax': local or auto in a run of one process; mpirun or srun starts several\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
