"""benchmarks/results/experiments.md, made of the results alone: no sentence has a number that isn't
computed here."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from qinglan.runs.artifacts import hash_of
from qinglan.text import duration, number, signed

from .findings import MISSING, alarm_record, findings, shown
from .matrix import COMPARISONS, EXPERIMENTS, RIVALS, TUNED, Comparison, Tuning
from .results import Result, Results, difference, mean_top1

_HEAD = """# Experiments

Made by `make bench NAME=experiments` from the files in
[experiments](experiments); don't edit it. What each line overrides stands in [matrix.py](../rl_experiments/matrix.py).

The embedded task with simulators for teacher, judge, RAG and a tiny student: the numbers say what these settings do
there, and nothing about your data."""
_READING = """RL, SFT and teacher: top-1 on the test split; RL as the mean over seeds, and each seed. Intervals: 95%,
from a paired bootstrap that resamples gold documents and, where there is more than one, seeds; with one seed they are
about the test questions alone. Reward: mean of the first and of the last tenth of the steps. Step: the chosen
checkpoint's, seed by seed; 0 is the model that RL started from. Dev: that checkpoint's value on the dev split, another
measure with and without labels. Judge: mean score of the RL student's test rewrites, 0 to 5. Alarms: see
[reward.md](../../docs/reference/reward.md#alarms), with the steps at which they were raised. RL s: seconds of the whole
RL stage, by the clock, whatever else the machine did meanwhile."""
_FAULTS = ("default", "faults")
_TUNING_SEED = 1
_COLUMNS = {
    **dict.fromkeys(("Experiment", "Seeds"), "---"),
    **dict.fromkeys(("Teacher", "SFT"), "---:"),
    **dict.fromkeys(("RL", "RL − teacher", "RL − SFT", "− first line"), "---"),
    **{
        "Judge": "---:",
        "Reward": "---",
        "Dev": "---:",
        "Alarms": "---",
        "Step": "---:",
        "RL s": "---:",
    },
}


def document(results: Results, groups: Mapping[str, str]) -> str:
    """The whole page."""
    parts = [_HEAD, *measured_on(results, groups)]
    parts += ["## Which choices hold up", *findings(results, groups)]
    parts += [
        "## The shipped profile, seed by seed",
        seed_table(results.get("default", {}), groups),
    ]
    parts += ["## How to read the tables", _READING]
    for comparison in COMPARISONS:
        parts += [
            f"## {comparison.title}",
            comparison.note,
            comparison_table(comparison, results, groups),
        ]
    parts += ["## The learning curve with transient faults", *faults(results)]
    parts += ["## Beside other trainers", *rivals(results, groups)]
    parts += ["## Learning rates", *learning_rates(results)]
    parts += ["## What the alarms were worth", *alarm_record(results, groups)]
    return "\n\n".join(part for part in [*parts, stamp(results)] if part) + "\n"


def stamp(results: Results) -> str:
    """Says of which results the page was made; a test compares it with those that are there."""
    found = [
        result.model_dump(mode="json")
        for _, seeds in sorted(results.items())
        for result in seeds.values()
    ]
    return f"<!-- made of {len(found)} results, {hash_of(found)[:16]} -->"


def measured_on(results: Results, groups: Mapping[str, str]) -> list[str]:
    """On how many questions, machines and states of the code."""
    found = [result for seeds in results.values() for result in seeds.values()]
    if not found:
        return ["Nothing has been measured yet."]
    cores = " and ".join(map(str, sorted({result.cores for result in found})))
    codes = len({result.sources for result in found})
    lines = [
        f"Runs: {len(found)}, on {len(groups):,} test questions about {len(set(groups.values())):,} documents, on "
        f"{cores} cores. {_versions(found)}.",
        _ledgers(len(found), sum(not result.own_ledger for result in found)),
    ]
    if codes > 1:
        lines.append(
            f"The runs are of {codes} states of Qinglan's code: compare lines of different states with care."
        )
    return lines


def _ledgers(runs: int, shared: int) -> str:
    text = (
        f"What judge and RAG answer is kept in a ledger and not asked for twice. {runs - shared} of {runs} runs "
        "began with an empty one; in the run that made the stages before RL it then held the judge's answers about "
        "the teacher's rewrites."
    )
    if not shared:
        return text
    return (
        f"{text} {shared} shared one: they may have waited for less, and the answers are the same."
    )


def _versions(found: Iterable[Result]) -> str:
    known: dict[str, set[str]] = {}
    for result in found:
        for package, version in result.versions.items():
            known.setdefault(package, set()).add(version)
    return ", ".join(
        f"{package} {' and '.join(sorted(versions))}" for package, versions in known.items()
    )


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
        gains = " | ".join(
            shown(difference(one, arm, one, "teacher", groups)) for arm in ("rl", "sft")
        )
        lines.append(f"| {seed} | {len(groups):,} | {arms} | {gains} | {seeds[seed].rl_s:.0f} |")
    return "\n".join(lines)


def faults(results: Results) -> list[str]:
    """Reward by samples with faults and without, and the samples that had no score."""
    titles = {name: EXPERIMENTS[name].title for name in _FAULTS}
    lines = [
        f"{title}: {invalid:,} of {samples:,} samples without a score."
        for name, title in titles.items()
        if (samples := _total(results, name, "samples"))
        for invalid in [_total(results, name, "samples_invalid")]
    ]
    return [
        "Reward by samples, with the seconds of training so far. " + " ".join(lines),
        by_samples(results, titles),
    ]


def _total(results: Results, name: str, key: str) -> int:
    return sum(int(result.summary.get(key, 0)) for result in results.get(name, {}).values())


def rivals(results: Results, groups: Mapping[str, str]) -> list[str]:
    """verl, TRL and ms-swift on the same prompts with the same reward."""
    tuned = [tuning for tuning in TUNED if tuning.experiment in RIVALS]
    text = (
        "GRPO from the same SFT model on the same prompts with the same reward (our scorer, the same RAG and judge), "
        "as many samples a step, a prompt and an update, the same temperature and learning rate schedule, no KL, fp32; "
        f"other settings are each library's own. {_rates_note(tuned, results)} Each saves checkpoints at the same "
        "steps, and the best on the dev split is tested, the SFT model among them. Seconds of training leave out "
        "start-up, validation and saving, and the last update is among them; those of the whole process have all, but "
        "for the dev validations of TRL and ms-swift, which run afterwards."
    )
    if all(result.own_ledger for name in RIVALS for result in results.get(name, {}).values()):
        text += " Each measurement, ours among them, begins with an empty ledger, so that all wait for judge and RAG alike."
    heads = "| Trainer | Seeds | RL | RL − SFT | − verl | s per step | s of training | s of the whole process |"
    lines = [heads, "| --- | --- | --- | --- | --- | ---: | ---: | ---: |"]
    lines += [_rival_line(name, results, groups) for name in RIVALS]
    return [
        text,
        "\n".join(lines),
        "Reward by samples, with the seconds of training so far:",
        by_samples(results, {name: _rival_title(name) for name in RIVALS}),
    ]


def _rates_note(tuned: Sequence[Tuning], results: Results) -> str:
    if all(_is_chosen(tuning, results) for tuning in tuned):
        return "The learning rate of each was chosen among the same candidates on the dev split."
    names = ", ".join(
        f"`{tuning.experiment}`" for tuning in tuned if not _is_chosen(tuning, results)
    )
    return f"The learning rate is not known to be the best of the candidates on the dev split for {names}."


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


def by_samples(results: Results, titles: Mapping[str, str], parts: int = 5) -> str:
    """Mean reward of each fifth of the samples, over the seeds that all have, and when it was
    over."""
    curves = {
        name: {seed: r for seed, r in results.get(name, {}).items() if r.curve} for name in titles
    }
    curves = {name: found for name, found in curves.items() if found}
    seeds = set.intersection(*map(set, curves.values())) if curves else set()
    if not seeds:
        return MISSING.capitalize() + "."
    measured = {name: [found[seed] for seed in sorted(seeds)] for name, found in curves.items()}
    most = max(result.curve[-1].samples for found in measured.values() for result in found)
    head = f"Samples (seeds: {', '.join(map(str, sorted(seeds)))})"
    lines = [
        _row([head, *(titles[name] for name in measured)]),
        "| ---: |" + " --- |" * len(measured),
    ]
    for part in range(parts):
        low, high = most * part / parts, most * (part + 1) / parts
        cells = [_window(found, low, high) for found in measured.values()]
        lines.append(_row([f"{low + 1:,.0f} to {high:,.0f}", *cells]))
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
    for tuning in TUNED:
        values = _dev_values(tuning, results)
        for rate, value in values.items():
            notes = ["in use"] * (rate == tuning.used)
            notes += ["chosen on the dev split"] * (
                rate == tuning.used and _is_chosen(tuning, results)
            )
            notes += ["better than the one in use"] * _beats(value, values[tuning.used])
            shown_value = MISSING if value is None else number(value)
            lines.append(_row([f"`{tuning.experiment}`", rate, shown_value, ", ".join(notes)]))
    text = (
        f"Candidates with seed {_TUNING_SEED}, compared on the dev split; the test split is not used. PPO and RLOO "
        "have no candidates: PPO uses the profile's rates, and RLOO the one of `grpo`."
    )
    return [text, "\n".join(lines)]


def _dev_values(tuning: Tuning, results: Results) -> dict[str, float | None]:
    found = {
        rate: results.get(tuning.candidate(rate), {}).get(_TUNING_SEED) for rate in tuning.rates
    }
    return {
        rate: result.summary.get("dev_value") if result else None for rate, result in found.items()
    }


def _is_chosen(tuning: Tuning, results: Results) -> bool:
    """Whether all candidates are measured and none is better than the one in use."""
    values = _dev_values(tuning, results)
    return None not in values.values() and not any(
        _beats(value, values[tuning.used]) for value in values.values()
    )


def _beats(value: float | None, used: float | None) -> bool:
    return value is not None and used is not None and value > used


def alarms(found: Sequence[Result]) -> str:
    """The alarms of each seed, with their steps."""
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
