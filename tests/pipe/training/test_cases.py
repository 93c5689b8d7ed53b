"""Every two settings of training meet: gradients, curve, bytes and checkpoints of `cases.CASES` are the plain run's."""

import functools
from itertools import combinations

import cases
import grids
import numpy as np
import pytest
from cases import CASES, FURTHER, MORE, SETTINGS, Case

from axonn_jax.core.memory.host_arrays import materialize

STEPS, SAVED = 4, 2
# Sums of another order: as test_parity has them of gradients, and what steps carry on as test_trainer.
GRADIENT_TOLERANCE = grids.GRADIENT_TOLERANCE + 4 * grids.EPS  # of a clipped one, with the norm's roundings
CURVE_TOLERANCE = 2e-6
# A rounding of bf16 is 4e-3 and of fp16 5e-4. Of gradients compared is a parameter's as a whole; not those of experts,
# whose routers choose others where scores are that close.
HALF = {"bf16": (2e-3, 2e-2, 0.2), "fp16": (2e-4, 5e-3, 0.05)}


class Run:
    """What a run of a case told, step by step, and its checkpoint of step 2."""

    def __init__(self, case, folder):
        self.case, self.trainer = case, cases.trainer(case)
        metrics = self._steps(0, 1)
        state = {
            name: np.asarray(value, np.float64) for name, value in materialize(self.trainer.engine.state()).items()
        }
        self.gradients = {name.partition(".trace.")[2]: value for name, value in state.items() if ".trace." in name}
        metrics += self._steps(1, SAVED)
        self.path = self.trainer.save(folder, SAVED)
        self.held_out = self.trainer.evaluate(cases.batches(case.model, 2))
        metrics += self._steps(SAVED, STEPS)
        self.told = {name: [float(m[name]) for m in metrics] for name in metrics[0]}

    def _steps(self, first, last):
        return [self.trainer.step(batch) for batch in cases.batches(self.case.model, last)[first:]]

    def after(self, path):
        """Losses of the steps after a checkpoint."""
        assert self.trainer.load(path) == SAVED
        return [float(metrics["loss"]) for metrics in self._steps(SAVED, STEPS)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run of a model on one device, nothing set."""
    return functools.cache(lambda *of: Run(Case("plain", *of), tmp_path_factory.mktemp("plain")))


# Making a trainer, a pipeline's or an offloaded one above all, compiles dozens of programs: 5 to 15 s a case.
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=str)
def test_any_two_settings_train_as_one_plain_device(case, plain, tmp_path):
    want, got = plain(case.model, case.weights), Run(case, tmp_path)
    loss, norm, gradient = HALF.get(case.precision, (CURVE_TOLERANCE, CURVE_TOLERANCE, None))

    np.testing.assert_allclose(got.told["loss"], want.told["loss"], rtol=loss)
    np.testing.assert_allclose(got.told["grad_norm"], want.told["grad_norm"], rtol=norm)
    assert got.held_out == pytest.approx(want.held_out, rel=loss)
    assert got.told["skipped"] == [0] * STEPS
    assert got.gradients.keys() == want.gradients.keys()
    for name, grad in want.gradients.items():
        error = got.gradients[name] - grad
        if grids.is_load(name):
            assert case.precision != "fp32" or not error.any()
        elif gradient is None:
            assert np.abs(error).max() <= GRADIENT_TOLERANCE * np.abs(grad).max(), name
        elif case.model != "experts":
            assert np.linalg.norm(error) <= gradient * np.linalg.norm(grad), name

    for place in got.trainer.engine.memory().values():
        planned, counted = place["planned"], place["counted_between_steps"]
        assert counted["host"] == planned["host"]
        assert counted["device"] == planned["device"] - planned["gradients"]

    np.testing.assert_allclose(got.after(want.path), want.told["loss"][SAVED:], rtol=loss)
    np.testing.assert_allclose(want.after(got.path), got.told["loss"][SAVED:], rtol=loss)
    got.trainer.close()


@pytest.mark.parametrize(("settings", "among"), [(SETTINGS, CASES), (FURTHER, MORE)], ids=["CASES", "MORE"])
def test_every_two_settings_meet_in_a_case(settings, among):
    missing = {
        (one, a, other, b)
        for one, other in combinations(settings, 2)
        for a in settings[one]
        for b in settings[other]
        if not cases.apart((one, a), (other, b))
        and not any((getattr(case, one), getattr(case, other)) == (a, b) for case in among)
    }
    assert not missing
