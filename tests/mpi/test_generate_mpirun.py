"""`mpirun axonn-jax generate` prints what one process prints, once; so does `axonn-jax loki`."""

import json
import shutil

import pretrained
import pytest
from launched import AXONN, MPIRUN, UNDER_MPIRUN, finished

pytestmark = UNDER_MPIRUN


@pytest.fixture(scope="module")
def model(prepared, tmp_path_factory):
    config = pretrained.generating("llama") | {"vocab_size": 512}
    path = pretrained.write_model(tmp_path_factory.mktemp("models") / "llama", config, pretrained.weights(config))
    shutil.copyfile(prepared / "tokenizer.json", path / "tokenizer.json")
    return path


def printed(*words, ranks=1):
    under = [] if ranks == 1 else [MPIRUN, "--oversubscribe", "-n", str(ranks)]
    done = finished([*under, *AXONN, *map(str, words)])
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


@pytest.mark.parametrize("axis", ["y", pytest.param("data", marks=pytest.mark.slow)])
def test_two_processes_print_the_texts_of_one_once(axis, model, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("import ", "def main(", "x")))
    words = ["generate", model, "--prompts", prompts, "--tokens", "20", "--json"]
    one, _ = printed(*words)
    two, said = printed(*words, f"--grid.{axis}", "2", ranks=2)
    assert two == one
    assert one.count("\n") == 3
    assert said.count("60 tokens in") == 1


@pytest.mark.slow
def test_two_processes_calibrate_as_one(model, prepared):
    words = ["loki", model, "--data", prepared, "--tokens", "2000", "--seq-len", "32", "--json"]
    one, _ = printed(*words)
    assert printed(*words, "--grid.y", "2", ranks=2)[0] == one
    words = ["generate", model, "--prompt", "import ", "--tokens", "20", "--temperature", "0"]
    full, _ = printed(*words)
    loki = ["--attention", "loki", "--loki.features", "1", "--loki.keys", "1"]
    assert printed(*words, *loki, "--grid.y", "2", ranks=2)[0] == full
