"""docs/experiments.md, made of the results alone: no number stands in a sentence that isn't computed here."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from qinglan.artifacts import hash_of
from qinglan.formats import duration, number, signed

from .findings import MISSING, alarm_record, findings, shown
from .matrix import COMPARISONS, EXPERIMENTS, RIVALS, TUNED, Comparison
from .results import Result, Results, difference, mean_top1

_HEAD = """# Experiments

Made by `make bench NAME=experiments` from the files in
[benchmarks/results/experiments](../benchmarks/results/experiments); don't edit it. What each line overrides stands in
[matrix.py](../benchmarks/rl_experiments/matrix.py).

The embedded task with its stand-ins for teacher, judge, RAG and a tiny student: the numbers say what these settings do
there, and nothing about your data."""
_READING = """RL, SFT and teacher: top-1 on the test split; RL as the mean over seeds, and each seed. Intervals: 95%,
from a paired bootstrap over gold documents of the mean over seeds. Reward: mean of the first and of the last tenth of
the steps. Dev: the value that the checkpoint was chosen by, which is another one with and without labels. Judge: mean
score of the RL student's test rewrites, 0 to 5. Alarms: see [alarms.md](alarms.md), with the steps at which they
sounded."""
_COLUMNS = {
    **dict.fromkeys(("Experiment", "Seeds"), "---"),
    **dict.fromkeys(("Teacher", "SFT"), "---:"),
    **dict.fromkeys(("RL", "RL − teacher", "RL − SFT", "− first line"), "---"),
    **{"Judge": "---:", "Reward": "---", "Dev": "---:", "Alarms": "---", "Step": "---:", "RL s": "---:"},
}


def document(results: Results, groups: Mapping[str, str]) -> str:
    """The whole page."""
    parts = [_HEAD, *measured_on(results, groups)]
    parts += ["## Which of the plan's choices hold up", *findings(results, groups)]
    parts += ["## The shipped profile, seed by seed", seed_table(results.get("default", {}), groups)]
    parts += ["## How to read the tables", _READING]
    for comparison in COMPARISONS:
        parts += [f"## {comparison.title}", comparison.note, comparison_table(comparison, results, groups)]
    parts += ["## Beside other trainers", *rivals(results, groups)]
    parts += ["## Learning rates", *learning_rates(results)]
    parts += ["## What the alarms were worth", *alarm_record(results, groups)]
    return "\n\n".join(part for part in [*parts, stamp(results)] if part) + "\n"


def stamp(results: Results) -> str:
    """Says of which results the page was made; a test compares it with those that are there."""
    found = [result.model_dump(mode="json") for _, seeds in sorted(results.items()) for result in seeds.values()]
    return f"<!-- made of {len(found)} results, {hash_of(found)[:16]} -->"


def measured_on(results: Results, groups: Mapping[str, str]) -> list[str]:
    """On how many questions, machines and states of the code."""
    found = [result for seeds in results.values() for result in seeds.values()]
    if not found:
        return ["Nothing has been measured yet."]
    cores = " and ".join(map(str, sorted({result.cores for result in found})))
    codes = len({result.sources for result in found})
    versions = ", ".join(f"{name} {version}" for name, version in found[-1].versions.items())
    lines = [
        f"Runs: {len(found)}, on {len(groups):,} test questions about {len(set(groups.values())):,} documents, on "
        f"{cores} cores. {versions}."
    ]
    if codes > 1:
        lines.append(f"The runs are of {codes} states of Qinglan's code: compare lines of different states with care.")
    return lines


def comparison_table(comparison: Comparison, results: Results, groups: Mapping[str, str]) -> str:
    """A line per experiment."""
    first = results.get(comparison.experiments[0], {})
    lines = [_line(name, results.get(name, {}), first, groups) for name in comparison.experiments]
    return "\n".join([_row(_COLUMNS), _row(_COLUMNS.values()), *lines])


def _line(name: str, seeds: Mapping[int, Result], first: Mapping[int, Result], groups: Mapping[str, str]) -> str:
    experiment = EXPERIMENTS[name]
    if not seeds:
        return f"| {experiment.title} | {MISSING} |" + (len(_COLUMNS) - 2) * " |"
    found = list(seeds.values())
    cells = [
        experiment.title,
        seeds_measured(name, seeds),
        _mean([mean_top1(result, "teacher") for result in found]),
        _mean([mean_top1(result, "sft") for result in found]),
        _spread([mean_top1(result, "rl") for result in found]),
        shown(difference(seeds, "rl", seeds, "teacher", groups)),
        shown(difference(seeds, "rl", seeds, "sft", groups)),
        "" if seeds is first else shown(difference(seeds, "rl", first, "rl", groups)),
        _mean([result.quality.get("rl") for result in found], 2),
        f"{_signed_mean(found, 'reward_first')} → {_signed_mean(found, 'reward_last')}",
        _mean([result.summary.get("dev_value") for result in found]),
        alarms(found),
        "/".join(str(result.summary.get("chosen_step", "–")) for result in found),
        _mean([result.rl_s for result in found], 0),
    ]
    return _row(cells)


def seeds_measured(name: str, seeds: Mapping[int, Result]) -> str:
    """Which were run, and which of those that should have been were not."""
    missing = [str(seed) for seed in EXPERIMENTS[name].seeds if seed not in seeds]
    return ", ".join(map(str, seeds)) + (f"; missing: {', '.join(missing)}" if missing else "")


def seed_table(seeds: Mapping[int, Result], groups: Mapping[str, str]) -> str:
    """The shipped profile's runs one by one: the README's table."""
    lines = [
        "| RL seed | test questions | teacher | SFT | RL | RL − teacher [95% CI] | SFT − teacher [95% CI] | RL s |",
        "| ---: | ---: | ---: | ---: | ---: | --- | --- | ---: |",
    ]
    for seed in sorted({*EXPERIMENTS["default"].seeds, *seeds}):
        if seed not in seeds:
            lines.append(f"| {seed} | {MISSING} | | | | | | |")
            continue
        one = {seed: seeds[seed]}
        arms = " | ".join(number(mean_top1(seeds[seed], arm)) for arm in ("teacher", "sft", "rl"))
        gains = " | ".join(shown(difference(one, arm, one, "teacher", groups)) for arm in ("rl", "sft"))
        lines.append(f"| {seed} | {len(groups):,} | {arms} | {gains} | {seeds[seed].rl_s:.0f} |")
    return "\n".join(lines)


def rivals(results: Results, groups: Mapping[str, str]) -> list[str]:
    """verl, TRL and ms-swift on the same prompts with the same reward."""
    text = (
        "GRPO from the same SFT model on the same prompts with the same reward (our scorer, the same RAG and judge), "
        "as many samples a step, a prompt and an update, the same temperature and learning rate schedule, no KL, fp32; "
        "other settings are each library's own. The learning rate of each was chosen among the same candidates on the "
        "dev split. Each saves checkpoints at the same steps, and the best on the dev split is tested, the SFT model "
        "among them. Seconds of training leave out start-up and validation, and verl's also saving; those of the whole "
        "process have them, but for the dev validations of TRL and ms-swift, which run afterwards. The judge's answers "
        "are kept in the ledger, so that later runs wait for fewer of them."
    )
    heads = "| Trainer | Seeds | RL | RL − SFT | − verl | s per step | s of training | s of the whole process |"
    lines = [heads, "| --- | --- | --- | --- | --- | ---: | ---: | ---: |"]
    lines += [_rival_line(name, results, groups) for name in RIVALS]
    return [
        text,
        "\n".join(lines),
        "Reward by samples, with the seconds of training so far:",
        reward_by_samples(results),
    ]


def _rival_line(name: str, results: Results, groups: Mapping[str, str]) -> str:
    title, seeds, verl = _rival_title(name), results.get(name, {}), results.get(RIVALS[0], {})
    found = [result for result in seeds.values() if result.curve]
    if not found:
        return f"| {title} | {MISSING} |" + 6 * " |"
    cells = [
        title,
        seeds_measured(name, seeds),
        _spread([mean_top1(result, "rl") for result in found]),
        shown(difference(seeds, "rl", seeds, "sft", groups)),
        "" if name == RIVALS[0] else shown(difference(seeds, "rl", verl, "rl", groups)),
        _mean([result.curve[-1].seconds / len(result.curve) for result in found], 2),
        _mean([result.curve[-1].seconds for result in found], 0),
        _mean([result.rl_s for result in found], 0),
    ]
    return _row(cells)


def reward_by_samples(results: Results, parts: int = 5) -> str:
    """Mean reward of each fifth of the samples, over seeds, and when it was over."""
    measured = {name: [r for r in results.get(name, {}).values() if r.curve] for name in RIVALS}
    measured = {name: found for name, found in measured.items() if found}
    if not measured:
        return MISSING.capitalize() + "."
    most = max(result.curve[-1].samples for found in measured.values() for result in found)
    lines = ["| Samples | " + " | ".join(map(_rival_title, measured)) + " |", "| ---: |" + " --- |" * len(measured)]
    for part in range(parts):
        low, high = most * part / parts, most * (part + 1) / parts
        cells = [_window(found, low, high) for found in measured.values()]
        lines.append(f"| {low + 1:,.0f} to {high:,.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _window(found: Sequence[Result], low: float, high: float) -> str:
    points = [[point for point in result.curve if low < point.samples <= high] for result in found]
    points = [inside for inside in points if inside]
    if not points:
        return "–"
    rewards = fmean(point.reward for inside in points for point in inside)
    return f"{signed(rewards)} at {duration(fmean(inside[-1].seconds for inside in points))}"


def _rival_title(name: str) -> str:
    return "verl, as Qinglan runs it" if name == RIVALS[0] else EXPERIMENTS[name].title


def learning_rates(results: Results) -> list[str]:
    """The candidates' values on the dev split, and whether the one in use is the best."""
    lines = ["| For | Learning rate | Dev | |", "| --- | ---: | ---: | --- |"]
    for name, (used, candidates) in TUNED.items():
        values = {candidate: _dev_value(results.get(candidate, {})) for candidate in candidates}
        best = max((value for value in values.values() if value is not None), default=None)
        for candidate, value in values.items():
            rate = candidate.rpartition("_")[2]
            notes = ["in use"] * (rate == used) + ["best"] * (value is not None and value == best)
            lines.append(f"| `{name}` | {rate} | {MISSING if value is None else number(value)} | {', '.join(notes)} |")
    return ["Chosen by the dev split alone; the test split is not looked at for it.", "\n".join(lines)]


def _dev_value(seeds: Mapping[int, Result]) -> float | None:
    known = [value for result in seeds.values() if (value := result.summary.get("dev_value")) is not None]
    return fmean(known) if known else None


def alarms(found: Sequence[Result]) -> str:
    """By seed what sounded, and when."""
    told = [f"seed {result.seed}: {', '.join(result.alarms)}" for result in found if result.alarms]
    return "; ".join(told) or "none"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _spread(values: Sequence[float | None]) -> str:
    if len(values) == 1:
        return number(values[0])
    return f"{_mean(values)} ({', '.join(number(value) for value in values)})"


def _mean(values: Sequence[float | None], digits: int = 3) -> str:
    known = [value for value in values if value is not None]
    return number(fmean(known) if known else None, digits)


def _signed_mean(found: Sequence[Result], key: str) -> str:
    known = [value for result in found if (value := result.summary.get(key)) is not None]
    return signed(fmean(known) if known else None)
