"""scripts/gpu/check: the rehearsal without a GPU, and the ways in which a run can go wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from axonn_jax.core.engines.program import StageProgram
from axonn_jax.core.grid import GridShape, build_grid
from axonn_jax.core.memory.precision import precisions
from axonn_jax.core.settings import MemoryConfig
from axonn_jax.core.tensor.params import split_module
from axonn_jax.models import Transformer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu" / "check"


@pytest.fixture(autouse=True)
def _helpers(monkeypatch):
    """The script's helper modules are no package of this project: they are found beside it."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


def check(*arguments: str) -> "subprocess.CompletedProcess[str]":
    # Not ours to pass on: pytest's interpreter may see this checkout through its path.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, env=env, timeout=400, cwd="/"
    )


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> tuple["subprocess.CompletedProcess[str]", dict[str, Any]]:
    out = tmp_path_factory.mktemp("gpu") / "check.json"
    done = check("--quick", "--out", str(out))
    assert out.exists(), done.stdout + done.stderr
    return done, json.loads(out.read_text())


def rows(found: dict[str, Any], section: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found["sections"][section]["rows"]}


def test_a_training_row_runs_without_a_gpu():
    done = check("--quick", "--only", "device,training", "--activations", "full", "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_rehearsal_runs_every_section_and_succeeds_without_a_gpu(rehearsal):
    done, found = rehearsal
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["finished"]
    assert found["failed"] == 0
    assert set(found["sections"]) == {"device", "parity", "matmul", "training", "offload", "torch", "program"}
    assert found["device"]["platform"] == "cpu"
    assert found["device"]["versions"]["jax"] == jax.__version__
    statuses = {row["status"] for section in found["sections"].values() for row in section["rows"]}
    assert statuses == {"ok", "skipped"}


@pytest.mark.slow
def test_rows_that_need_a_gpu_say_so(rehearsal):
    _, found = rehearsal
    skipped = [row for section in found["sections"].values() for row in section["rows"] if row["status"] == "skipped"]
    assert {row["note"] for row in skipped} == {"no GPU"}
    names = [row["name"] for row in skipped]
    assert sum(name.startswith("attention cudnn") for name in names) == 2
    assert "PyTorch" in names


@pytest.mark.slow
def test_rehearsal_measures_what_the_real_run_measures(rehearsal):
    done, found = rehearsal
    parity = rows(found, "parity")
    assert {"gpt fp32, cpu / cpu", "llama bf16, cpu / cpu fp32", "activations dots bf16"} <= set(parity)
    assert 0 < parity["llama fp32, cpu / cpu"]["figures"]["errors"]["worst"] < 5e-5
    assert parity["Trainer, 5 steps, donation"]["figures"]["kept"] == 0
    assert parity["messages in device memory"]["figures"]["same"]

    training = rows(found, "training")
    assert list(training) == [
        "full, microbatch 2",
        "none, microbatch 2",
        "dots, microbatch 2",
        "full, microbatch 2 x 4",
    ]
    assert list(rows(found, "program")) == list(training)
    ceiling = max(row["figures"]["flops_per_s"] for row in rows(found, "matmul").values())
    for row in training.values():
        figures = row["figures"]
        assert figures["tokens_per_s"] == pytest.approx(
            figures["microbatch"] * figures["accumulate"] * 64 / figures["step_s"]
        )
        assert figures["of_ceiling"] == pytest.approx(figures["hardware_flops_per_s"] / ceiling)
        assert figures["mfu"] is None  # nobody publishes a peak for this CPU
        line = f"{row['name']} | {figures['tokens_per_s']:,.0f} tokens/s"
        assert any(line in pasted for pasted in found["summary"])
    assert all(line in done.stdout for line in found["summary"])


def test_a_full_run_without_a_gpu_fails_at_once(tmp_path):
    done = check("--out", str(tmp_path / "check.json"))
    assert done.returncode == 1
    assert "no GPU: jax sees none here; --quick rehearses without one" in done.stdout
    assert set(json.loads((tmp_path / "check.json").read_text())["sections"]) == {"device"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--preset", "gpt-1b"), "--preset gpt-1b"),
        (("--only", "parity,speed"), "--only parity,speed"),
        (("--microbatches", "4,many"), "--microbatches 4,many"),
        (("--activations", "offload"), "--activations offload"),
    ],
)
def test_bad_options_are_one_message(arguments, complaint):
    done = check(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr.splitlines()[-1]


def test_the_driving_process_and_the_pytorch_worker_leave_jax_alone():
    code = f"import sys; sys.path[:0] = [{str(SCRIPT.parent)!r}, {str(ROOT)!r}]; import checks.main, checks.torch_gpt; "
    done = subprocess.run([sys.executable, "-c", code + "assert 'jax' not in sys.modules"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def run_worker(code: str, limit_s: float = 60.0) -> list[Any]:
    from checks import process

    found: list[Any] = []
    process.run([sys.executable, "-c", code], dict(os.environ), limit_s, found.append, "matmul")
    return found


def test_a_worker_that_dies_is_a_failed_row_after_those_it_sent():
    row = json.dumps({"section": "matmul", "name": "first", "status": "ok"})
    code = f"import os, sys; print('\\x1erow ' + {row!r}, flush=True); sys.stderr.write('F0 fatal'); os.abort()"
    first, died = run_worker(code.replace("sys.stderr.write", "os.write(2, b'F0 fatal'); str"))
    assert (first.name, first.status) == ("first", "ok")
    assert (died.status, died.note) == ("failed", "exit status -6: F0 fatal")


def test_a_worker_that_hangs_is_stopped_with_what_it_started():
    code = "import subprocess, time; subprocess.Popen(['sleep', '300']); print('waiting', flush=True); time.sleep(300)"
    (stopped,) = run_worker(code, limit_s=2.0)
    assert (stopped.status, stopped.note) == ("failed", "stopped after 2 s: waiting")


def test_a_worker_without_rows_is_a_failure():
    (silent,) = run_worker("pass")
    assert (silent.status, silent.note) == ("failed", "exit status 0: it printed nothing")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1234 bytes.", "does not fit"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", "does not fit"),
        ("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 262144", "failed"),
        ("INTERNAL: cuDNN error\nmore", "failed"),
    ],
)
def test_only_the_devices_memory_running_out_counts_as_not_fitting(error, status):
    from checks.report import Row, attempt

    def fails() -> Row:
        raise RuntimeError(error)

    sent: list[Row] = []
    attempt(sent.append, "training", "row", fails)
    assert [row.status for row in sent] == [status]
    assert sent[0].note == "RuntimeError: " + error.splitlines()[0]


def test_not_fitting_spares_the_larger_microbatches_of_that_policy_only(monkeypatch):
    from checks.main import Check, options
    from checks.report import Row
    from checks.sizes import TrainConfig, train_plan

    given = options(["--microbatches", "8,16,4"])
    plan = train_plan(given.microbatches, given.activations)
    assert [config.name for config in plan[:4]] == [
        "full, microbatch 8",
        "none, microbatch 4",
        "dots, microbatch 8",
        "full, microbatch 8 x 4",
    ]
    assert len(plan) == 10
    assert len({config.name for config in plan}) == 10

    run, started = Check(given, SCRIPT), []

    def work(section: str, configs: list[dict[str, Any]], **_: Any) -> None:
        config = TrainConfig(**configs[0])
        started.append(config.name)
        fits = config.activations != "dots"
        run.rows.append(Row(section, config.name, "ok" if fits else "does not fit"))

    monkeypatch.setattr(run, "work", work)
    assert run._train(plan, {}, 0.0) == []
    assert "dots, microbatch 4" in started  # may fit where 8 did not
    assert "dots, microbatch 16" not in started
    assert {"full, microbatch 16", "none, microbatch 16", "full, microbatch 4"} <= set(started)

    run.rows.clear()
    given.minutes = 2.0  # time for a row by the first guess, but not with what is kept back for PyTorch
    started.clear()
    assert run._train(plan[:3], {}, 110.0) == plan[1:3]
    assert started == ["full, microbatch 8"]


def test_hlo_facts_count_library_calls():
    from checks.training import hlo_facts

    facts = hlo_facts(
        "%a = (bf16[2]) custom-call(%q), custom_call_target=\"__cudnn$fmhaSoftmax\"\n"
        "%b = (bf16[2]) custom-call(%q), custom_call_target=\"__cudnn$fmhaSoftmaxBackward\"\n"
        "%c = bf16[2] custom-call(%x), custom_call_target=\"__cublas$lt$matmul\"\n"
        '%d = bf16[2] fusion(%x), kind=kCustom, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}\n'
        "%e = (f32[]) while(%t), condition=%c, body=%b\n"
    )  # fmt: skip
    assert facts["custom_calls"] == {
        "__cudnn$fmhaSoftmax": 1,
        "__cudnn$fmhaSoftmaxBackward": 1,
        "__cublas$lt$matmul": 1,
    }
    assert facts["fusion_kinds"] == {"__triton_gemm": 1}
    assert (facts["fusions"], facts["loops"]) == (1, 1)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_the_parity_programs_lower_for_cuda(kind):
    """As far as a GPU's program can be followed without one; the cuDNN kernel asks for a device when it is traced."""
    from checks.sizes import parity_shape

    shape = parity_shape(kind, quick=True)
    parts = split_module(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0), attention="xla")))
    grid = build_grid(GridShape(), jax.devices()[:1])
    for dtype, activations in (("fp32", "none"), ("bf16", "full"), ("bf16", "dots")):
        program = StageProgram(parts, grid, precisions(dtype), MemoryConfig(activations=activations))
        tokens = jax.ShapeDtypeStruct((2, 2, shape.seq_len + 1), np.int32)
        params = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in parts.params.items()}
        with jax.numpy_dtype_promotion("standard"):  # jax's own attention does not live up to the suite's "strict"
            lowered = jax.jit(program.gradients).trace(params, tokens, None).lower(lowering_platforms=("cuda",))
        assert "stablehlo.dot_general" in lowered.as_text()


@pytest.mark.slow
def test_pytorchs_model_is_the_same_model():
    torch = pytest.importorskip("torch")
    from checks.parity import Subject
    from torch_gpt import GPT, load

    ours = Subject("gpt", quick=True)
    theirs = load(GPT(ours.shape, recompute=True), ours.weights)
    for batch in ours.tokens:
        tokens = torch.tensor(batch.astype(np.int64))
        (theirs(tokens) / len(ours.tokens)).backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()]))
    assert norm == pytest.approx(ours.reference.norm, rel=1e-5)


@pytest.mark.slow
def test_pytorchs_rows_can_be_rehearsed_too(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "check.json"
    done = check("--quick", "--rehearse-torch", "--only", "training,torch", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    for row in rows(json.loads(out.read_text()), "torch").values():
        assert row["status"] == "ok"
        assert row["figures"]["ratio"] > 0
