"""Offloaded state with a budget of device bytes: what fits stays, the rest travels, and no value changes."""

from types import SimpleNamespace

import grids
import jax
import numpy as np
import pytest
from memory_runs import batches, made

from axonn_jax import GridShape, UserError
from axonn_jax.core.memory import host_arrays, offload
from axonn_jax.core.memory.report import counted, lines, room

KEEP = {"precision": "bf16", "offload": "optimizer", "bucket": 1000}
slow = pytest.mark.slow
RUNS = [
    (GridShape(), {}),
    pytest.param(GridShape(data=2, y=2), {"zero": 1, "clip": 0.0}, marks=slow),
    pytest.param(GridShape(data=2, z=2), {"clip": 0.0}, marks=slow),  # reduced beside the update
    (GridShape(pipe=2, data=2), {"zero": 1}),
]


class Moved:
    """Bytes of state that travel, a device, each way."""

    def __init__(self, monkeypatch):
        self.bytes = {"device": 0, "pinned_host": 0}
        move = host_arrays.transferred

        def moved(tree, kind):
            for leaf in jax.tree.leaves(tree):
                self.bytes[kind] += leaf.addressable_shards[0].data.nbytes * (leaf.ndim > 0)
            return move(tree, kind)

        monkeypatch.setattr(host_arrays, "transferred", moved)


def planned_of(trainer):
    return [SimpleNamespace(**report["planned"]) for report in trainer.engine.memory().values()]


def state_of(trainer):
    return {
        name: np.asarray(getattr(leaf, "materialize", lambda leaf=leaf: leaf)())
        for name, leaf in trainer.engine.state().items()
    }


def train(grid, monkeypatch, resident, options):
    trainer = made(grid, **KEEP, **options, resident=resident)
    trainer.step(batches()[0])
    with monkeypatch.context() as patch:
        moved = Moved(patch)
        losses = [float(trainer.step(batch)["loss"]) for batch in batches()[1:]]
    steps = len(losses)
    planned = planned_of(trainer)
    assert moved.bytes["device"] == moved.bytes["pinned_host"] == steps * sum(place.host for place in planned)
    for store in trainer.engine.stores.values():
        counts, place = counted(jax.tree.leaves(store.model), store.mesh.local_devices[0]), store.placement.bytes()
        assert counts == {"host": place.host, "device": place.device - place.gradients}
    state = state_of(trainer)
    trainer.close()
    return losses, state, planned


@pytest.mark.parametrize(("grid", "options"), RUNS, ids=str)
def test_a_budget_changes_the_bytes_that_travel_and_no_bit(grid, options, monkeypatch):
    losses, state, places = train(grid, monkeypatch, "0", options)
    assert all(place.resident == 0 for place in places)
    largest = max(place.host for place in places)
    for share in (0.5, 1.0):
        budget = round(share * largest)
        again, same, kept = train(grid, monkeypatch, f"{budget / 1e6:.6f}MB", options)
        assert losses == again
        assert same.keys() == state.keys()
        for name, value in state.items():
            np.testing.assert_array_equal(same[name], value, err_msg=name)
        for place, all_of_it in zip(kept, places, strict=True):
            fits = min(budget, all_of_it.host)
            assert fits - 12 * 1000 < place.resident <= fits  # a bucket more would not fit
            assert place.host == all_of_it.host - place.resident
            assert place.device == all_of_it.device + place.resident


@pytest.mark.parametrize("pipe", [pytest.param(1, marks=slow), 2])
def test_a_run_goes_on_with_another_budget(pipe, tmp_path):
    def begun(resident):
        return made(GridShape(pipe=pipe), **KEEP, resident=resident)

    first, *others = batches()
    trainer = begun("0.06MB")
    trainer.step(first)
    trainer.save(tmp_path, 1)
    want = [float(trainer.step(batch)["loss"]) for batch in others]
    state = state_of(trainer)
    trainer.close()
    for resident in ("0", "1MB"):
        trainer = begun(resident)
        trainer.load(tmp_path / "step_00000001")
        assert [float(trainer.step(batch)["loss"]) for batch in others] == want
        for name, value in state_of(trainer).items():
            np.testing.assert_array_equal(value, state[name], err_msg=name)
        trainer.close()


@pytest.mark.parametrize("pipe", [1, pytest.param(2, marks=slow)])
def test_auto_is_decided_after_the_first_update(pipe, monkeypatch):
    monkeypatch.setattr(offload, "room", lambda mesh: 60_000)
    trainer = made(GridShape(pipe=pipe), **KEEP)
    assert all(place.resident == 0 for place in planned_of(trainer))
    trainer.step(batches()[0])
    assert all(48_000 < place.resident <= 60_000 for place in planned_of(trainer))
    report = trainer.engine.memory()[0]
    assert f"but {report['planned']['resident'] / 1000:.3g} kB of it on the device" in lines(report)[0]
    with monkeypatch.context() as patch:
        moved = Moved(patch)
        trainer.step(batches()[1])
    assert moved.bytes["device"] == sum(place.host for place in planned_of(trainer))
    trainer.close()


def test_no_room_is_taken_on_cpus():
    assert room(grids.lay(GridShape(data=2)).mesh) == 0


@pytest.mark.parametrize(
    ("options", "value", "accepted"),
    [
        ({"offload": "optimizer", "resident": "much"}, "much", "auto, or an amount such as 28GB or 26GiB"),
        ({"offload": "optimizer", "resident": "-1"}, "-1", "auto, or an amount such as 28GB or 26GiB"),
        (
            {"offload": "optimizer", "resident": "20000"},  # was 20 TB
            "20000",
            "auto, or an amount such as 28GB or 26GiB; a number needs its unit",
        ),
    ],
)
def test_other_budgets_are_refused(options, value, accepted):
    with pytest.raises(UserError) as caught:
        made(GridShape(), **options)
    assert (caught.value.field, caught.value.value, caught.value.accepted) == ("memory.resident", value, accepted)


def test_a_budget_is_no_more_than_a_device_has(monkeypatch):
    """Virtual devices of the CPU have no memory of their own; an accelerator says how much it has."""

    class Device:
        def memory_stats(self):
            return {"bytes_limit": 60_000_000_000}

    made(GridShape(), offload="optimizer", resident="70GB").close()
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    with pytest.raises(UserError, match=r"^memory.resident = '70GB': at most 60GB, which a device has for arrays$"):
        made(GridShape(), offload="optimizer", resident="70GB")
