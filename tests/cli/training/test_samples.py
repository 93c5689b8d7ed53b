"""Samples of fixed prompts during a run: the texts of `axonn-jax generate`, and the losses of a run without them."""

import json
import shutil
import signal

import pytest
from launched import UNDER_MPIRUN, command, curves, flags, succeeded, write_config

from axonn_jax.cli.main import main
from axonn_jax.core.errors import UserError
from axonn_jax.run.config_file import loads
from axonn_jax.run.metrics import SAMPLE_TOKENS
from axonn_jax.run.validate import check

STEPS, EVERY = 5, 2
PROMPTS = ["def ", "return x +", "def f1(x):"]
QUICK = "z, bf16"
WAYS = {
    QUICK: {"grid_z": 2, "memory_precision": "bf16"},
    "z, data, zero, bf16": {"grid_data": 2, "grid_z": 2, "memory_zero": 1, "memory_precision": "bf16"},
    "z and y, two KV heads": {"grid_z": 2, "grid_y": 2, "model_kv_heads": 2, "model_positions": "rope"},
    "x, gather, offload": {"grid_x": 2, "tensor_residual_comm": "gather", "memory_offload": "optimizer"},
    "y, split sequence, scanned": {
        "grid_y": 2,
        "memory_sequence_parallel": True,
        "tensor_scan_layers": "yes",
        "model_layers": 2,
    },
    "pruned": {"grid_data": 2, "prune_density": 0.5},
    "experts": {"grid_expert": 2, "grid_z": 2, "model_experts": 4, "model_experts_per_token": 2},
}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n")
    return path


@pytest.fixture(scope="module")
def config(prepared, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "c.toml"
    text = write_config(path, prepared, more=f"[checkpoint]\nevery = {EVERY}\nkeep = 9").read_text()
    path.write_text(text.replace("seq_len = 32", "seq_len = 64").replace("es = 4", "es = 1"))
    return path


def sampling(prompts, **options):
    return {"train_steps": STEPS, "train_sample_every": EVERY, "train_sample_prompts": prompts, **options}


def samples(run):
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def generated(run, step, folder, capsys):
    """Likeliest texts of `axonn-jax generate` of a run as it was behind a step."""
    before = folder / f"as of {step}"
    later = shutil.ignore_patterns(*(f"step_{number:08d}" for number in range(step + 1, 99)))
    shutil.copytree(run, before, ignore=later)
    lines = folder / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    capsys.readouterr()
    words = ["--prompts", str(lines), "--temperature", "0", "--tokens", str(SAMPLE_TOKENS), "--json"]
    assert main(["generate", str(before), *words]) == 0
    return [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way == QUICK else [pytest.mark.slow]) for way in WAYS])
def test_samples_are_texts_of_the_checkpoint_of_their_step(way, config, prompts, tmp_path, capsys):
    run = tmp_path / "run"
    options = flags(sampling(prompts, log_dir=run, **WAYS[way]))
    assert main(["train", str(config), *options]) == 0
    said, found = capsys.readouterr().err, samples(run)
    assert [(one["step"], one["prompt"]) for one in found] == [(step, one) for step in (2, 4) for one in PROMPTS]
    for step in (4,) if way == QUICK else (2, 4):
        texts = [one["text"] for one in found if one["step"] == step]
        assert texts == generated(run, step, tmp_path, capsys)
        for prompt, text in zip(PROMPTS, texts, strict=True):
            assert f"step {step}: {json.dumps(prompt)} goes on {json.dumps(text, ensure_ascii=False)}\n" in said
    plain = flags({"log_dir": tmp_path / "plain", "train_steps": STEPS, **WAYS[way]})
    assert main(["train", str(config), *plain]) == 0
    assert curves(tmp_path / "plain") == curves(run)


def test_a_run_without_memory_for_samples_goes_on_and_may_get_others(config, prompts, tmp_path, capsys, monkeypatch):
    """The keys are no part of the model that a checkpoint is of."""
    run, other = tmp_path / "run", tmp_path / "one.jsonl"
    other.write_text('{"prompt": "x", "name": "first"}\n')
    with monkeypatch.context() as patched:
        patched.setattr("axonn_jax.text.inference.store.unused", lambda *_: 100)
        assert main(["train", str(config), *flags(sampling(prompts, log_dir=run, train_steps=2))]) == 0
    assert "warning: no samples of step 2: slots = 3: at most 0 of 64 tokens" in capsys.readouterr().err
    assert samples(run) == []
    options = sampling(other, log_dir=run, train_steps=4, train_sample_every=1)
    assert main(["train", str(config), *flags(options)]) == 0
    assert "resumed at step 2" in capsys.readouterr().err
    assert [(one["step"], one["prompt"], one["name"]) for one in samples(run)] == [
        (at, "x", "first") for at in (2, 3, 4)
    ]


def test_a_run_stopped_when_evaluation_and_samples_are_due_makes_them_when_it_goes_on(
    config, prompts, tmp_path, capsys, monkeypatch
):
    """So its lines are those of a run that was not stopped; one that goes on once more makes nothing twice."""

    def records(run):
        kept = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [{key: one[key] for key in ("step", "loss", "eval_loss") if key in one} for one in kept], samples(run)

    def stops(self, fault):
        self._number = signal.SIGTERM if next(steps) == 2 else 0
        return self._number > 0

    options = {"train_eval_every": 2, "train_steps": 4, "checkpoint_every": 3}
    assert main(["train", str(config), *flags(sampling(prompts, log_dir=tmp_path / "whole", **options))]) == 0
    for wanted in (143, 0):
        words = ["train", str(config), *flags(sampling(prompts, log_dir=tmp_path / "parts", **options))]
        with monkeypatch.context() as patched:
            steps = iter(range(1, 9))
            if wanted:
                patched.setattr("axonn_jax.run.signals.StopSignals.requested", stops)
            assert main(words) == wanted
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    more = flags(sampling(prompts, log_dir=tmp_path / "parts", **options | {"train_steps": 5}))
    assert main(["train", str(config), *more]) == 0
    assert [one["step"] for one in samples(tmp_path / "parts")] == 3 * [2] + 3 * [4]


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"grid_z": 2}, {"grid_data": 2}, {"grid_y": 2}], ids=str)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=UNDER_MPIRUN)])
def test_two_processes_sample_together(axes, ranks, config, prompts, tmp_path, capsys):
    run = tmp_path / "run"
    done = succeeded(command(config, run, ranks, **sampling(prompts, **axes)))
    assert done.stderr.count("step 2: ") == len(PROMPTS)
    for step in (2, 4):
        texts = [one["text"] for one in samples(run) if one["step"] == step]
        assert texts == generated(run, step, tmp_path, capsys)


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("train.sample_every", 0, r"train\.sample_every = 0: at least 1 where train\.sample_prompts is '.*txt'"),
        ("train.sample_every", -1, r"train\.sample_every = -1: "),
        ("train.sample_prompts", "", r"train\.sample_every = 2: 0 where train\.sample_prompts is ''"),
        ("train.sample_prompts", "none.txt", r"train\.sample_prompts = 'none\.txt': a file of prompts.*; No such file"),
        ("train.sample_prompts", "/tmp", r"train\.sample_prompts = '/tmp': a file of prompts, .*; not a regular file"),
        ("grid.pipe", 2, r"train\.sample_every = 2: 0 where grid\.pipe is above 1"),
        ("b.txt", b"\n \n", r"train\.sample_prompts = '.*b\.txt': at least one line"),
        ("b.txt", b"x\ncaf\xe9\n", r"train\.sample_prompts = '.*b\.txt, line 2': a text in UTF-8"),
        ("b.txt", b"x" * 999, r"train\.sample_prompts = '.*b\.txt, line 1': a prompt of at most 63 tokens"),
        ("b.jsonl", b"x\n", r"train\.sample_prompts = '.*b\.jsonl, line 1': an object in JSON"),
        ("b.jsonl", b'{"text": "x"}\n', r"train\.sample_prompts = '.*b\.jsonl, line 1': an object whose"),
    ],
)  # fmt: skip
def test_what_cannot_be_sampled_is_found_before_jax_starts(flag, value, says, config, prompts, tmp_path):
    good = [("train.sample_every", EVERY), ("train.sample_prompts", str(prompts)), ("log.dir", str(tmp_path / "run"))]
    check(loads(config.read_text(), good))
    if flag.startswith("b."):
        (tmp_path / flag).write_bytes(value)
        flag, value = "train.sample_prompts", str(tmp_path / flag)
    with pytest.raises(UserError, match=says):
        check(loads(config.read_text(), [*good, (flag, value)]))


def test_data_without_a_tokenizer_give_no_samples(config, prepared, prompts, tmp_path):
    shutil.copytree(prepared, tmp_path / "data")
    (tmp_path / "data" / "tokenizer.json").unlink()
    given = [("train.sample_every", 1), ("train.sample_prompts", str(prompts)), ("data.path", str(tmp_path / "data"))]
    with pytest.raises(UserError, match=r"data\.path = .*tokenizer\.json"):
        check(loads(config.read_text(), given))
