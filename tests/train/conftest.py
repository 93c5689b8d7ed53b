"""Prepared data that runs in tests share."""

import pytest

from axonn_jax.data.prepare import prepare


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """A small prepared directory of a vocabulary of 300."""
    folder = tmp_path_factory.mktemp("prepared")
    for part in range(4):
        lines = [f"def f{n}(x):\n    return x + {n * n % 97}\n" for n in range(part, 2000, 4)]
        (folder / f"{part}.py").write_text("\n".join(lines))
    prepare(folder, folder / "data", vocab=300, include=["*.py"], holdout=0.3)
    return folder / "data"
