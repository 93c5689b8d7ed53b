"""The documentation: its links and pictures, and the site that mkdocs builds of it."""

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import axonn_jax
from axonn_jax import models
from axonn_jax.core.models.presets import preset_names

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = {"config.md"}  # by the site's hook


def test_every_page_that_the_code_names_is_there():
    sources = [path for folder in ("axonn_jax", "scripts") for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = [path.read_text(errors="ignore") for path in sources if path.suffix in ("", ".py", ".toml", ".md")]
    named = {name for text in texts for name in re.findall(r"\bdocs/([\w/]+\.(?:md|png))", text)}
    assert named - {path.name for path in (ROOT / "docs").iterdir()} == set()


def test_pictures_and_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists() or target in GENERATED, (page.name, target)


def test_the_presets_are_listed():
    text = " ".join((ROOT / "docs/train.md").read_text().split())
    listed = re.search(r"Presets: (.*?)\.\s", text)[1]
    assert [name.strip("`") for name in listed.split(", ")] == list(preset_names())


def test_every_public_name_is_on_the_page_of_python():
    shown = set(re.findall(r"^::: axonn_jax\.(\S+)$", (ROOT / "docs/api.md").read_text(), re.M))
    names = {*axonn_jax.__all__, *(f"models.{name}" for name in models.__all__)}
    assert names - shown == {"__version__", "models"}


@pytest.mark.skipif(find_spec("mkdocstrings") is None, reason="needs the extra `docs`; scripts/setup installs it")
def test_the_site_builds_without_a_warning(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    configuration = (tmp_path / "config" / "index.html").read_text()
    assert "<code>global_batch</code>" in configuration
    api = (tmp_path / "api" / "index.html").read_text()
    assert {'id="axonn_jax.Grid.shape"', 'id="axonn_jax.Trainer.step"'} <= set(re.findall(r'id="axonn_jax[\w.]+"', api))


def test_the_ways_through_the_code_lead_over_functions_that_exist():
    text = (ROOT / "docs/architecture.md").read_text()
    ways = [way.split("\n\n")[1] for way in text.split("## Five ways")[1].split("\n**")[1:]]
    assert [len(way.splitlines()) <= 10 for way in ways] == [True] * 5
    for file, name in re.findall(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", "\n".join(ways), re.M):
        scope = ast.parse((ROOT / "axonn_jax" / file).read_text())
        for word in name.split("."):
            inside = [node for node in ast.walk(scope) if getattr(node, "name", None) == word]
            assert inside, (file, name)
            scope = inside[0]
