"""The metrics against all subsets of the samples, and against the published script restated."""

import itertools
import json
from statistics import fmean

import numpy as np
import pytest
from commands import answer

from axonn_jax.cli.evaluate.report import ends
from axonn_jax.cli.main import main
from axonn_jax.judge.formats import read_results, samples_of
from axonn_jax.judge.metrics import Judged, Sample, TimedRun, best_of_k, measure, pass_at_k

MODELS = {
    "serial": [{}],
    "omp": [{"num_threads": n} for n in (1, 32, 64)],
    "kokkos": [{"num_threads": n} for n in (1, 32, 64)],
    "mpi": [{"num_procs": n} for n in (1, 512)],
    "mpi+omp": [{"num_procs": n, "num_threads": 64} for n in (1, 4)],
    "cuda": [{}],
}
KINDS = ("sort", "scan")


def results(seed=3, samples=6):
    """A file of results as ParEval's drivers write it: failed builds, failed runs, and all in between."""
    rng = np.random.default_rng(seed)
    entries = []
    for (model, configs), kind, number in itertools.product(MODELS.items(), KINDS, range(2)):
        outputs = []
        for at in range(samples):
            built = bool(rng.random() < 0.8) and (kind, number) != ("scan", 1)
            good = rng.random() < 0.7
            runs = []
            for config in configs:
                valid = bool(good or rng.random() < 0.4)
                time = float(rng.uniform(0.01, 0.2)) if valid else None
                runs.append({"did_run": valid, "is_valid": valid or None, "runtime": time, **config})
            outputs.append(
                {
                    "generated_output": f"{at} }}",
                    "did_build": built,
                    "is_source_valid": model != "omp" or bool(rng.random() < 0.7),
                    "best_sequential_runtime": float(rng.uniform(0.1, 0.3)) if built else None,
                    "runs": runs if built else None,
                }
            )
        sampling = {"temperature": 0.2, "top_p": 0.95, "do_sample": True, "max_new_tokens": 1024, "prompted": False}
        text = {"name": f"{kind}_{number}", "problem_type": kind, "parallelism_model": model, "language": "cpp"}
        entries.append(text | sampling | {"prompt": "void f() {", "outputs": outputs})
    return entries


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The file of results, and its entries."""
    path = tmp_path_factory.mktemp("results") / "results.json"
    path.write_text(json.dumps(results()))
    return path, results()


@pytest.mark.parametrize("n", range(1, 11))
def test_pass_is_the_share_of_subsets_with_a_good_sample(n):
    for good, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * good + [False] * (n - good), k))
        assert pass_at_k(n, good, k) == pytest.approx(fmean(map(any, subsets)), abs=1e-14)


@pytest.mark.parametrize("n", range(1, 11))
def test_speedup_is_the_mean_of_the_best_of_all_subsets(n):
    values = np.random.default_rng(n).uniform(0, 9, n)
    values[: n // 3] = 0.0  # failed samples
    for k in range(1, n + 1):
        assert best_of_k(values, k) == pytest.approx(fmean(map(max, itertools.combinations(values, k))), rel=1e-13)


def test_many_samples_are_exact():
    assert pass_at_k(100_000, 1, 50_000) == 0.5
    assert best_of_k([0.0] * 1_999 + [1.0], 1_000) == 0.5


def test_the_papers_metrics_of_a_file(recorded):
    path, entries = recorded
    problems = read_results(path, "--results")
    for model, n in {"serial": 1, "omp": 32, "omp 64": 64, "mpi": 512, "mpi+omp": 256, "cuda": 1}.items():
        own = [one for one in problems if one.model == model.split()[0]]
        theirs = [entry for entry in entries if entry["parallelism_model"] == model.split()[0]]
        for k in (1, 2, 6):
            found = measure(own, k, n)
            wanted = [by_subsets(entry["outputs"], k, n) for entry in theirs]
            for at, name in enumerate(("build", "pass", "speedup")):
                assert found[name] == pytest.approx(fmean(one[at] for one in wanted), rel=1e-12)
            if model == "cuda":
                assert found["efficiency"] is None
            else:
                assert found["efficiency"] == pytest.approx(found["speedup"] / n)


def by_subsets(outputs, k, n):
    """build@k, pass@k and speedup_n@k of a problem, from all subsets of k of its outputs."""
    sequential = min((o["best_sequential_runtime"] for o in outputs if o["did_build"]), default=0.0)
    facts = []
    for output in outputs:
        right = output["did_build"] and output["is_source_valid"] and all(run["is_valid"] for run in output["runs"])
        at_n = [r for r in output["runs"] or () if r.get("num_procs", 1) * r.get("num_threads", 1) == n]
        facts.append((output["did_build"], right, sequential / at_n[0]["runtime"] if right else 0.0))
    subsets = list(itertools.combinations(facts, k))
    return [fmean(max(fact[at] for fact in subset) for subset in subsets) for at in range(3)]


def test_a_sequential_answer_is_right_by_the_script_alone():
    runs = (TimedRun(True, 1.0, None, 32),)
    problem = [Judged("p", "sort", "omp", (Sample(True, runs, 4.0, False), Sample(True, runs, 4.0)))]
    paper, code = measure(problem, 1, 32), measure(problem, 1, 32, "as-code")
    assert (paper["build"], paper["pass"], paper["speedup"]) == (1.0, 0.5, 2.0)
    assert (code["build"], code["pass"], code["speedup"]) == (1.0, 1.0, 4.0)
    outputs = [{"did_build": True, "are_all_valid": True, "is_source_valid": valid} for valid in (True, False)]
    assert ends([{"outputs": outputs}]) == {"right": 1, "right, but sequential": 1}


def in_shards(entries):
    """The entries, each as two with a part of the outputs, one behind all the others."""
    return [entry | {"outputs": entry["outputs"][part]} for part in (slice(2), slice(2, None)) for entry in entries]


def test_entries_of_a_problem_are_one_problem(recorded, tmp_path, capsys):
    path, entries = recorded
    (tmp_path / "shards.json").write_text(json.dumps(in_shards(entries)))
    reports = []
    for file in (path, tmp_path / "shards.json"):
        reports.append(answer(capsys, "evaluate", "--results", str(file), "--k", "1", "6"))
    assert reports[0] == reports[1]
    assert samples_of(in_shards(entries)) == samples_of(entries)
    assert set(samples_of(entries).values()) == {6}


def test_problems_that_were_not_judged_are_counted(recorded, tmp_path, capsys):
    _, entries = recorded
    left_out = entries[0] | {"outputs": ["}"]}
    (tmp_path / "part.json").write_text(json.dumps([left_out, left_out, *entries[1:]]))
    assert main(["evaluate", "--results", str(tmp_path / "part.json")]) == 0
    assert capsys.readouterr().err.endswith("part.json: not judged, and left out: 1 of 24 problems\n")


def restated(entries, k):
    """ParEval's analysis/metrics.py (commit 4c9877f) without pandas: its four columns by model and type."""
    from math import comb

    choose = lambda n, r: 1 if n < r else comb(n, r)  # noqa: E731
    product = lambda n, c: 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))  # noqa: E731
    select = {"kokkos": (None, 32), "omp": (None, 32), "mpi": (512, None), "mpi+omp": (4, 64)}
    resources = {"serial": 1, "kokkos": 32, "omp": 8, "mpi": 512, "mpi+omp": 256, "cuda": 1}
    found = {}
    problems = {}
    for entry in entries:
        problems.setdefault((entry["name"], entry["parallelism_model"], entry["problem_type"]), []).append(entry)
    for (_, model, kind), own in problems.items():
        rows = [(at, o, run) for entry in own for at, o in enumerate(entry["outputs"]) for run in (o["runs"] or [{}])]
        rows = [row for row in rows if not (model == "kokkos" and row[2].get("num_threads") == 64)]
        build = product(len(rows), sum(o["did_build"] for _, o, _ in rows))
        good = [all(run.get("is_valid") for i, _, run in rows if i == at) for at in {at for at, _, _ in rows}]
        procs, threads = select.get(model, (None, None))
        rows = [r for r in rows if r[2].get("is_valid") and procs in (None, r[2].get("num_procs"))]
        rows = [r for r in rows if threads in (None, r[2].get("num_threads"))]
        speed = None
        if rows:
            base, times = (
                min(o["best_sequential_runtime"] for _, o, _ in rows),
                sorted(r["runtime"] for _, _, r in rows),
            )
            n = len(times)
            speed = sum(choose(j - 1, k - 1) * base / (choose(n, k) * max(times[j - 1], 1e-8)) for j in range(1, n + 1))
        group = found.setdefault((model, kind), ([], [], []))
        for column, value in zip(group, (build, product(len(good), sum(good)), speed), strict=True):
            column.extend([] if value is None else [value])
    means = {key: [np.mean(column) if column else 0.0 for column in columns] for key, columns in found.items()}
    return {key: (*values, values[2] / resources[key[0]]) for key, values in means.items()}


@pytest.mark.parametrize(("k", "shards"), [(1, False), (3, False), (5, False), (3, True)])
def test_as_code_is_the_published_script(recorded, tmp_path, capsys, k, shards):
    path, entries = recorded
    if shards:
        path, entries = tmp_path / "shards.json", in_shards(entries)
        path.write_text(json.dumps(entries))
    found = answer(capsys, "evaluate", "--results", str(path), "--metrics", "as-code", "--k", str(k))
    assert found["metrics"] == "as-code"
    wanted = restated(entries, k)
    assert len(wanted) == 12
    for (model, kind), values in wanted.items():
        own = found["models"][model]["types"][kind][str(k)]
        names = ("build", "pass", "speedup", "efficiency")[: 3 if model == "cuda" else 4]
        assert [own[name] for name in names] == pytest.approx(list(values[: len(names)]), rel=1e-12)
    assert found["models"]["cuda"]["types"]["sort"][str(k)]["efficiency"] is None


def test_the_two_definitions_differ_where_the_script_is_at_fault():
    runs = [TimedRun(True, seconds, None, threads) for seconds, threads in ((4.0, 1), (1.0, 32))]
    fast, slow = Sample(True, tuple(runs), 4.0), Sample(True, (runs[0], runs[1]._replace(seconds=2.0)), 4.0)
    failed = Sample(False)
    problem = [Judged("p", "sort", "omp", (fast, slow, failed))]
    paper, code = measure(problem, 2, 32), measure(problem, 2, 32, "as-code")
    assert paper["speedup"] == pytest.approx((4 + 4 + 2) / 3)  # pairs with the fast one, and the other pair
    assert code["speedup"] == pytest.approx(4 * 1 + 2 * 1)  # weights that add up to 2 of the two that did not fail
    assert (paper["efficiency"], code["efficiency"]) == (paper["speedup"] / 32, code["speedup"] / 8)
    assert (paper["build"], code["build"]) == (1.0, 1.0)
    assert measure(problem, 1, 32)["build"] == pytest.approx(2 / 3)
    assert measure(problem, 1, 32, "as-code")["build"] == pytest.approx(4 / 5)  # once for each run


def test_tables_name_the_definition_and_every_figure(recorded, capsys):
    path, _ = recorded
    assert main(["evaluate", "--results", str(path), "--k", "2", "1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "metrics: paper"
    assert out[2].split() == ["model", "problems", "n", "k", "build@k", "pass@k", "speedup@k", "efficiency@k"]
    rows = [line.split() for line in out[3:15]]
    assert [row[:4] for row in rows if row[0] == "omp"] == [["omp", "4", "32", "1"], ["omp", "4", "32", "2"]]
    assert {row[0]: row[2] for row in rows} == {
        "cuda": "1",
        "kokkos": "32",
        "mpi": "512",
        "mpi+omp": "256",
        "omp": "32",
        "serial": "1",
    }
    assert [row[-1] for row in rows if row[0] == "cuda"] == ["-", "-"]
    assert main(["evaluate", "--results", str(path), "--metrics", "as-code"]) == 0
    assert capsys.readouterr().out.startswith("metrics: as-code, the published script's, faults included\n")
