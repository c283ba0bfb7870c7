"""The expected course of a training on the questions at hand: rows, steps, hours, certainty.

Shares of rows that stay are those of the profile's newest run with a dataset, else the middles of
`targets.rows`; without either, all rows stay. Hours are those of the newest run with enough steps,
else of `trainer.step_s`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from qinglan.config import Profile
from qinglan.errors import ArtifactError, ConfigError
from qinglan.evaluation.models import Report
from qinglan.evaluation.report.verdict import main_comparison
from qinglan.ops.estimate.counting import QuestionCounts
from qinglan.recipes import QUALITY, get_recipe
from qinglan.runs.artifacts import StageResult
from qinglan.runs.run import runs_of, stage_of
from qinglan.statistics import POWER_FACTOR, Comparison, between, rows_needed

FEWEST_SFT_STEPS = 50
MOST_PASSES = 20
_TELLING_STEPS = 20
"""With fewer, the engine's start and the export would be most of the time."""
_DIFFERING_SHARE = 0.2
"""Share of the questions on which two models' answers are not both right or both wrong, where no
run has shown it."""
_SCORE_SPREAD = 1.0
"""Standard deviation over questions of the difference of two models' scores by the judge, where no
run has shown it."""


class Forecast(BaseModel, frozen=True):
    """The expected course of a training."""

    questions: int
    sft_rows: int
    rl_prompts: int
    test_rows: int
    rows_from: str
    """Source of the shares of rows that stay."""
    sft_steps: int
    rl_steps: int
    rl_passes: float
    """Number of times that RL asks each prompt."""
    gpu_hours: dict[str, float]
    """Hours by stage, where the time of a step is known."""
    detectable_gain: float
    """The smallest gain that four of five test splits of this size would show."""
    detectable_loss: float
    """The smallest loss in the judge's score that they would show."""


class _ExpectedRows(NamedTuple):
    """Numbers of rows that each stage would have."""

    sft: int
    rl_prompts: int
    test: int
    source: str


def forecast(profile: Profile, counts: QuestionCounts) -> Forecast:
    """The rows that SFT, RL and evaluation would have to work with, and what comes of them."""
    runs = runs_of(profile.paths.runs, profile.name)
    rows = _expected_rows(profile, counts, runs)
    planned = profile.scheduled(rows.sft, rows.rl_prompts)
    gpus_of = profile.trainer.gpus_of
    steps = {"sft": planned.sft.steps(rows.sft, gpus_of["sft"]), "rl": planned.rl.total_steps}
    rl_samples = steps["rl"] * profile.rl.train_batch_size
    gpu_hours: dict[str, float] = {}
    for stage, seconds in _step_seconds(profile, runs).items():
        gpu_hours[stage] = steps[stage] * gpus_of[stage] * seconds / 3600
    answer_spread = math.sqrt(_DIFFERING_SHARE)
    return Forecast(
        questions=counts.questions,
        sft_rows=rows.sft,
        rl_prompts=rows.rl_prompts,
        test_rows=rows.test,
        rows_from=rows.source,
        sft_steps=steps["sft"],
        rl_steps=steps["rl"],
        rl_passes=rl_samples / max(1, rows.rl_prompts),
        gpu_hours=gpu_hours,
        detectable_gain=_detectable(runs, rows.test, main_comparison, answer_spread),
        detectable_loss=_detectable(runs, rows.test, _comparison_of_quality, _SCORE_SPREAD),
    )


def find_problems(profile: Profile, expected: Forecast) -> Iterator[str]:
    """Problems that the settings make, each with the setting to change."""
    yield from _problems_of_sft(profile, expected)
    yield from _problems_of_rl(profile, expected)
    yield from _problems_of_gain(profile, expected)
    yield from _problems_of_quality(profile, expected)
    student = profile.student
    if student.name not in profile.prices and student.gpu_hour_usd is None:
        hint = f"set student.gpu_hour_usd, or prices.{student.name}"
        yield f"the student has no price, so that the gate's rule of cost stays undecided; {hint}"


def _problems_of_sft(profile: Profile, expected: Forecast) -> Iterator[str]:
    """Too few steps, or no evaluation within them."""
    sft = profile.sft
    if expected.sft_steps < FEWEST_SFT_STEPS:
        steps = f"SFT would make {expected.sft_steps} optimiser steps of {expected.sft_rows:,} rows"
        accumulated = f"sft.gradient_accumulation_steps ({sft.gradient_accumulation_steps})"
        hint = (
            f"lower {accumulated} or sft.per_device_train_batch_size, "
            "raise sft.num_train_epochs, or add questions"
        )
        yield f"{steps}, fewer than {FEWEST_SFT_STEPS}; {hint}"
    if sft.eval_steps > expected.sft_steps:
        problem = f"is beyond SFT's {expected.sft_steps} steps"
        yield f"sft.eval_steps ({sft.eval_steps}) {problem}; set it to auto"


def _problems_of_rl(profile: Profile, expected: Forecast) -> Iterator[str]:
    """Too few prompts for a batch, too many passes, or no evaluation within the steps."""
    rl = profile.rl
    if expected.rl_prompts < rl.train_batch_size:
        problem = f"is more than the {expected.rl_prompts:,} prompts that RL would have"
        yield f"rl.train_batch_size ({rl.train_batch_size}) {problem}; lower it, or add questions"
    elif expected.rl_passes > MOST_PASSES:
        hint = "set rl.total_steps to auto and rl.epochs to 10, or add questions"
        yield f"RL would ask each prompt {expected.rl_passes:.0f} times; {hint}"
    settings_beyond: list[str] = []
    for name, interval in {"rl.test_freq": rl.test_freq, "rl.save_freq": rl.save_freq}.items():
        if interval > expected.rl_steps:
            settings_beyond.append(f"{name} ({interval})")
    if settings_beyond:
        settings = " and ".join(settings_beyond)
        yield f"{settings} are beyond RL's {expected.rl_steps} steps; set them to auto"


def _problems_of_gain(profile: Profile, expected: Forecast) -> Iterator[str]:
    """A gain that releases nothing, or that the test split is too small to show."""
    min_gain = profile.gate.min_gain
    gain = profile.targets.gain or profile.gate.smallest_gain
    if gain <= min_gain:
        yield (
            f"targets.gain ({gain:g}) is not above gate.min_gain ({min_gain:g}): "
            "reaching it releases nothing; raise it"
        )
        return
    # The gate wants more than `min_gain` with certainty, so that the interval must fit in between.
    shown_gain = min_gain + expected.detectable_gain
    if shown_gain > gain:
        needed_rows = rows_needed(expected.test_rows, expected.detectable_gain, gain - min_gain)
        setting = "targets.gain" if profile.targets.gain else "gate.smallest_gain"
        gains = f"a gain of {shown_gain:.3f}, not of {gain:g} ({setting})"
        problem = (
            "unless the gain is larger, the gate would stay undecided; "
            f"some {needed_rows:,} would show it"
        )
        hint = "add questions, or mark more of them as test in the split column"
        yield f"{expected.test_rows:,} test questions can show {gains}: {problem}: {hint}"


def _problems_of_quality(profile: Profile, expected: Forecast) -> Iterator[str]:
    """A loss in the judge's score that the test split is too small to rule out."""
    max_loss = profile.gate.max_quality_loss
    metrics = get_recipe(profile.recipe).grader.metrics
    is_judged = any(metric.name == QUALITY for metric in metrics)
    if is_judged and 0 < max_loss < expected.detectable_loss:
        losses = (
            f"a loss of {expected.detectable_loss:.2f} in the judge's score, "
            f"not of {max_loss:g} (gate.max_quality_loss)"
        )
        needed_rows = rows_needed(expected.test_rows, expected.detectable_loss, max_loss)
        problem = (
            "unless the score rises, the gate may stay undecided; "
            f"some {needed_rows:,} would rule it out"
        )
        hint = "add questions, or allow a larger loss"
        yield f"{expected.test_rows:,} test questions can rule out {losses}: {problem}: {hint}"


def _expected_rows(profile: Profile, counts: QuestionCounts, runs: Sequence[Path]) -> _ExpectedRows:
    for run in runs:
        # Only a run that made its dataset of a workbook has both stages.
        with suppress(ConfigError, ArtifactError):
            stage_of(run, "ingest")
            return _rows_as_in(run, stage_of(run, "dataset"), profile, counts)
    middles = {str(stage): sum(band) / 2 for stage, band in profile.targets.rows.items()}
    valid_share = middles.get("validate", 1.0)
    learnt_share = middles.get("dataset", middles.get("select", valid_share))
    source = "the middle of targets.rows" if middles else "nothing yet: as if all were kept"
    return _ExpectedRows(
        round(learnt_share * counts.train),
        round(valid_share * counts.rl_prompts),
        round(valid_share * counts.test),
        source,
    )


def _rows_as_in(
    run: Path, dataset: StageResult, profile: Profile, counts: QuestionCounts
) -> _ExpectedRows:
    """The rows that stay if as large a share does as in an earlier run."""
    split_rows: Mapping[str, int] = dataset.details["splits"]
    train_rows = max(1, split_rows.get("train", 1))
    test_rows = max(1, split_rows.get("test", 1))
    sft_share = (dataset.artifacts["sft_train"].rows or 0) / train_rows
    rl_share = (dataset.artifacts["rl_train"].rows or 0) / train_rows
    test_share = (dataset.artifacts["test"].rows or 0) / test_rows
    if profile.dataset.rl_shares:
        # Shares of pools make more or fewer prompts than there are rows.
        rl_share = sft_share
    return _ExpectedRows(
        round(sft_share * counts.train),
        round(rl_share * counts.rl_prompts),
        round(test_share * counts.test),
        f"run {run.name}",
    )


def _step_seconds(profile: Profile, runs: Sequence[Path]) -> dict[str, float]:
    """Seconds of a step by stage, measured in the newest run with enough steps, else as set."""
    seconds_by_stage = {str(stage): seconds for stage, seconds in profile.trainer.step_s.items()}
    for stage in ("sft", "rl"):
        measured = _measured_step_seconds(runs, stage)
        if measured is not None:
            seconds_by_stage[stage] = measured
    return seconds_by_stage


def _measured_step_seconds(runs: Sequence[Path], stage: str) -> float | None:
    for run in runs:
        with suppress(ConfigError, ArtifactError):
            result = stage_of(run, stage)
            steps = result.details["summary"].get("steps", 0)
            if steps >= _TELLING_STEPS:
                return float(result.seconds / steps)
    return None


def _detectable(
    runs: Sequence[Path],
    test_rows: int,
    find: Callable[[Report], Comparison | None],
    assumed_spread: float,
) -> float:
    """The smallest difference that would show, by the newest comparison that a run made.

    `find` takes that comparison from a report. Without one the spread is the assumed one.
    """
    for run in runs:
        with suppress(ConfigError, ArtifactError, FileNotFoundError):
            # Nightly refreshes have long reports, and compare nothing.
            evaluated = stage_of(run, "evaluate")
            comparison = find(Report.read(run / "report.json"))
            if comparison and comparison.detectable_diff:
                # By all test rows, also those without a label: as many of the next ones lack it.
                scale = math.sqrt(evaluated.rows_in / max(1, test_rows))
                return comparison.detectable_diff * scale
    return POWER_FACTOR * assumed_spread / math.sqrt(max(1, test_rows))


def _comparison_of_quality(report: Report) -> Comparison | None:
    """The main comparison's arms by the judge's score."""
    main = main_comparison(report)
    if main is None:
        return None
    return between(report.comparisons, main.a, main.b).get(QUALITY)
