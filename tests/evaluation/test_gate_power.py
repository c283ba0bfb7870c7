"""The simulation of the gate: fair when nothing differs, decisive when much does, and its tables reach the page."""

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


def test_questions_about_one_document_go_together_and_arms_agree(bench: ModuleType):
    groups = np.arange(20_000) % 2_000
    one, other = bench.right_answers(np.random.default_rng(0), groups, [0.8, 0.8])
    assert np.corrcoef(one, other)[0, 1] > 0.3
    difference = one - other
    within = np.array([difference[groups == group].sum() for group in range(2_000)])
    assert within.var() > 1.5 * 10 * difference.var()


def test_the_simulated_noise_is_that_of_real_runs(bench: ModuleType):
    same = {"rl": 0.8, "teacher": 0.8}
    found = [bench.evaluation(np.random.default_rng(i), bench.TEST_SETS[1], same).comparisons[0] for i in range(5)]
    errors = [(one.detectable_diff or 0) / POWER_FACTOR for one in found]
    assert 0.016 <= float(np.mean(errors)) <= 0.024


def test_the_real_gate_refuses_a_worse_model_and_releases_a_much_better_one(bench: ModuleType):
    small = bench.TestSet(500, 80)
    assert bench.verdicts(small, {"rl": 0.6, "teacher": 0.8}, 5, seed=0) == {"refuse": 5}
    assert bench.verdicts(small, {"rl": 0.99, "teacher": 0.7}, 5, seed=0) == {"promote": 5}


def test_intervals_are_exact(bench: ModuleType):
    low, high = bench.Share(0, 1000).interval
    assert low == 0 and high == pytest.approx(1 - 0.025 ** (1 / 1000))
    assert bench.Share(25, 1000).text == "2.5% [1.6%, 3.7%]"


def test_the_tables_go_between_the_markers(bench: ModuleType, tmp_path: Path):
    page = tmp_path / "gate.md"
    page.write_text(f"before\n{bench.BEGIN}\nold\n{bench.END}\nafter\n", encoding="utf-8")
    bench.write_page("new", page)
    assert page.read_text(encoding="utf-8") == f"before\n{bench.BEGIN}\nnew\n{bench.END}\nafter\n"
    page.write_text("no markers", encoding="utf-8")
    with pytest.raises(SystemExit, match="needs the lines"):
        bench.write_page("new", page)
