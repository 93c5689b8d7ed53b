"""Names on the Hub: what a command makes of one is what it makes of the files; and what the Hub refuses is one line."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pretrained
import pytest
from hub_server import TOKEN, Hub, files_of, serving, session
from instruction_data import rows
from safetensors.numpy import save_file

from axonn_jax.files.adapters.peft import CONFIG, TENSORS

SHORT = ["--train.global_batch", "4", "--train.microbatches", "2", "--train.eval_batches", "1", "--train.steps", "1"]
CARD = b"""---
configs:
- config_name: small
  data_files:
  - {split: train, path: "small/**/part-*.jsonl"}
  - {split: held, path: [held.jsonl]}
- config_name: large
  default: true
  data_files: data/large.jsonl
---
"""


def lines(*texts):
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def adapter(folder, base):
    """PEFT's files of an adapter of the model, which name its base."""
    sides = {"lora_A": np.ones((2, 48), np.float32), "lora_B": np.ones((48, 2), np.float32)}
    names = [f"base_model.model.model.layers.{n}.self_attn.q_proj.{side}" for n in (0, 1) for side in sides]
    folder.mkdir()
    save_file({f"{name}.weight": sides[name[-6:]] for name in names}, folder / TENSORS)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": base}))
    return folder


def content(folder):
    """All files of a directory; of a manifest what does not say where the text came from."""
    files = files_of(folder)
    if "manifest.json" in files:
        kept = {key: value for key, value in json.loads(files["manifest.json"]).items() if key != "options"}
        files["manifest.json"] = json.dumps(kept).encode()
    return files


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A hub with a model, closed ones and data sets; and what commands of one process say to it."""
    root = pretrained.converted(tmp_path_factory.mktemp("hub"))
    hub, words = Hub(), [f"the token {n} of the mesh and the shard\n" * 20 for n in range(60)]
    model = files_of(root / "hf")
    others = {"README.md": b"", "pytorch_model.bin": b"pickle", "consolidated.safetensors": b"", ".gitattributes": b""}
    old = hub.commit("org/llama", {"config.json": b"{}"} | others, branch="v0")
    new = hub.commit("org/llama", model | others)
    hub.commit("org/gated", model)
    hub.commit("org/private", model)
    hub.closed |= {"org/gated": "gated", "org/private": "private"}
    parts = {f"data/train-0000{n}-of-00002.jsonl": lines(*words[n::2]) for n in range(2)}
    text = hub.commit("org/text", parts | {"data/test.jsonl": lines("?"), ".gitattributes": b""}, "dataset")
    cards = {"small/a/part-0.jsonl": parts[min(parts)], "held.jsonl": lines(*words[:9]), "data/large.jsonl": lines("c")}
    hub.commit("org/cards", cards | {"README.md": CARD, "more/held.jsonl": lines("no")}, "dataset")
    (root / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(20)))
    hub.commit("org/chat", {"train.jsonl": (root / "chat.jsonl").read_bytes(), "test.jsonl": b"{}"}, "dataset")
    (root / "local").mkdir()
    for name, raw in parts.items():
        (root / "local" / Path(name).name).write_bytes(raw)
    tokenizer = ["--tokenizer", root / "hf"]
    adapters = [adapter(root / f"adapter {n}", base) for n, base in enumerate(("org/llama", "org/none"))]
    suite = {"problem_type": "x", "language": "cpp", "name": "x", "parallelism_model": "serial", "prompt": "the "}
    (root / "suite.json").write_text(json.dumps([suite]))
    generate = ["--prompt", "the ", "--tokens", "5", "--temperature", "0", "--json"]
    evaluate = ["--suite", root / "suite.json", "--tokens", "3", "--samples", "1", "--out"]
    train = ["train", root / "base" / "config.toml", "--data.path", root / "data", *SHORT, "--model.seq_len", "16"]
    commands = {
        "merge": ["convert", adapters[1], root / "merged", "--merge", "--base", root / "hf"],
        "merge by name": ["convert", adapters[1], root / "merged by name", "--merge", "--base", "org/llama"],
        "merge by its own name": ["convert", adapters[0], root / "merged by its own", "--merge"],
        "merge with none": ["convert", adapters[0], root / "no", "--merge", "--base", "org/none"],
        "generate": ["generate", root / "hf", *generate],
        "generate by name": ["generate", "org/llama", *generate],
        "generate by none": ["generate", "org/none", *generate],
        "evaluate": ["evaluate", root / "hf", *evaluate, root / "written.json"],
        "evaluate by name": ["evaluate", f"org/llama@{new}", *evaluate, root / "written by name.json"],
        "evaluate without a file": ["evaluate", "org/llama", *evaluate[:-1]],
        "convert": ["convert", "org/llama", root / "named"],
        "convert old": ["convert", "org/llama@v0", root / "no"],
        "prepare": ["prepare", "org/text", root / "text named", "--tokenizer", "org/llama"],
        "prepare locally": ["prepare", root / "local", root / "text local", *tokenizer],
        "prepare files": ["prepare", "org/text", root / "text files", *tokenizer, "--include", "train-*.jsonl"],
        **{
            str(source): ["prepare", source, root / f"rows {n}", "--instructions", "--seq-len", "1024", *tokenizer]
            for n, source in enumerate((root / "chat.jsonl", "org/chat"))
        },
        "prepare config": ["prepare", "org/cards", root / "small", *tokenizer, "--split", "small/train"],
        "prepare held": ["prepare", "org/cards", root / "held", *tokenizer, "--split", "small/held", "--json"],
        **{
            wrong: ["convert", wrong, root / "no"]
            for wrong in ("org/none", "org/gated", "org/private", "org/llama@v9", "nothing", "no/such/path", "or--g/x")
        },
        **{
            f"train {name}": [*train, "--log.dir", root / "no", "--checkpoint.weights", name]
            for name in ("org/none", "org/gated", "no/such/path")
        },
        "no split": ["prepare", "org/text", root / "no", *tokenizer, "--split", "valid"],
        "no such split": ["prepare", "org/cards", root / "no", *tokenizer, "--split", "small/valid"],
        "no such config": ["prepare", "org/cards", root / "no", *tokenizer, "--split", "huge/train"],
        "no data": ["prepare", "org/none", root / "no", *tokenizer],
        "a local split": ["prepare", root / "local", root / "no", *tokenizer, "--split", "train"],
        "push of a base": ["convert", root / "hf", root / "no", "--push", "me/x"],
        "push nowhere": ["convert", root / "base", root / "no", "--push", "x"],
        "push elsewhere": ["convert", root / "base", root / "kept", "--push", "other/x"],
        "push": ["convert", root / "base", root / "out", "--push", "me/tuned", "--json"],
        "push in parts": ["convert", root / "base", root / "parts", "--push", "me/tuned", "--shard-size", "0.0001"],
    }
    with serving(hub) as url:
        said = session(url, root / "home", commands.values(), HF_TOKEN=TOKEN)
        yield SimpleNamespace(
            root=root, hub=hub, url=url, home=root / "home", said=dict(zip(commands, said, strict=True)),
            old=old, new=new, text=text,
        )  # fmt: skip


def refused(there, name):
    status, out, err = there.said[name]
    assert (status, out, err.count("\n")) == (2, "", 1), (out, err)
    return err


def test_a_converted_model_is_that_of_the_directory_and_names_its_commit(there):
    named, base = content(there.root / "named"), content(there.root / "base")
    commit = f"# The weights are org/llama@{there.new} of the Hub.\n\n".encode()
    assert named == base | {"config.toml": commit + base["config.toml"]}


def test_a_base_by_name_is_that_of_the_directory(there):
    assert there.said["merge"][0] == 0, there.said["merge"]
    merged = content(there.root / "merged")
    assert content(there.root / "merged by name") == content(there.root / "merged by its own") == merged
    assert merged["model.safetensors"] != files_of(there.root / "hf")["model.safetensors"]


def test_texts_and_programs_of_a_name_are_those_of_the_directory(there):
    for name in ("generate", "evaluate"):
        assert [there.said[said][0] for said in (name, f"{name} by name")] == [0, 0], there.said[f"{name} by name"]
    assert there.said["generate by name"][1] == there.said["generate"][1] != ""
    assert (there.root / "written by name.json").read_text() == (there.root / "written.json").read_text()


def test_a_branch_is_another_commit_and_no_pickle_is_fetched(there):
    assert "config.model_type = None" in refused(there, "convert old")
    assert f"HEAD /org/llama/resolve/{there.old}/config.json" in there.hub.asked
    fetched = {line.rpartition("/")[2] for line in there.hub.asked if "/resolve/" in line and "/org/llama/" in line}
    assert {"model.safetensors", "tokenizer.json", "config.json"} <= fetched
    assert not {"pytorch_model.bin", "consolidated.safetensors", "README.md"} & fetched


def test_prepared_data_is_that_of_the_files_and_names_its_commit(there):
    want = content(there.root / "text local")
    assert content(there.root / "text named") == content(there.root / "text files") == want
    options = json.loads((there.root / "text named" / "manifest.json").read_text())["options"]
    assert (options["hub"], options["split"]) == (f"org/text@{there.text}", "train")
    options = json.loads((there.root / "text files" / "manifest.json").read_text())["options"]
    assert (options["hub"], options["include"]) == (f"org/text@{there.text}", ["train-*.jsonl"])
    assert not any("test.jsonl" in line for line in there.hub.asked)


def test_prepared_conversations_are_those_of_the_file(there):
    assert there.said["org/chat"][0] == 0, there.said["org/chat"]
    assert content(there.root / "rows 0") == content(there.root / "rows 1")


def test_a_card_says_which_files_a_split_has(there):
    assert there.said["prepare config"][0] == 0, there.said["prepare config"]
    told = json.loads(there.said["prepare held"][1])
    assert sum(split["documents"] for split in told["splits"].values()) == 9
    assert not any("more/held.jsonl" in line for line in there.hub.asked)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/none", "or a model on the Hub; {url} has none of this name, or a private one: `hf auth login`"),
        ("org/private", "{url} has none of this name, or a private one: `hf auth login`"),
        ("org/gated", "it is gated: ask for access on {url}/org/gated, then `hf auth login`"),
        ("org/llama@v9", "it has no revision 'v9'"),
        ("nothing", "SOURCE = 'nothing': an existing directory of a Hugging Face model or of a run\n"),
        ("no/such/path", "SOURCE = 'no/such/path': an existing directory of a Hugging Face model or of a run\n"),
        ("or--g/x", "SOURCE = 'or--g/x': an existing directory of a Hugging Face model or of a run\n"),
        (
            "train org/none",
            "checkpoint.weights = 'org/none': the directory of a checkpoint (step_N) or ",
        ),
        ("train org/none", "or a pretrained directory, or a model on the Hub; {url} has none of this name"),
        ("train org/gated", "it is gated: ask for access on {url}/org/gated, then `hf auth login`"),
        ("train no/such/path", "(step_N) or of a run, or a pretrained directory\n"),
        (
            "merge with none",
            "--base = 'org/none': the directory of the adapters' base, or a model on the Hub; {url} has",
        ),
        (
            "generate by none",
            "RUN_DIR = 'org/none': an existing directory left by `axonn-jax train` or `convert`, or",
        ),
        ("evaluate without a file", "--out = (not given): a file: 'org/llama' is no directory, but a name on the Hub"),
        ("no split", "--split = 'valid': a split with tables or JSON Lines; --include names other files"),
        ("no such split", "--split = 'small/valid': one of train, held"),
        ("no such config", "--split = 'huge/train': CONFIG/train, with CONFIG one of small, large"),
        ("no data", "or a data set on the Hub; {url} has none of this name"),
        ("a local split", "--split = 'train': left out: SOURCE is no name on the Hub"),
        ("push of a base", "--push = 'me/x': left out where DEST is a directory to train from"),
        ("push nowhere", "--push = 'x': the name of a model on the Hub, as org/name"),
        ("push elsewhere", "'{root}/kept' is complete, for `hf upload`; {url} fails: "),
    ],
)
def test_what_the_hub_refuses_is_one_line(name, says, there):
    assert says.format(url=there.url, root=there.root) in refused(there, name)
    assert not (there.root / "no").exists()


def test_an_upload_is_the_directory_and_an_earlier_one_leaves_no_weights(there):
    assert there.said["push"][0] == 0, there.said["push"]
    made = json.loads(there.said["push"][1])["pushed"].removeprefix("me/tuned@")
    assert there.hub.commits["model", "me/tuned"][made] == files_of(there.root / "out") | {".gitattributes": b""}
    assert there.said["push in parts"][0] == 0, there.said["push in parts"]
    assert there.hub.files("me/tuned") == files_of(there.root / "parts") | {".gitattributes": b""}
    assert len(list((there.root / "parts").glob("*.safetensors"))) > 1
    (visible,) = {"visibility", "private"} & there.hub.created[-1].keys()  # by the library's version
    assert there.hub.created[-1][visible] in ("private", True)


def test_without_the_hub_the_cache_answers(there, tmp_path):
    """Also where blobs are in a place that all of the cache shares, as huggingface_hub with Xet has them."""
    home = shutil.copytree(there.home, tmp_path / "home", symlinks=True)
    for blob in [path for path in (home / "hub").glob("*/blobs/*") if path.stat().st_size > 100]:
        shared = home / "hub" / "blobs" / blob.name[:2] / blob.name
        shared.parent.mkdir(parents=True, exist_ok=True)
        blob.rename(shared)
        blob.symlink_to(os.path.relpath(shared, blob.parent))
    before, out = len(there.hub.asked), tmp_path / "out"
    commands = [
        ["convert", "org/llama", out / "model"],
        ["prepare", "org/text", out / "text", "--tokenizer", "org/llama"],
        ["convert", "org/llama@v8", out / "no"],
        ["prepare", "org/text", out / "no", "--tokenizer", "org/llama", "--split", "test"],
        ["convert", there.root / "base", out / "no", "--push", "me/tuned"],
    ]
    said = session(there.url, home, commands, HF_HUB_OFFLINE="1", HF_TOKEN=TOKEN)
    assert [status for status, _, _ in said] == [0, 0, 2, 2, 2], said
    assert len(there.hub.asked) == before
    assert content(out / "model") == content(there.root / "named")
    assert content(out / "text") == content(there.root / "text named")
    for status, _, err in said[2:]:
        assert "HF_HUB_OFFLINE is set" in err
        assert err.count("\n") == 1, (status, err)
    assert {path.name for path in out.iterdir()} == {"model", "text"}


def test_a_hub_that_does_not_answer_is_one_line(there, tmp_path):
    with serving(Hub()) as url:
        pass
    out = tmp_path / "out"
    commands = [["convert", "org/llama", out], ["prepare", "org/text", out, "--vocab", "300"]]
    commands += [["convert", there.root / "base", out, "--push", "me/x"]]
    for status, _, err in session(url, tmp_path / "home", commands):
        assert (status, err.count("\n")) == (2, 1), err
    assert not out.exists()
    ((status, _, _),) = session(url, there.home, commands[:1])  # what was fetched before is there
    assert status == 0


def test_a_run_begins_from_a_name_and_keeps_its_commit(there, tmp_path):
    """Its configuration says which; a later commit of the branch does not change a run that goes on."""
    argv = ["train", there.root / "base" / "config.toml", "--data.path", there.root / "data", *SHORT]
    argv += ["--model.seq_len", "16", "--checkpoint.weights", "org/llama", "--log.dir", tmp_path / "run"]
    ((status, _, err),) = session(there.url, there.home, [argv])
    assert status == 0, err
    assert f"parameters from org/llama@{there.new}; optimizer and data start anew" in err
    pinned = f'weights = "org/llama@{there.new}"'
    assert pinned in (tmp_path / "run" / "config.toml").read_text()
    ((status, _, err),) = session(there.url, tmp_path / "empty", [[*argv, "--train.steps", "2"]])
    assert status == 0, err
    assert pinned in (tmp_path / "run" / "config.toml").read_text()
