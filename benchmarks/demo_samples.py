"""The shipped profiles on several samples, each with its own base, SFT and RL model.

    make bench NAME=demo_samples
    python benchmarks/demo_samples.py --recipe medical

They tell whether the demo's result is luck. Ten samples (`embedded.sample_seed`, and as many base
models) of query rewriting, one of them with three RL seeds, and five of the two other recipes. The
runs take some minutes each and can be made in several goes: what was measured before is kept. If
code that can change a result has changed since, one earlier run of the profile is repeated: where
its weights and figures are the same as before, the others are kept too. Prints the table and writes
benchmarks/results/demo_samples.json.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from commands import qinglan, with_set

from qinglan.evaluation.models import Decision

RESULT = Path(__file__).parent / "results" / "demo_samples.json"
SAMPLES = {"embedded": 10, "answer_judge": 5, "medical": 5}
"""The number of samples of each profile."""
RIVALS = {"embedded": "teacher", "answer_judge": "sft", "medical": "sft"}
FIRST_SAMPLE = 201
RL_SEEDS = (1, 2, 3)
CODE = (
    "config",
    "recipes",
    "grading",
    "simulators",
    "data",
    "training",
    "evaluation",
    "noise.py",
    "noise.yaml",
    "rows.py",
    "statistics",
    "cpu.py",
)
"""The parts of `qinglan` that can change a result."""
OTHER_CODE = ("data/review", "evaluation/report", "evaluation/weights.yaml")
"""Files of these parts that change none."""
KINDS = ("samples", "rl_seeds")
Figures = dict[str, Any]


class Job(NamedTuple):
    """A run: its profile, sample and RL seed."""

    recipe: str
    sample_seed: int
    rl_seed: int


Runs = dict[Job, Figures]


def main() -> None:
    """Make the runs that are not there yet, then print and write."""
    options = parse_options()
    profiles = options.recipe or list(SAMPLES)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    runs = read_runs()
    for profile in profiles:
        check(runs, profile, commit)
    # Some jobs are of both kinds.
    new_jobs = dict.fromkeys(job for _, job in planned_jobs(profiles) if job not in runs)
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = {pool.submit(run, job, one_thread=options.jobs > 1): job for job in new_jobs}
        for future in as_completed(futures):
            job = futures[future]
            runs[job] = {
                **job._asdict(),
                "commit": commit,
                "checked": commit,
                **future.result(),
            }
            keep(runs)
    print("\n".join(table(by_kind(runs))))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(
            "Is the demo's result luck? The shipped profiles on several samples, each with its own "
            "base, SFT and RL model."
        )
    )
    parser.add_argument(
        "--recipe", choices=SAMPLES, action="append", help="only this profile; all if not given"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="runs at a time, each of one thread if there are several",
    )
    return parser.parse_args()


def read_runs() -> Runs:
    """The runs of the results' file."""
    runs: Runs = {}
    if RESULT.exists():
        for kind in json.loads(RESULT.read_text(encoding="utf-8")).values():
            for figures in kind:
                job = Job(figures["recipe"], figures["sample_seed"], figures["rl_seed"])
                runs[job] = figures
    return runs


def check(runs: Runs, profile: str, commit: str) -> None:
    """Repeat an earlier run if the code has changed since.

    If it comes out otherwise, all runs of the profile are forgotten.
    """
    earlier = {job: figures for job, figures in runs.items() if job.recipe == profile}
    if all(is_unchanged_since(figures["checked"], profile) for figures in earlier.values()):
        return
    job, figures_before = next(iter(earlier.items()))
    figures_now = run(job)
    is_same = all(
        value == figures_before[name] for name, value in figures_now.items() if name != "minutes"
    )
    for job, figures in earlier.items():
        figures["checked"] = commit
        if not is_same:
            del runs[job]
    keep(runs)


def by_kind(runs: Runs) -> dict[str, list[Figures]]:
    """The content of the results' file.

    Sample 201 of query rewriting is one of the samples and one of the RL seeds.
    """
    content: dict[str, list[Figures]] = {kind: [] for kind in KINDS}
    for kind, job in planned_jobs(list(SAMPLES)):
        if job in runs:
            content[kind].append(runs[job])
    return content


def keep(runs: Runs) -> None:
    text = json.dumps(by_kind(runs), indent=1, ensure_ascii=False)
    RESULT.write_text(text + "\n", encoding="utf-8")


def is_unchanged_since(commit: str, profile: str) -> bool:
    """Is all code and every setting that can change a result as it was?"""
    paths = [
        *(f"qinglan/{part}" for part in CODE),
        *(f":!qinglan/{part}" for part in OTHER_CODE),
        "qinglan/tasks",
        "requirements.lock",
        f"qinglan/configs/{profile}.yaml",
    ]
    argv = ["git", "diff", "--quiet", commit, "--", *paths]
    return subprocess.run(argv, check=False).returncode == 0


def planned_jobs(profiles: Sequence[str]) -> Iterator[tuple[str, Job]]:
    """Each kind's jobs."""
    for profile in profiles:
        for number in range(SAMPLES[profile]):
            yield "samples", Job(profile, FIRST_SAMPLE + number, RL_SEEDS[0])
    if "embedded" in profiles:
        for seed in RL_SEEDS:
            yield "rl_seeds", Job("embedded", FIRST_SAMPLE, seed)


def run(job: Job, *, one_thread: bool = False) -> Figures:
    """The figures of one pipeline run, on a site of its own.

    Args:
        one_thread: train with one thread; the number of threads changes no weight.
    """
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        settings: Figures = {
            "embedded.sample_seed": job.sample_seed,
            "embedded.pretrain_seed": job.sample_seed,
            "rl.seed": job.rl_seed,
            "paths.runs": site / "runs",
            "paths.state": site / "state",
        }
        # Several runs at a time share the cores: more threads than cores would slow all of them
        # down.
        if one_thread:
            settings["trainer.threads"] = 1
        words = with_set(f"{key}={value}" for key, value in settings.items())
        qinglan(None, "run", "pipeline", "--profile", job.recipe, *words)
        report = json.loads((site / "runs" / "latest" / "report.json").read_text(encoding="utf-8"))
    metric = report["metrics"][0]["name"]
    gains: Figures = {}
    for pair in report["comparisons"]:
        if pair["a"] == "rl" and pair["metric"] == metric:
            gains[pair["b"]] = pair
    # The first decision is about RL, also where SFT is released instead.
    decision = Decision.model_validate(report["decision"]).in_order[0]
    return {
        **{
            f"rl_minus_{rival}": gains[rival]["diff"]
            for rival in ("teacher", "sft")
            if rival in gains
        },
        "ci95": gains[RIVALS[job.recipe]]["ci95"],
        "metric": metric,
        "released": decision.verdict == "promote",
        "verdict": decision.verdict,
        "failed": [rule.name for rule in decision.rules if rule.outcome != "pass"],
        "weights": {stage: digest[:12] for stage, digest in report["weights"]["found"].items()},
        "arms": {name: arm["scores"][metric]["mean"] for name, arm in report["arms"].items()},
        "minutes": sum(stage["seconds"] for stage in report["stages"]) / 60,
    }


def table(content: dict[str, list[Figures]]) -> Iterator[str]:
    """Markdown: a run a line, then the spread over samples and over RL seeds."""
    yield (
        "\n| commit | profile | sample | RL seed | RL − | difference | 95% interval | released "
        "| held back by |"
    )
    yield "| --- | --- | ---: | ---: | --- | ---: | --- | --- | --- |"
    for kind in KINDS:
        for figures in content[kind]:
            rival = RIVALS[figures["recipe"]]
            low, high = figures["ci95"]
            cells = [
                figures["commit"],
                figures["recipe"],
                str(figures["sample_seed"]),
                str(figures["rl_seed"]),
                rival,
                f"{figures[f'rl_minus_{rival}']:+.3f}",
                f"[{low:+.3f}, {high:+.3f}]",
                str(figures["released"]),
                ", ".join(figures["failed"]),
            ]
            yield f"| {' | '.join(cells)} |"
    yield ""
    for profile in SAMPLES:
        runs = [figures for figures in content["samples"] if figures["recipe"] == profile]
        if runs:
            yield spread(profile, "samples", runs)
    if content["rl_seeds"]:
        yield spread("embedded", "rl_seeds", content["rl_seeds"])


def spread(profile: str, kind: str, runs: Sequence[Figures]) -> str:
    """Mean and standard deviation of the gain over runs of one profile."""
    gains = [figures[f"rl_minus_{RIVALS[profile]}"] for figures in runs]
    deviation = f" ± {stdev(gains):.3f}" if len(gains) > 1 else ""
    above = sum(figures["ci95"][0] > 0 for figures in runs)
    released = sum(figures["released"] for figures in runs)
    return (
        f"{profile}, {len(runs)} {kind}: {fmean(gains):+.3f}{deviation} (mean ± standard "
        f"deviation), interval above 0 in {above}, released in {released}"
    )


if __name__ == "__main__":
    main()
