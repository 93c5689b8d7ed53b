"""The suite of twelve problems: reference solutions pass, broken ones do not, and examples in prompts hold."""

import subprocess

import pytest

from axonn_jax.judge.build import FLAGS, compiler
from axonn_jax.judge.judge import judging, threads_of
from axonn_jax.judge.sandbox import Limits
from axonn_jax.judge.suite import MODELS, headers, problems

KINDS = {
    "dense_la", "sparse_la", "fft", "geometry", "graph", "histogram", "reduce", "scan", "search", "sort", "stencil",
    "transform",
}  # fmt: skip
# Each prompt's example, and a body that is wrong on some input: for small ones, for ties, at borders, for no match.
EXAMPLES = {
    "dense_la": (
        "vec y(3, 9); multiplyTransposed({1, 2, 3, 4, 5, 6}, {1, -1}, y, 2, 3); want(y == vec{-3, -3, -3});",
        "for (size_t i = 0; i < M; i += 1) for (size_t j = 0; j < N; j += 1) y[j] += A[i * N + j] * x[i]; }",
    ),
    "sparse_la": (
        "vec y(3, 9); multiplySparse({0, 1, 1, 3}, {1, 0, 2}, {2, 3, 4}, {1, 10, 100}, y);want(y == vec{20, 0, 403});",
        "for (size_t i = 0; i + 1 < rows.size(); i += 1) for (size_t k = rows[i]; k < rows[i + 1]; k += 1)"
        " y[i] = values[k] * x[columns[k]]; }",
    ),
    "fft": (
        "typedef std::complex<double> c; std::vector<c> x{1, 2, 3, 4}, y{10, c(-2, 2), -2, c(-2, -2)}; fft(x);"
        "for (int i = 0; i < 4; i += 1) want(std::abs(x[i] - y[i]) < 1e-12);",
        "std::vector<std::complex<double>> y(x.size()); for (size_t k = 0; k < x.size(); k += 1)"
        " for (size_t j = 0; j < x.size(); j += 1) y[k] += x[j] * std::polar(1.0, 2 * M_PI * j * k / x.size());"
        " if (x.size() < 99) x = y; }",
    ),
    "geometry": (
        "want(widestPair({{0, 0}, {3, 4}, {1, 1}}) == 5); want(widestPair({}) == 0);",
        "double most = 0; for (auto const& p : points) most = std::max(most, std::hypot(p.x, p.y)); return 2 * most; }",
    ),
    "graph": (
        "std::vector<int> hops(4, 9); countHops({0, 1, 3, 4, 4}, {1, 0, 2, 1}, hops);"
        "want(hops == std::vector<int>{0, 1, 2, -1});",
        "for (size_t i = 0; i < hops.size(); i += 1) hops[i] = first[i] == first[i + 1] ? -1 : i; }",
    ),
    "histogram": (
        "std::vector<size_t> bins(4, 9); countBins({0.1, 0.3, 0.9, 0.95, 0.26}, bins);"
        "want(bins == std::vector<size_t>{1, 2, 0, 2});",
        "for (double e : x) bins[size_t(e * bins.size())] += 1; }",
    ),
    "reduce": (
        "want(sumOddSquares({3, 2, -1, 4}) == 10);",
        "long long s = 0; for (int e : x) if (e % 2 == 1) s += e * e; return s; }",
    ),
    "scan": (
        "vec y(4, 9); runningMaxima({2, 1, 5, 3}, y); want(y == vec{2, 2, 5, 5});",
        "for (size_t i = 1; i < x.size(); i += 1) output[i] = std::max(x[i - 1], x[i]); output[0] = x[0]; }",
    ),
    "search": (
        "want(findLast({4, 7, 4, 9}, 4) == 2); want(findLast({4}, 5) == 1);",
        "for (size_t i = 0; i < x.size(); i += 1) if (x[i] == value) return i; return x.size(); }",
    ),
    "sort": (
        "std::vector<int> x{3, -1, 1, -4, 2}; sortByMagnitude(x); want(x == std::vector<int>{-1, 1, 2, 3, -4});",
        "std::sort(x.begin(), x.end()); }",
    ),
    "stencil": (
        "vec y(4, 9); meanOfCross({5, 0, 0, 0}, y, 2); want(y == vec{1, 1, 1, 0});",
        "for (size_t i = 1; i + 1 < N; i += 1) for (size_t j = 1; j + 1 < N; j += 1) output[i * N + j] ="
        " (input[i * N + j] + input[i * N + j - 1] + input[i * N + j + 1] + input[i * N - N + j] +"
        " input[i * N + N + j]) / 5; }",
    ),
    "transform": (
        "vec x{0, 2}; toLogistic(x); want(x[0] == 0.5); want(std::abs(x[1] - 0.880797) < 1e-6);",
        "for (double &v : x) v = v / (1 + std::abs(v)); }",
    ),
}


def test_there_is_a_problem_of_each_of_parevals_types():
    known = problems("mini")
    assert {problem.kind for problem in known} == KINDS == set(EXAMPLES)
    for problem in known:
        serial, omp = map(problem.prompt, MODELS)
        assert problem.name.startswith(problem.kind)
        assert "{model}" not in serial + omp
        assert ("OpenMP" in serial, "Use OpenMP to compute in parallel." in omp) == (False, True)
        for text in (serial, omp):
            assert text.splitlines()[-1].endswith(") {")
        assert "#pragma omp" in problem.reference("omp")


@pytest.mark.parametrize("model", MODELS)
def test_the_examples_of_the_prompts_hold(model, tmp_path):
    for name, text in headers("mini").items():
        (tmp_path / name).write_text(text)
    parts = [f"{one.prompt(model)}\n{one.reference(model)}" for one in problems("mini")]
    calls = [f"{{ {example} }}" for example, _ in EXAMPLES.values()]
    check = (
        "#include <cstdio>\nusing vec = std::vector<double>;\n"
        "#define want(...) if (!(__VA_ARGS__)) { std::puts(#__VA_ARGS__); faults += 1; }"
    )
    main = ["int main() { int faults = 0;", *calls, "return faults; }"]
    (tmp_path / "all.cc").write_text("\n".join(['#include "prelude.hpp"', *parts, check, *main]))
    flags = [flag for flag in FLAGS[model] if flag != "-O3"]
    subprocess.run([*compiler(None), *flags, "all.cc", "-o", "all"], cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "all"], capture_output=True, text=True, env={"OMP_NUM_THREADS": "3"})
    assert (done.returncode, done.stdout) == (0, "")


def check(judge, problem, model):
    """A reference and a broken solution: the judge takes no samples where the reference solution does not pass."""
    done = judge.output(problem, model, problem.prompt(model), EXAMPLES[problem.kind][1])
    assert done["build_error"] == ""
    assert not done["are_any_valid"]
    assert done["runs"][0]["stopped"] == ""
    assert judge._references[problem.name, model] > 0


@pytest.fixture(scope="module")
def judge():
    with judging("mini", compiler(None), Limits(seconds=60, memory=2 << 30)) as made:
        yield made


@pytest.mark.parametrize("model", MODELS)
def test_a_reference_passes_and_a_broken_solution_does_not(judge, model):
    check(judge, next(one for one in problems("mini") if one.kind == "sort"), model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS - {"sort"}))
def test_other_references_pass_and_broken_solutions_do_not(judge, kind):
    for model in MODELS:
        check(judge, next(one for one in problems("mini") if one.kind == kind), model)


def test_runs_of_a_sample_are_as_in_parevals_files(judge):
    (sort,) = (one for one in problems("mini") if one.kind == "sort")
    done = judge.output(sort, "omp", sort.prompt("omp"), sort.reference("omp"))
    assert [run["num_threads"] for run in done["runs"]] == threads_of("omp")
    assert done["are_all_valid"]
    assert done["is_source_valid"]
    assert all(0 < run["runtime"] < 60 for run in done["runs"])
    alone = judge.output(sort, "omp", sort.prompt("omp"), sort.reference("serial"))
    assert (alone["are_all_valid"], alone["is_source_valid"]) == (True, False)


def test_a_program_that_is_not_built_has_no_runs(judge):
    (sort,) = (one for one in problems("mini") if one.kind == "sort")
    for text in ("nothing(x); }", "", "} int main() { return 0; }"):
        done = judge.output(sort, "serial", sort.prompt("serial"), text)
        assert (done["did_build"], done["runs"]) == (False, None)
        assert done["build_error"]
