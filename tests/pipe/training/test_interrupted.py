"""Steps that an exception breaks off, as Ctrl-C does in a notebook: the trainer goes on, or says that it cannot."""

import os
import signal
import threading

import grids
import numpy as np
import optax
import pytest
import trainers
from trainers import ids, losses, make_trainer

from axonn_jax import GridShape, PipelineConfig

STEPS = 3


def made(axes, **pipeline):
    pipeline = PipelineConfig(**pipeline)
    return make_trainer(grids.LLAMA, optax.adam(1e-3), GridShape(**axes), microbatches=4, pipeline=pipeline)


def batch(step):
    return ids(grids.LLAMA.vocab, 8, 9, seed=step)


class Broken(Exception):
    pass


def break_at(rank, task):
    """Lets the `task`th start of a rank's program raise, once."""
    start, count = rank.start, iter(range(task + 1))

    def started(*tasks, train=True):
        if next(count, None) == task:
            raise Broken
        return start(*tasks, train=train)

    rank.start = started


@pytest.mark.parametrize(
    ("place", "policy"),
    [
        (0, "message"),
        (1, "1f1b"),
        pytest.param(0, "1f1b", marks=pytest.mark.slow),
        pytest.param(1, "message", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_was_broken_off_has_not_been(policy, place):
    whole, broken = made({"pipe": 2}, policy=policy), made({"pipe": 2}, policy=policy)
    want = losses(whole, map(batch, range(STEPS)))
    held_out = whole.evaluate([batch(9)])
    got = []
    for step in range(STEPS):
        for task in (0, 1, 3):
            (pipe,) = (
                broken.engine._pipes.values() if broken.engine._pipes else [broken.engine._prepare(batch(step))[0]]
            )
            break_at(pipe.ranks[place], task)
            with pytest.raises(Broken):
                broken.step(batch(step))
            del pipe.ranks[place].start
        break_at(pipe.ranks[place], 2)
        with pytest.raises(Broken):
            broken.evaluate([batch(9)])
        del pipe.ranks[place].start
        got.append(float(broken.step(batch(step))["loss"]))
    np.testing.assert_allclose(got, want, rtol=1e-6)  # what arrives first may change the order of sums
    assert broken.evaluate([batch(9)]) == pytest.approx(held_out, rel=1e-6)
    assert broken.engine._links.status.phase == "between steps"
    whole.close()
    broken.close()


def test_a_step_broken_off_in_its_update_says_that_the_trainer_must_be_made_again():
    trainer = made({"pipe": 2})
    trainer.step(batch(0))

    def stopped(grads, factor, loss):
        raise Broken

    trainer.engine.stores[1].apply = stopped
    with pytest.raises(Broken):
        trainer.step(batch(1))
    with pytest.raises(RuntimeError, match=r"step 2 was interrupted .* create a new Trainer .* load a checkpoint"):
        trainer.step(batch(1))
    trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{}, {"pipe": 2}])
def test_twenty_interrupts_at_random_moments(axes):
    random = np.random.default_rng(0)
    trainer, lost, told = made(axes), 0, ""
    trainer.step(batch(0))
    for _ in range(20):
        timer = threading.Timer(random.uniform(0, 0.3), os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            timer.start()
            while True:
                trainer.step(batch(trainer.engine.steps_done))
        timer.join()
        try:
            trainer.step(batch(trainer.engine.steps_done))
        except RuntimeError as error:
            told = str(error)
            trainer, lost = made(axes), lost + 1
    same = made(axes)
    while same.engine.steps_done < trainer.engine.steps_done:
        same.step(batch(same.engine.steps_done))
    trainers.same(trainer.engine.params, same.engine.params, rtol=1e-4, atol=1e-6)
    assert lost < 10
    assert lost == 0 or "create a new Trainer" in told
    trainer.close()
    same.close()
