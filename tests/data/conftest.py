import instruction_data
import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A directory with a tokenizer that has a chat template."""
    return instruction_data.tokenizer(tmp_path_factory.mktemp("instructions") / "tokenizer")
