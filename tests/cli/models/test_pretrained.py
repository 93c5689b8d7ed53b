"""Pretrained directories on grids: each device gets its part of the same weights and nothing else is read for it."""

from pathlib import Path

import grids
import jax
import numpy as np
import pretrained
import pytest

import axonn_jax as ax
from axonn_jax import GridShape, UserError
from axonn_jax.core.tensor.params import split_module
from axonn_jax.files.huggingface.entries import from_huggingface
from axonn_jax.files.huggingface.reader import Pretrained

GRIDS = [GridShape(), GridShape(z=2, y=2, x=2), GridShape(data=2, z=2, y=2), GridShape(x=2), GridShape(z=4, y=2)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in pretrained.CONFIGS:
        pretrained.directory(root / name, name, files=2)
    return root


@pytest.mark.parametrize("axes", GRIDS, ids=grids.name)
@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_every_shard_has_its_part(name, axes, models):
    model = ax.models.from_pretrained(models / name, grids.lay(axes))
    parts = split_module(model)
    want = from_huggingface(pretrained.weights(pretrained.CONFIGS[name]), model.shape)
    assert parts.params.keys() == want.keys()
    for key, value in parts.params.items():
        assert (value.dtype, value.sharding.spec) == (np.float32, parts.specs[key])
        whole = np.zeros(value.shape, np.float32)  # a vocabulary of 301 is padded, with zeros
        whole[tuple(map(slice, want[key].shape))] = want[key]
        for shard in value.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index], err_msg=key)


@pytest.mark.parametrize("name", pretrained.CONFIGS)
def test_a_process_reads_the_bytes_of_its_shards(name, models):
    """On z=2 y=2 a quarter, and the norms, which are on every device."""
    grid, files = grids.lay(GridShape(z=2, y=2)), Pretrained(models / name, "directory")
    parts = split_module(ax.models.from_pretrained(models / name, grid))
    for device in grid.mesh.devices.flat:
        files.files.bytes_read, needed = 0, 0
        for key, value in parts.params.items():
            index = value.sharding.devices_indices_map(value.shape)[device]
            window = tuple(part.indices(size)[:2] for part, size in zip(index, value.shape, strict=True))
            needed += files.read(key, window, np.dtype(np.float32)).nbytes
        padding = 2 * 3 * 48 * 4  # of table and head, on the last device: it is not read
        assert needed - padding <= files.files.bytes_read <= needed
        assert files.files.bytes_read <= 0.3 * files.files.nbytes


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_read_where_they_are(name, models):
    """On expert=2 y=2 x=2 each device reads its half of the experts, and of those a quarter of the inner features."""
    model = ax.models.from_pretrained(models / name, grids.lay(GridShape(expert=2, y=2, x=2)))
    parts, files = split_module(model), Pretrained(models / name, "directory")
    want = from_huggingface(pretrained.weights(pretrained.CONFIGS[name]), model.shape)
    for key, value in parts.params.items():
        if "mlp" not in key or "norm" in key:
            continue
        for shard in value.addressable_shards:
            files.files.bytes_read = 0
            bounds = tuple(part.indices(size)[:2] for part, size in zip(shard.index, value.shape, strict=True))
            files.read(key, bounds, np.dtype(np.float32))
            np.testing.assert_array_equal(np.asarray(shard.data), want[key][shard.index], err_msg=key)
            assert files.files.bytes_read == (0 if key.endswith("bias") else shard.data.nbytes)
            assert ".experts." not in key or 8 * shard.data.nbytes == value.nbytes


def test_what_cannot_be_is_one_line(models, tmp_path):
    with pytest.raises(UserError, match=r"^grid.pipe = 2: 1; in a pipeline, Trainer.load"):
        ax.models.from_pretrained(models / "llama", grids.lay(GridShape(pipe=2)))
    with pytest.raises(UserError, match=r"^model.kv_heads = 2: a multiple of y = 4"):
        ax.models.from_pretrained(models / "llama", grids.lay(GridShape(y=4)))
    with pytest.raises(UserError, match=r"^directory = 'nowhere': a directory with config.json"):
        ax.models.from_pretrained(Path("nowhere"), grids.lay(GridShape()))
    with pytest.raises(UserError, match=r"^directory = None: the path"):
        ax.models.from_pretrained(None, grids.lay(GridShape()))
    with pytest.raises(UserError, match=r"^grid = 'dict': a grid"):
        ax.models.from_pretrained(models / "llama", {"y": 4})
    with pytest.raises(UserError, match=r"^directory = 3: the path"):
        ax.models.shape_of(3)
    state = pretrained.weights(pretrained.CONFIGS["llama3"])
    head = {"lm_head.weight": 2 * state["model.embed_tokens.weight"]}
    pretrained.write_model(tmp_path / "hf", pretrained.CONFIGS["llama3"], state | head)
    with pytest.raises(UserError, match=r"^directory: tie_word_embeddings = True: false: lm_head.weight is not"):
        ax.models.from_pretrained(tmp_path / "hf", grids.lay(GridShape()))


def test_arrays_are_copies_that_a_step_can_use_up(models):
    """One that is memory of numpy's could not be donated."""
    grid = grids.lay(GridShape())
    value = jax.tree.leaves(split_module(ax.models.from_pretrained(models / "gpt2", grid)).params)[0]
    jax.jit(lambda a: a + 1, donate_argnums=0)(value)
    assert value.is_deleted()
