"""One JSON per experiment and seed, and what is computed over several of them.

A test question's top-1 is kept as one character, in the order of `questions.json`, so that any two experiments can be
compared row by row later. Several seeds are averaged per question before groups are resampled: an interval is about
questions like these, and what seeds do to it is shown beside as the values of the single seeds.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from qinglan.artifacts import MANIFEST, StageResult, hash_of, read_jsonl, write_json
from qinglan.engines.verl import STEP_METRICS, read_metrics
from qinglan.evaluation import ArmRow, arm_scores, groups_of
from qinglan.report import Report
from qinglan.rows import Row
from qinglan.runs import RUN_FILE
from qinglan.statistics import ArmScores, Comparison, compare

QUESTIONS = "questions.json"
_MARKS = {1.0: "1", 0.0: "0", None: "-"}
_VALUES = {mark: value for value, mark in _MARKS.items()}


class Point(BaseModel):
    """A training step: samples and seconds so far, start-up and validation left out, and its mean reward."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    samples: int
    seconds: float
    reward: float


class Result(BaseModel):
    """What one experiment found with one seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    experiment: str
    seed: int
    settings: tuple[str, ...]
    run_id: str
    sources: str
    """Digest of Qinglan's code."""
    versions: dict[str, str]
    cores: int
    wall_s: float
    """Of the whole command, in which earlier stages may have been reused."""
    rl_s: float
    """Of the RL stage, or of the rival's process: from its start to the saved model."""
    questions: str
    """Digest of the test questions."""
    top1: dict[str, str]
    """By arm: a character per question, 1, 0, or - where there is no value."""
    quality: dict[str, float | None]
    """By arm: the judge's mean score."""
    summary: dict[str, Any]
    """Of the training: first and last values, steps, the dev split's value."""
    alarms: list[str] = []
    """As `name @ step`."""
    curve: list[Point] = []


Results = dict[str, dict[int, Result]]
"""By experiment and seed."""


class Site:
    """The folder of the results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, experiment: str, seed: int) -> Path:
        """Where a result is kept."""
        return self.folder / f"{experiment}-{seed}.json"

    def save(self, result: Result, groups: Mapping[str, str]) -> None:
        """Keep a result, and the questions that it was measured on."""
        write_json(self.folder / QUESTIONS, dict(sorted(groups.items())))
        write_json(self.path(result.experiment, result.seed), result.model_dump(mode="json"))

    def groups(self) -> dict[str, str]:
        """Test question → group, in the order of the marks; empty before anything was measured."""
        path = self.folder / QUESTIONS
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def load(self) -> Results:
        """All results on the present questions; those on others can't be compared with them."""
        digest, found = hash_of(self.groups()), [self._read(path) for path in sorted(self.folder.glob("*-[0-9]*.json"))]
        results: Results = {}
        for result in sorted(found, key=lambda result: result.seed):
            if result.questions == digest:
                results.setdefault(result.experiment, {})[result.seed] = result
        return results

    def _read(self, path: Path) -> Result:
        return Result.model_validate_json(path.read_text(encoding="utf-8"))


def result_of_run(directory: Path, **known: Any) -> tuple[Result, dict[str, str]]:
    """What a finished pipeline run found, and the test questions' groups; `known`: what the run can't tell."""
    report = Report.read(directory / "report.json")
    rl, evaluated, dataset = (stage_of(directory, name) for name in ("rl", "evaluate", "dataset"))
    rows = list(read_jsonl(dataset.path("test"), Row))
    groups = dict(sorted(groups_of(rows).items()))
    arms = {name: list(read_jsonl(evaluated.path(f"arm_{name}"), ArmRow)) for name in report.arms}
    folder = work_of(directory, "rl")
    settings = json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))["profile"]["rl"]
    samples_a_step = settings["train_batch_size"] * settings["rollouts_per_prompt"]
    result = Result(
        run_id=report.run_id,
        versions=report.versions,
        cores=os.cpu_count() or 1,
        rl_s=rl.seconds,
        questions=hash_of(groups),
        top1={name: marks(name, arm, rows) for name, arm in arms.items()},
        quality={name: arm.quality for name, arm in report.arms.items()},
        summary=rl.details["summary"],
        alarms=[f"{alarm['name']} @ {alarm['step']}" for alarm in rl.details.get("alarms", [])],
        curve=verl_curve(read_metrics(folder), samples_a_step),
        **known,
    )
    return result, groups


def stage_of(directory: Path, name: str) -> StageResult:
    """A finished stage of a run."""
    return StageResult.model_validate_json((directory / name / MANIFEST).read_text(encoding="utf-8"))


def work_of(directory: Path, name: str) -> Path:
    """The folder of a stage's files: in the run that did the work, where it was reused."""
    return directory.parent / stage_of(directory, name).run_id / name


def marks(name: str, arm: Sequence[ArmRow], rows: Sequence[Row]) -> str:
    """An arm's top-1, a character per question."""
    top1 = arm_scores(name, arm, rows).scores["top1"]
    return "".join(_MARKS[top1.get(row)] for row in sorted(row.id for row in rows))


def verl_curve(steps: Mapping[int, Mapping[str, float]], samples_a_step: int) -> list[Point]:
    """Samples, seconds and reward by step, from verl's metrics."""
    points: list[Point] = []
    seconds = 0.0
    for metrics in steps.values():
        if STEP_METRICS["reward"] not in metrics:
            continue
        aside = sum(metrics.get(f"timing_s/{name}", 0.0) for name in ("testing", "save_checkpoint"))
        seconds += metrics["timing_s/step"] - aside
        samples = samples_a_step * (len(points) + 1)
        points.append(Point(samples=samples, seconds=round(seconds, 2), reward=metrics[STEP_METRICS["reward"]]))
    return points


def top1_of(results: Mapping[int, Result], arm: str, seeds: Sequence[int], groups: Mapping[str, str]) -> ArmScores:
    """Per question the mean over seeds; no value where one seed has none."""
    columns = [[_VALUES[mark] for mark in results[seed].top1[arm]] for seed in seeds]
    means: dict[str, float | None] = {}
    for row, values in zip(groups, zip(*columns, strict=True), strict=True):
        present = [value for value in values if value is not None]
        means[row] = sum(present) / len(present) if len(present) == len(values) else None
    return ArmScores(arm=arm, scores={"top1": means})


def difference(
    ours: Mapping[int, Result], arm: str, other: Mapping[int, Result], other_arm: str, groups: Mapping[str, str]
) -> Comparison | None:
    """`arm` − `other_arm` in top-1 over the seeds that both have; None where there is no such seed."""
    seeds = sorted(ours.keys() & other.keys())
    if not seeds or any(arm not in ours[s].top1 or other_arm not in other[s].top1 for s in seeds):
        return None
    left, right = top1_of(ours, arm, seeds, groups), top1_of(other, other_arm, seeds, groups)
    return compare(left, right, "top1", groups)


def mean_top1(result: Result, arm: str) -> float | None:
    """Over the questions that have a value."""
    known = [mark == "1" for mark in result.top1.get(arm, "") if mark != "-"]
    return sum(known) / len(known) if known else None
