"""The page benchmarks/results/experiments.md, made of the results alone.

No sentence has a number that isn't computed here.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from qinglan.runs.artifacts import hash_of
from qinglan.text import duration, number, signed

from .findings import MISSING, alarm_record, findings, shown
from .matrix import COMPARISONS, EXPERIMENTS, RIVALS, TUNED, Comparison, Tuning
from .results import Result, Results, difference, mean_top1

_HEAD = """# Experiments

Made by `make bench NAME=experiments` from the files in [experiments](experiments); don't edit it.
What each line overrides stands in [matrix.py](../rl_experiments/matrix.py).

The embedded task with simulators for teacher, judge, RAG and a tiny student: the numbers say what
these settings do there, and nothing about your data."""
_READING = """RL, SFT and teacher: top-1 on the test split; RL as the mean over seeds, and each
seed. Intervals: 95%, from a paired bootstrap that resamples gold documents and, where there is more
than one, seeds; with one seed they are about the test questions alone. Reward: mean of the first
and of the last tenth of the steps. Step: the chosen checkpoint's, seed by seed; 0 is the model that
RL started from. Dev: that checkpoint's value on the dev split, another measure with and without
labels. Judge: mean score of the RL student's test rewrites, 0 to 5. Alarms: see
[reward.md](../../docs/reference/reward.md#alarms), with the steps at which they were raised. RL s:
seconds of the whole RL stage, by the clock, whatever else the machine did meanwhile."""
_FAULTS = ("default", "faults")
_TUNING_SEED = 1
_COLUMNS = {
    "Experiment": "---",
    "Seeds": "---",
    "Teacher": "---:",
    "SFT": "---:",
    "RL": "---",
    "RL − teacher": "---",
    "RL − SFT": "---",
    "− first line": "---",
    "Judge": "---:",
    "Reward": "---",
    "Dev": "---:",
    "Alarms": "---",
    "Step": "---:",
    "RL s": "---:",
}
"""The heading of each column, and its alignment."""


def document(results: Results, groups: Mapping[str, str]) -> str:
    """The whole page."""
    parts = [
        _HEAD,
        *measured_on(results, groups),
        "## Which choices hold up",
        *findings(results, groups),
        "## The shipped profile, seed by seed",
        seed_table(results.get("default", {}), groups),
        "## How to read the tables",
        _READING,
    ]
    for comparison in COMPARISONS:
        table = comparison_table(comparison, results, groups)
        parts += [f"## {comparison.title}", comparison.note, table]
    parts += ["## The learning curve with transient faults", *faults(results)]
    parts += ["## Beside other trainers", *rivals(results, groups)]
    parts += ["## Learning rates", *learning_rates(results)]
    parts += ["## What the alarms were worth", *alarm_record(results, groups)]
    parts.append(stamp(results))
    return "\n\n".join(part for part in parts if part) + "\n"


def stamp(results: Results) -> str:
    """Says of which results the page was made; a test compares it with those that are there."""
    records = []
    for _, seeds in sorted(results.items()):
        records.extend(result.model_dump(mode="json") for result in seeds.values())
    return f"<!-- made of {len(records)} results, {hash_of(records)[:16]} -->"


def measured_on(results: Results, groups: Mapping[str, str]) -> list[str]:
    """The numbers of questions, of machines and of states of the code behind the results."""
    runs: list[Result] = []
    for seeds in results.values():
        runs.extend(seeds.values())
    if not runs:
        return ["Nothing has been measured yet."]
    cores = " and ".join(map(str, sorted({result.cores for result in runs})))
    documents = len(set(groups.values()))
    code_states = len({result.sources for result in runs})
    lines = [
        f"Runs: {len(runs)}, on {len(groups):,} test questions about {documents:,} documents, on "
        f"{cores} cores. {_versions(runs)}.",
        _ledgers(len(runs), sum(not result.own_ledger for result in runs)),
    ]
    if code_states > 1:
        lines.append(
            f"The runs are of {code_states} states of Qinglan's code: compare lines of different "
            "states with care."
        )
    return lines


def _ledgers(runs: int, shared: int) -> str:
    text = (
        "What judge and RAG answer is kept in a ledger and not asked for twice. "
        f"{runs - shared} of {runs} runs began with an empty one; in the run that made the stages "
        "before RL it then held the judge's answers about the teacher's rewrites."
    )
    if shared:
        text += (
            f" {shared} shared one: they may have waited for less, and the answers are the same."
        )
    return text


def _versions(runs: Iterable[Result]) -> str:
    versions: dict[str, set[str]] = {}
    for result in runs:
        for package, version in result.versions.items():
            versions.setdefault(package, set()).add(version)
    packages = [
        f"{package} {' and '.join(sorted(numbers))}" for package, numbers in versions.items()
    ]
    return ", ".join(packages)


def comparison_table(comparison: Comparison, results: Results, groups: Mapping[str, str]) -> str:
    """A line per experiment."""
    first = results.get(comparison.experiments[0], {})
    lines = [_line(name, results.get(name, {}), first, groups) for name in comparison.experiments]
    return "\n".join([_row(_COLUMNS), _row(_COLUMNS.values()), *lines])


def _line(
    name: str, seeds: Mapping[int, Result], first: Mapping[int, Result], groups: Mapping[str, str]
) -> str:
    experiment = EXPERIMENTS[name]
    if not seeds:
        return f"| {experiment.title} | {MISSING} |" + (len(_COLUMNS) - 2) * " |"
    runs = list(seeds.values())
    cells = [
        experiment.title,
        seeds_measured(name, seeds),
        _mean(_top1(runs, "teacher")),
        _mean(_top1(runs, "sft")),
        _spread(_top1(runs, "rl")),
        shown(difference(seeds, "rl", seeds, "teacher", groups)),
        shown(difference(seeds, "rl", seeds, "sft", groups)),
        "" if seeds is first else shown(difference(seeds, "rl", first, "rl", groups)),
        _mean([result.quality.get("rl") for result in runs], 2),
        f"{_signed_mean(runs, 'reward_first')} → {_signed_mean(runs, 'reward_last')}",
        _mean(_figures(runs, "dev_value")),
        alarms(runs),
        "/".join(str(result.summary.get("chosen_step", "–")) for result in runs),
        _mean([result.rl_s for result in runs], 0),
    ]
    return _row(cells)


def seeds_measured(name: str, seeds: Mapping[int, Result]) -> str:
    """The seeds that were run, and those that should have been and were not."""
    measured = ", ".join(map(str, seeds))
    missing_seeds = [str(seed) for seed in EXPERIMENTS[name].seeds if seed not in seeds]
    if not missing_seeds:
        return measured
    return f"{measured}; missing: {', '.join(missing_seeds)}"


def seed_table(seeds: Mapping[int, Result], groups: Mapping[str, str]) -> str:
    """The shipped profile's runs one by one: the README's table."""
    lines = [
        "| RL seed | test questions | teacher | SFT | RL | RL − teacher [95% CI] "
        "| SFT − teacher [95% CI] | RL s |",
        "| ---: | ---: | ---: | ---: | ---: | --- | --- | ---: |",
    ]
    for seed in sorted({*EXPERIMENTS["default"].seeds, *seeds}):
        # A seed that should be there and isn't must not go unseen.
        if seed not in seeds:
            lines.append(f"| {seed} | {MISSING} | | | | | | |")
            continue
        result = seeds[seed]
        run = {seed: result}
        cells = [
            f"{seed}",
            f"{len(groups):,}",
            *(number(mean_top1(result, arm)) for arm in ("teacher", "sft", "rl")),
            shown(difference(run, "rl", run, "teacher", groups)),
            shown(difference(run, "sft", run, "teacher", groups)),
            f"{result.rl_s:.0f}",
        ]
        lines.append(_row(cells))
    return "\n".join(lines)


def faults(results: Results) -> list[str]:
    """Reward by samples with faults and without, and the samples that had no score."""
    titles = {name: EXPERIMENTS[name].title for name in _FAULTS}
    sentences = ["Reward by samples, with the seconds of training so far."]
    for name, title in titles.items():
        samples = _total(results, name, "samples")
        if samples:
            invalid = _total(results, name, "samples_invalid")
            sentences.append(f"{title}: {invalid:,} of {samples:,} samples without a score.")
    return [" ".join(sentences), by_samples(results, titles)]


def _total(results: Results, name: str, key: str) -> int:
    return sum(int(result.summary.get(key, 0)) for result in results.get(name, {}).values())


def rivals(results: Results, groups: Mapping[str, str]) -> list[str]:
    """verl, TRL and ms-swift on the same prompts with the same reward."""
    tuned = [tuning for tuning in TUNED if tuning.experiment in RIVALS]
    text = (
        "GRPO from the same SFT model on the same prompts with the same reward (our scorer, the "
        "same RAG and judge), as many samples a step, a prompt and an update, the same temperature "
        "and learning rate schedule, no KL, fp32; other settings are each library's own. "
        f"{_rates_note(tuned, results)} Each saves checkpoints at the same steps, and the best on "
        "the dev split is tested, the SFT model among them. Seconds of training leave out "
        "start-up, validation and saving, and the last update is among them; those of the whole "
        "process have all, but for the dev validations of TRL and ms-swift, which run afterwards."
    )
    runs: list[Result] = []
    for name in RIVALS:
        runs.extend(results.get(name, {}).values())
    if all(result.own_ledger for result in runs):
        text += (
            " Each measurement, ours among them, begins with an empty ledger, so that all wait for "
            "judge and RAG alike."
        )
    lines = [
        "| Trainer | Seeds | RL | RL − SFT | − verl | s per step | s of training "
        "| s of the whole process |",
        "| --- | --- | --- | --- | --- | ---: | ---: | ---: |",
        *(_rival_line(name, results, groups) for name in RIVALS),
    ]
    return [
        text,
        "\n".join(lines),
        "Reward by samples, with the seconds of training so far:",
        by_samples(results, {name: _rival_title(name) for name in RIVALS}),
    ]


def _rates_note(tuned: Sequence[Tuning], results: Results) -> str:
    open_rates = [tuning for tuning in tuned if not _is_chosen(tuning, results)]
    if not open_rates:
        return "The learning rate of each was chosen among the same candidates on the dev split."
    names = ", ".join(f"`{tuning.experiment}`" for tuning in open_rates)
    return (
        "The learning rate is not known to be the best of the candidates on the dev split for "
        f"{names}."
    )


def _rival_line(name: str, results: Results, groups: Mapping[str, str]) -> str:
    title = _rival_title(name)
    seeds = results.get(name, {})
    verl = results.get(RIVALS[0], {})
    runs = [result for result in seeds.values() if result.curve]
    if not runs:
        return f"| {title} | {MISSING} |" + 6 * " |"
    cells = [
        title,
        seeds_measured(name, seeds),
        _spread(_top1(runs, "rl")),
        shown(difference(seeds, "rl", seeds, "sft", groups)),
        "" if name == RIVALS[0] else shown(difference(seeds, "rl", verl, "rl", groups)),
        _mean([result.curve[-1].seconds / len(result.curve) for result in runs], 2),
        _mean([result.curve[-1].seconds for result in runs], 0),
        _mean([result.rl_s for result in runs], 0),
    ]
    return _row(cells)


def by_samples(results: Results, titles: Mapping[str, str], parts: int = 5) -> str:
    """Mean reward of each fifth of the samples, and the seconds at which it was over.

    It is the mean over the seeds that all experiments with a learning curve have.

    Args:
        titles: the experiments, each with the heading of its column.
    """
    measured: dict[str, dict[int, Result]] = {}
    for name in titles:
        with_curve = {
            seed: result for seed, result in results.get(name, {}).items() if result.curve
        }
        if with_curve:
            measured[name] = with_curve
    seeds = sorted(set.intersection(*map(set, measured.values()))) if measured else []
    if not seeds:
        return MISSING.capitalize() + "."
    columns: dict[str, list[Result]] = {}
    for name, runs in measured.items():
        columns[name] = [runs[seed] for seed in seeds]
    total = max(_samples(runs) for runs in columns.values())
    lines = [
        _row(
            [f"Samples (seeds: {', '.join(map(str, seeds))})", *(titles[name] for name in columns)]
        ),
        "| ---: |" + " --- |" * len(columns),
    ]
    for part in range(parts):
        low = total * part / parts
        high = total * (part + 1) / parts
        cells = [_window(runs, low, high) for runs in columns.values()]
        lines.append(_row([f"{low + 1:,.0f} to {high:,.0f}", *cells]))
    return "\n".join(lines)


def _samples(runs: Sequence[Result]) -> int:
    """Samples of the longest of these trainings."""
    return max(result.curve[-1].samples for result in runs)


def _window(runs: Sequence[Result], low: float, high: float) -> str:
    """Mean reward of the steps that end within these samples, and the seconds at the last one."""
    rewards: list[float] = []
    end_seconds: list[float] = []
    for result in runs:
        points = [point for point in result.curve if low < point.samples <= high]
        if points:
            rewards.extend(point.reward for point in points)
            end_seconds.append(points[-1].seconds)
    if not rewards:
        return "–"
    return f"{signed(fmean(rewards))} at {duration(fmean(end_seconds))}"


def _rival_title(name: str) -> str:
    return "verl, as Qinglan runs it" if name == RIVALS[0] else EXPERIMENTS[name].title


def learning_rates(results: Results) -> list[str]:
    """The candidates' values on the dev split, and whether the one in use is the best."""
    lines = ["| For | Learning rate | Dev | |", "| --- | ---: | ---: | --- |"]
    for tuning in TUNED:
        values = _dev_values(tuning, results)
        for rate, value in values.items():
            notes = []
            if rate == tuning.used_rate:
                notes.append("in use")
                if _is_chosen(tuning, results):
                    notes.append("chosen on the dev split")
            if _beats(value, values[tuning.used_rate]):
                notes.append("better than the one in use")
            dev_value = MISSING if value is None else number(value)
            lines.append(_row([f"`{tuning.experiment}`", rate, dev_value, ", ".join(notes)]))
    text = (
        f"Candidates with seed {_TUNING_SEED}, compared on the dev split; the test split is not "
        "used. PPO and RLOO have no candidates: PPO uses the profile's rates, and RLOO the one of "
        "`grpo`."
    )
    return [text, "\n".join(lines)]


def _dev_values(tuning: Tuning, results: Results) -> dict[str, float | None]:
    """The value of each rate on the dev split; None for one that was not measured."""
    values: dict[str, float | None] = {}
    for rate in tuning.rates:
        result = results.get(tuning.candidate(rate), {}).get(_TUNING_SEED)
        values[rate] = result.summary.get("dev_value") if result else None
    return values


def _is_chosen(tuning: Tuning, results: Results) -> bool:
    """Are all candidates measured, and is none better than the one in use?"""
    values = _dev_values(tuning, results)
    if None in values.values():
        return False
    return not any(_beats(value, values[tuning.used_rate]) for value in values.values())


def _beats(value: float | None, used_value: float | None) -> bool:
    return value is not None and used_value is not None and value > used_value


def alarms(runs: Sequence[Result]) -> str:
    """The alarms of each seed, with their steps."""
    by_seed = [
        f"seed {result.seed}: {', '.join(result.alarms)}" for result in runs if result.alarms
    ]
    return "; ".join(by_seed) or "none"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _spread(values: Sequence[float | None]) -> str:
    if len(values) == 1:
        return number(values[0])
    return f"{_mean(values)} ({', '.join(number(value) for value in values)})"


def _mean(values: Sequence[float | None], digits: int = 3) -> str:
    known_values = [value for value in values if value is not None]
    return number(fmean(known_values) if known_values else None, digits)


def _signed_mean(runs: Sequence[Result], key: str) -> str:
    known_values = [value for value in _figures(runs, key) if value is not None]
    return signed(fmean(known_values) if known_values else None)


def _top1(runs: Sequence[Result], arm: str) -> list[float | None]:
    """An arm's top-1 in each run."""
    return [mean_top1(result, arm) for result in runs]


def _figures(runs: Sequence[Result], key: str) -> list[float | None]:
    """A figure of each run's training."""
    return [result.summary.get(key) for result in runs]
