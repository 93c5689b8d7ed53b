"""`mpirun axonn-jax generate` prints what one process prints, once; so does `axonn-jax loki`."""

import json
import shutil

import pretrained
import pytest
from launched import AXONN, UNDER_MPIRUN, mpirun, succeeded

from axonn_jax.cli.main import main

pytestmark = UNDER_MPIRUN


@pytest.fixture(scope="module")
def model(prepared, tmp_path_factory):
    config = pretrained.generating("llama") | {"vocab_size": 512}
    path = pretrained.write_model(tmp_path_factory.mktemp("models") / "llama", config, pretrained.weights(config))
    shutil.copyfile(prepared / "tokenizer.json", path / "tokenizer.json")
    return path


def of_two(*words):
    done = succeeded(mpirun(2, *AXONN, *words))
    return done.stdout, done.stderr


@pytest.fixture
def of_one(capsys):
    def printed(*words):
        capsys.readouterr()
        assert main([*map(str, words)]) == 0
        return capsys.readouterr().out

    return printed


@pytest.mark.parametrize("axis", ["y", pytest.param("data", marks=pytest.mark.slow)])
def test_two_processes_print_the_texts_of_one_once(axis, model, of_one, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("import ", "def main(", "x")))
    words = ["generate", model, "--prompts", prompts, "--tokens", "20", "--json"]
    one = of_one(*words)
    two, said = of_two(*words, f"--grid.{axis}", "2")
    assert two == one
    assert one.count("\n") == 3
    assert said.count("60 tokens in") == 1


@pytest.mark.slow
def test_two_processes_calibrate_as_one(model, prepared, of_one):
    words = ["loki", model, "--data", prepared, "--tokens", "2000", "--seq-len", "32", "--json"]
    one = of_one(*words)
    assert of_two(*words, "--grid.y", "2")[0] == one
    words = ["generate", model, "--prompt", "import ", "--tokens", "20", "--temperature", "0"]
    full = of_one(*words)
    loki = ["--attention", "loki", "--loki.features", "1", "--loki.keys", "1"]
    assert of_two(*words, *loki, "--grid.y", "2")[0] == full
