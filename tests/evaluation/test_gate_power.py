"""The simulation of the gate has the noise of real runs, and decides what differs much."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from qinglan.statistics import POWER_FACTOR


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "gate_power.py"
    spec = importlib.util.spec_from_file_location("gate_power", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_simulated_noise_is_that_of_real_runs(bench: ModuleType):
    same = {"rl": 0.8, "teacher": 0.8}
    found = [bench.evaluation(np.random.default_rng(i), bench.TEST_SETS[1], same).comparisons[0] for i in range(5)]
    errors = [(one.detectable_diff or 0) / POWER_FACTOR for one in found]
    assert 0.016 <= float(np.mean(errors)) <= 0.024


def test_the_real_gate_refuses_a_worse_model_and_releases_a_much_better_one(bench: ModuleType):
    small = bench.TestSet(500, 80)
    assert bench.verdicts(small, {"rl": 0.6, "teacher": 0.8}, 5, seed=0) == {"refuse": 5}
    assert bench.verdicts(small, {"rl": 0.99, "teacher": 0.7}, 5, seed=0) == {"promote": 5}
