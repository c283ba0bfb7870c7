"""One JSON per experiment and seed, and the differences that are computed over several of them.

A test question's top-1 is kept as one character, in the order of `questions.json`, so that any two
experiments can be compared row by row later. An interval resamples groups of questions and training
seeds: the same setting trained once more is another model.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from qinglan.evaluation.figures import scores_of
from qinglan.evaluation.models import Report
from qinglan.recipes import Recipe, get_recipe
from qinglan.rows import ArmRow, Row, groups_of
from qinglan.runs.artifacts import MANIFEST, StageResult, hash_of, read_jsonl, write_json
from qinglan.runs.run import RUN_FILE
from qinglan.training.engines.progress import read_metrics
from qinglan.training.engines.verl import STEP_METRICS

from .matrix import EXPERIMENTS, Settings

QUESTIONS = "questions.json"
_MARKS = {1.0: "1", 0.0: "0", None: "-"}
_VALUES = {"1": 1.0, "0": 0.0, "-": np.nan}
_RESAMPLES = 10_000
Floats = NDArray[np.float64]


class Point(BaseModel, frozen=True, extra="forbid"):
    """A training step."""

    samples: int
    """Samples up to its end."""
    seconds: float
    """Seconds up to its end, without start-up, validation and saving."""
    reward: float
    """Mean reward of its samples."""


class Result(BaseModel, frozen=True, extra="forbid"):
    """The result of one experiment with one seed."""

    experiment: str
    seed: int
    settings: tuple[str, ...]
    run_id: str
    sources: str
    """Digest of Qinglan's code."""
    versions: dict[str, str]
    cores: int
    wall_s: float
    """Seconds of the whole command, in which earlier stages may have been reused."""
    rl_s: float
    """Seconds of the RL stage, or of the rival's process: from its start to the saved model."""
    own_ledger: bool = False
    """The run began with an empty ledger: no earlier one had asked the judge and the RAG for it."""
    questions: str
    """Digest of the test questions."""
    top1: dict[str, str]
    """Marks of each arm: a character per question, 1, 0, or - where there is no value."""
    quality: dict[str, float | None]
    """The judge's mean score of each arm."""
    summary: dict[str, Any]
    """Figures of the training: first and last values, steps, the dev split's value."""
    alarms: list[str] = []
    """The alarms that were raised, as `name @ step`."""
    curve: list[Point] = []


Results = dict[str, dict[int, Result]]
"""The results by experiment and seed."""


class Site:
    """The folder of the results.

    Args:
        extra: settings that a trial overrides beside the matrix.
    """

    def __init__(self, folder: Path, extra: Settings = ()) -> None:
        self.folder = folder
        self.extra = extra

    def path(self, experiment: str, seed: int) -> Path:
        """The file of a result."""
        return self.folder / f"{experiment}-{seed}.json"

    def save(self, result: Result, groups: Mapping[str, str]) -> None:
        """Keep a result, and the questions that it was measured on."""
        # In the order of the marks, which are kept without the questions' names.
        write_json(self.folder / QUESTIONS, dict(sorted(groups.items())))
        write_json(self.path(result.experiment, result.seed), result.model_dump(mode="json"))

    def groups(self) -> dict[str, str]:
        """Test question → group, in the order of the marks; empty before anything was measured."""
        path = self.folder / QUESTIONS
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def load(self) -> Results:
        """The results of the matrix as it is, on the present questions.

        Other results can't be compared with them.
        """
        results: Results = {}
        for result, objection in self._read():
            if not objection:
                results.setdefault(result.experiment, {})[result.seed] = result
        return results

    def left_out(self) -> list[str]:
        """The results that `load` leaves out, each with the reason."""
        return [
            f"{result.experiment}-{result.seed}: {objection}"
            for result, objection in self._read()
            if objection
        ]

    def _read(self) -> list[tuple[Result, str]]:
        """Every result with the reason why it doesn't count; empty where it counts."""
        questions = hash_of(self.groups())
        results = [
            Result.model_validate_json(path.read_text(encoding="utf-8"))
            for path in sorted(self.folder.glob("*-[0-9]*.json"))
        ]
        results.sort(key=lambda result: result.seed)
        return [(result, self._objection(result, questions)) for result in results]

    def _objection(self, result: Result, questions: str) -> str:
        experiment = EXPERIMENTS.get(result.experiment)
        if experiment is None:
            return "no such experiment"
        if result.settings != (*experiment.settings, *self.extra):
            return "other settings"
        return "" if result.questions == questions else "other test questions"


def result_of_run(directory: Path, **fields: Any) -> tuple[Result, dict[str, str]]:
    """The result of a finished pipeline run, and the test questions' groups.

    Args:
        fields: those of the result that the run can't tell.
    """
    report = Report.read(directory / "report.json")
    rl = stage_of(directory, "rl")
    evaluation = stage_of(directory, "evaluate")
    rows = list(read_jsonl(stage_of(directory, "dataset").path("test"), Row))
    groups = dict(sorted(groups_of(rows).items()))
    recipe = get_recipe(report.recipe)
    arms = {name: list(read_jsonl(evaluation.path(f"arm_{name}"), ArmRow)) for name in report.arms}
    settings = json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))["profile"]["rl"]
    samples_a_step = settings["train_batch_size"] * settings["rollouts_per_prompt"]
    metrics = read_metrics(work_of(directory, "rl"))
    result = Result(
        run_id=report.run_id,
        versions=report.versions,
        cores=os.cpu_count() or 1,
        rl_s=rl.seconds,
        questions=hash_of(groups),
        top1={name: marks(arm, rows, recipe) for name, arm in arms.items()},
        quality={name: arm.mean("quality") for name, arm in report.arms.items()},
        summary=rl.details["summary"],
        alarms=[f"{alarm['name']} @ {alarm['step']}" for alarm in rl.details.get("alarms", [])],
        curve=verl_curve(metrics, samples_a_step),
        **fields,
    )
    return result, groups


def stage_of(directory: Path, name: str) -> StageResult:
    """A finished stage of a run."""
    return StageResult.read(directory / name / MANIFEST)


def work_of(directory: Path, name: str) -> Path:
    """The folder of a stage's files: in the run that did the work, where it was reused."""
    return directory.parent / stage_of(directory, name).run_id / name


def marks(arm: Sequence[ArmRow], rows: Sequence[Row], recipe: Recipe) -> str:
    """An arm's top-1, a character per question."""
    top1 = scores_of(arm, rows, recipe)["top1"]
    ids = sorted(row.id for row in rows)
    return "".join(_MARKS[top1.get(row_id)] for row_id in ids)


def verl_curve(steps: Mapping[int, Mapping[str, float]], samples_a_step: int) -> list[Point]:
    """Samples, seconds and reward by step, from verl's metrics."""
    points: list[Point] = []
    seconds = 0.0
    for metrics in steps.values():
        if STEP_METRICS["reward"] not in metrics:
            continue
        # verl's time of a step has saving in it, but not validation.
        seconds += metrics["timing_s/step"] - metrics.get("timing_s/save_checkpoint", 0.0)
        point = Point(
            samples=samples_a_step * (len(points) + 1),
            seconds=round(seconds, 2),
            reward=metrics[STEP_METRICS["reward"]],
        )
        points.append(point)
    return points


@dataclass(frozen=True)
class Difference:
    """The mean over seeds of one arm − another in top-1."""

    diff: float
    ci95: tuple[float, float] | None
    """None for fewer than two groups. With one seed it is about the questions alone."""
    seeds: tuple[int, ...]
    n: int
    """Questions that have a value in every seed and both arms."""
    groups: int
    left_out: int


def difference(
    ours: Mapping[int, Result],
    arm: str,
    rivals: Mapping[int, Result],
    rival_arm: str,
    groups: Mapping[str, str],
) -> Difference | None:
    """`arm` − `rival_arm` over the seeds that both have; None where there is no such seed."""
    seeds = tuple(sorted(ours.keys() & rivals.keys()))
    if not seeds:
        return None
    differences = []
    for seed in seeds:
        our_marks = ours[seed].top1.get(arm)
        rival_marks = rivals[seed].top1.get(rival_arm)
        if our_marks is None or rival_marks is None:
            return None
        differences.append(_values(our_marks) - _values(rival_marks))
    # Seeds × questions.
    table = np.array(differences)
    has_values = ~np.isnan(table).any(axis=0)
    if not has_values.any():
        return None
    group_names, index = np.unique(np.array([*groups.values()])[has_values], return_inverse=True)
    sums = np.array([np.bincount(index, weights=row) for row in table[:, has_values]])
    n = int(has_values.sum())
    return Difference(
        diff=float(sums.sum()) / len(seeds) / n,
        ci95=_interval(sums, np.bincount(index)),
        seeds=seeds,
        n=n,
        groups=len(group_names),
        left_out=len(groups) - n,
    )


def _values(top1: str) -> Floats:
    return np.array([_VALUES[mark] for mark in top1])


def _interval(sums: Floats, sizes: NDArray[np.intp]) -> tuple[float, float] | None:
    """The bootstrap's 95% interval: seeds and groups are drawn anew, each with replacement.

    Args:
        sums: differences, seeds × groups.
        sizes: questions of each group.
    """
    seeds, groups = sums.shape
    if groups < 2:
        return None
    # A fixed seed: the page must be the same whenever it is made of the same results.
    rng = np.random.default_rng(0)
    drawn_seeds = rng.integers(seeds, size=(_RESAMPLES, seeds))
    drawn_groups = rng.integers(groups, size=(_RESAMPLES, groups))
    totals = np.take_along_axis(sums[drawn_seeds].mean(axis=1), drawn_groups, axis=1).sum(axis=1)
    low, high = np.percentile(totals / sizes[drawn_groups].sum(axis=1), [2.5, 97.5])
    return float(low), float(high)


def mean_top1(result: Result, arm: str) -> float | None:
    """An arm's top-1 over the questions that have a value."""
    known_marks = result.top1.get(arm, "").replace("-", "")
    return known_marks.count("1") / len(known_marks) if known_marks else None
