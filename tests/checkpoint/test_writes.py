"""Writes of a save that fail together, as Orbax runs them: all have ended when the first one's error is raised."""

import asyncio

import pytest
from orbax.checkpoint._src.serialization.limits import reserved_bytes

from axonn_jax.checkpoint.writes import Writes


async def _array(limiter, ended, name, *, opens, writes):
    await asyncio.sleep(opens)

    async def fragment(seconds):
        async with reserved_bytes(limiter, 1):
            await asyncio.sleep(abs(seconds))
            ended.append(name)
            if seconds < 0:
                raise OSError(f"{name} is full")

    await asyncio.gather(*map(fragment, writes))


@pytest.mark.parametrize(
    "arrays",
    [
        {"a": (0.0, [-0.01]), "b": (0.0, [0.2]), "c": (0.0, [0.05, 0.1])},
        {"a": (0.0, [-0.01, 0.05]), "b": (0.1, [0.2]), "c": (0.2, [-0.1])},  # some open after the failure
        {"b": (0.0, [0.05]), "a": (0.0, [-0.06])},
        {"a": (0.0, [-0.01])},
    ],
    ids=["beside", "opened later", "the last", "alone"],
)
def test_no_task_is_left_when_the_first_error_is_raised(arrays, caplog):
    ended = []

    async def save():
        writes = Writes(len(arrays))
        tasks = [
            asyncio.ensure_future(_array(writes.of_array(), ended, name, opens=opens, writes=each))
            for name, (opens, each) in arrays.items()
        ]
        with pytest.raises(OSError, match="a is full"):
            await asyncio.gather(*tasks)
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and not task.done()]

    assert asyncio.run(save()) == []
    begun = [name for name, (opens, each) in arrays.items() for _ in each if opens == 0.0]
    assert sorted(ended) == sorted(begun)  # what has begun ends, what opens later is not written


def test_writes_that_succeed_do_not_wait():
    ended = []

    async def save():
        writes = Writes(2)
        first = _array(writes.of_array(), ended, "a", opens=0.0, writes=[0.0])
        await asyncio.gather(first, _array(writes.of_array(), ended, "b", opens=0.05, writes=[0.0, 0.05]))

    asyncio.run(save())
    assert ended == ["a", "b", "b"]
