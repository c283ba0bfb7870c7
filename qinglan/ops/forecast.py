"""What a training would make of the questions at hand: rows, steps, hours, and what the test split
could show.

How many rows stay is taken from the profile's newest run with a dataset, else from `targets.rows`;
without either, all of them do. Hours are those of the newest run with enough steps, else of
`trainer.step_s`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from qinglan.config import Profile
from qinglan.errors import ArtifactError, ConfigError
from qinglan.evaluation.models import Report
from qinglan.evaluation.report.verdict import main_comparison
from qinglan.ops.estimate import QuestionCounts
from qinglan.recipes import QUALITY, get_recipe
from qinglan.runs.run import runs_of, stage_of
from qinglan.statistics import POWER_FACTOR, Comparison, between, rows_needed

FEWEST_SFT_STEPS, MOST_PASSES = 50, 20
_TELLING_STEPS = 20
"""With fewer, the engine's start and the export would be most of the time."""
_DIFFERING = 0.2
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
    """What the shares of rows were taken from."""
    sft_steps: int
    rl_steps: int
    rl_passes: float
    """How often RL asks each prompt."""
    gpu_hours: dict[str, float]
    """By stage, where the time of a step is known."""
    detectable_gain: float
    """The smallest gain that four of five test splits of this size would show."""
    detectable_loss: float
    """The same of the judge's score."""


def forecast(profile: Profile, counts: QuestionCounts) -> Forecast:
    """What SFT, RL and evaluation would have to work with."""
    runs = runs_of(profile.paths.runs, profile.name)
    sft_rows, rl_prompts, test_rows, rows_from = _rows(profile, counts, runs)
    planned = profile.scheduled(sft_rows, rl_prompts)
    gpus_of = profile.trainer.gpus_of
    steps = {"sft": planned.sft.steps(sft_rows, gpus_of["sft"]), "rl": planned.rl.total_steps}
    step_s = {
        str(stage): seconds for stage, seconds in profile.trainer.step_s.items()
    } | _measured_step_s(runs)
    return Forecast(
        questions=counts.questions,
        sft_rows=sft_rows,
        rl_prompts=rl_prompts,
        test_rows=test_rows,
        rows_from=rows_from,
        sft_steps=steps["sft"],
        rl_steps=steps["rl"],
        rl_passes=steps["rl"] * profile.rl.train_batch_size / max(1, rl_prompts),
        gpu_hours={
            stage: steps[stage] * gpus_of[stage] * seconds / 3600
            for stage, seconds in step_s.items()
        },
        detectable_gain=_detectable(runs, test_rows, main_comparison, math.sqrt(_DIFFERING)),
        detectable_loss=_detectable(runs, test_rows, _comparison_of_quality, _SCORE_SPREAD),
    )


def find_problems(profile: Profile, found: Forecast) -> Iterator[str]:
    """What can't work as it is set, each with the setting to change."""
    sft, rl, least = profile.sft, profile.rl, profile.gate.min_gain
    gain = profile.targets.gain or profile.gate.smallest_gain
    if found.sft_steps < FEWEST_SFT_STEPS:
        steps = f"SFT would make {found.sft_steps} optimiser steps of {found.sft_rows:,} rows"
        accumulated = f"sft.gradient_accumulation_steps ({sft.gradient_accumulation_steps})"
        hint = f"lower {accumulated} or sft.per_device_train_batch_size, raise sft.num_train_epochs, or add questions"
        yield f"{steps}, fewer than {FEWEST_SFT_STEPS}; {hint}"
    if sft.eval_steps > found.sft_steps:
        yield f"sft.eval_steps ({sft.eval_steps}) is beyond SFT's {found.sft_steps} steps; set it to auto"
    if found.rl_prompts < rl.train_batch_size:
        problem = f"is more than the {found.rl_prompts:,} prompts that RL would have"
        yield f"rl.train_batch_size ({rl.train_batch_size}) {problem}; lower it, or add questions"
    elif found.rl_passes > MOST_PASSES:
        hint = "set rl.total_steps to auto and rl.epochs to 10, or add questions"
        yield f"RL would ask each prompt {found.rl_passes:.0f} times; {hint}"
    intervals = {"rl.test_freq": rl.test_freq, "rl.save_freq": rl.save_freq}
    if beyond := [
        f"{name} ({steps})" for name, steps in intervals.items() if steps > found.rl_steps
    ]:
        yield f"{' and '.join(beyond)} are beyond RL's {found.rl_steps} steps; set them to auto"
    if gain <= least:
        yield f"targets.gain ({gain:g}) is not above gate.min_gain ({least:g}): reaching it releases nothing; raise it"
    elif least + found.detectable_gain > gain:
        needed = rows_needed(found.test_rows, found.detectable_gain, gain - least)
        wanted = "targets.gain" if profile.targets.gain else "gate.smallest_gain"
        gains = f"a gain of {least + found.detectable_gain:.3f}, not of {gain:g} ({wanted})"
        problem = f"unless the gain is larger, the gate would stay undecided; some {needed:,} would show it"
        hint = "add questions, or mark more of them as test in the split column"
        yield f"{found.test_rows:,} test questions can show {gains}: {problem}: {hint}"
    loss, metrics = profile.gate.max_quality_loss, get_recipe(profile.recipe).grader.metrics
    if 0 < loss < found.detectable_loss and any(metric.name == QUALITY for metric in metrics):
        problem = f"a loss of {found.detectable_loss:.2f} in the judge's score, not of {loss:g} (gate.max_quality_loss)"
        needed = rows_needed(found.test_rows, found.detectable_loss, loss)
        why = f"unless the score rises, the gate may stay undecided; some {needed:,} would rule it out"
        yield f"{found.test_rows:,} test questions can rule out {problem}: {why}: add questions, or allow a larger loss"
    if profile.student.name not in profile.prices and profile.student.gpu_hour_usd is None:
        hint = f"set student.gpu_hour_usd, or prices.{profile.student.name}"
        yield f"the student has no price, so that the gate's rule of cost stays undecided; {hint}"


def _rows(
    profile: Profile, counts: QuestionCounts, runs: Sequence[Path]
) -> tuple[int, int, int, str]:
    """For SFT, for RL and to be tested on, and what is known of it."""
    for directory in runs:
        with suppress(
            ConfigError, ArtifactError
        ):  # only a run that made its dataset of a workbook has both
            _, dataset = stage_of(directory, "ingest"), stage_of(directory, "dataset")
            before = {name: max(1, rows) for name, rows in dataset.details["splits"].items()}
            kept = {
                name: dataset.artifacts[name].rows or 0
                for name in ("sft_train", "rl_train", "test")
            }
            sft, tested = (
                kept["sft_train"] / before.get("train", 1),
                kept["test"] / before.get("test", 1),
            )
            # Shares make more or fewer prompts than there are rows.
            rl = sft if profile.dataset.rl_shares else kept["rl_train"] / before.get("train", 1)
            found = (
                round(sft * counts.train),
                round(rl * counts.rl_prompts),
                round(tested * counts.test),
            )
            return *found, f"run {directory.name}"
    middle = {stage: sum(band) / 2 for stage, band in profile.targets.rows.items()}
    valid = middle.get("validate", 1.0)
    learnt = middle.get("dataset", middle.get("select", valid))
    source = "the middle of targets.rows" if middle else "nothing yet: as if all were kept"
    return (
        round(learnt * counts.train),
        round(valid * counts.rl_prompts),
        round(valid * counts.test),
        source,
    )


def _measured_step_s(runs: Sequence[Path]) -> dict[str, float]:
    found: dict[str, float] = {}
    for directory in runs:
        for stage in {"sft", "rl"} - found.keys():
            with suppress(ConfigError, ArtifactError):
                result = stage_of(directory, stage)
                if (steps := result.details["summary"].get("steps", 0)) >= _TELLING_STEPS:
                    found[stage] = result.seconds / steps
    return found


def _detectable(
    runs: Sequence[Path],
    test_rows: int,
    find: Callable[[Report], Comparison | None],
    assumed_spread: float,
) -> float:
    """By the spread that the newest comparison of a challenger found, else by an assumed one."""
    for directory in runs:
        with suppress(ConfigError, ArtifactError, FileNotFoundError):
            evaluated = stage_of(
                directory, "evaluate"
            )  # nightly refreshes have long reports, and compare nothing
            found = find(Report.read(directory / "report.json"))
            if (
                found and found.detectable_diff
            ):  # of all test rows: as many of the next ones will have no label
                return found.detectable_diff * math.sqrt(evaluated.rows_in / max(1, test_rows))
    return POWER_FACTOR * assumed_spread / math.sqrt(max(1, test_rows))


def _comparison_of_quality(report: Report) -> Comparison | None:
    main = main_comparison(report)
    return between(report.comparisons, main.a, main.b).get(QUALITY) if main else None
