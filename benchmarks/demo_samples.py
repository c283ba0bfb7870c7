"""Is the demo's result luck? The shipped profiles on several samples, each with its own base, SFT
and RL model.

    make bench NAME=demo_samples
    python benchmarks/demo_samples.py --recipe medical

Ten samples (`embedded.sample_seed`, and as many base models) of query rewriting, one of them with
three RL seeds, and five of the two other recipes. The runs take some minutes each and can be made
in several goes: what was measured before is kept. If code that can change a result has changed
since, one earlier run of the profile is repeated: where its weights and figures are the same as
before, the others are kept too. Prints the table and writes benchmarks/results/demo_samples.json.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from commands import qinglan, with_set

from qinglan.evaluation.models import Decision

RESULT = Path(__file__).parent / "results" / "demo_samples.json"
SAMPLES = {"embedded": 10, "answer_judge": 5, "medical": 5}
"""By profile."""
RIVALS = {"embedded": "teacher", "answer_judge": "sft", "medical": "sft"}
FIRST_SAMPLE, RL_SEEDS = 201, (1, 2, 3)
CODE = (
    *(
        "config",
        "recipes",
        "simulators",
        "data",
        "training",
        "evaluation",
        "noise.py",
        "noise.yaml",
        "rows.py",
    ),
    *("statistics.py", "cpu.py"),
)
"""What can change a result: the parts of `qinglan`."""
KINDS = ("samples", "rl_seeds")
Found = dict[str, Any]
Asked = tuple[str, int, int]
"""A run's profile, sample and RL seed."""
Runs = dict[Asked, Found]


def main() -> None:
    """Run what is missing, then print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--recipe", choices=SAMPLES, action="append", help="only this profile; all if not given"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="runs at a time, each of one thread if there are several",
    )
    options = parser.parse_args()
    profiles = options.recipe or list(SAMPLES)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    written = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    runs: Runs = {
        (one["recipe"], one["sample_seed"], one["rl_seed"]): one
        for kind in written.values()
        for one in kind
    }
    for profile in profiles:
        check(runs, profile, commit)
    missing = dict.fromkeys(asked for _, asked in wanted(profiles) if asked not in runs)
    with ThreadPoolExecutor(options.jobs) as pool:
        begun = {pool.submit(run, asked, one_thread=options.jobs > 1): asked for asked in missing}
        for done in as_completed(begun):
            asked = begun[done]
            named = dict(zip(("recipe", "sample_seed", "rl_seed"), asked, strict=True))
            runs[asked] = named | {"commit": commit, "checked": commit} | done.result()
            keep(runs)
    print("\n".join(table(by_kind(runs))))


def check(runs: Runs, profile: str, commit: str) -> None:
    """Where the code has changed, repeat an earlier run; if it comes out otherwise, forget all runs
    of the profile."""
    earlier = {asked: one for asked, one in runs.items() if asked[0] == profile}
    if all(unchanged_since(one["checked"], profile) for one in earlier.values()):
        return
    asked, first = next(iter(earlier.items()))
    again = run(asked)
    same = all(again[name] == first[name] for name in again if name != "minutes")
    for asked, one in earlier.items():
        one["checked"] = commit
        if not same:
            del runs[asked]
    keep(runs)


def by_kind(runs: Runs) -> dict[str, list[Found]]:
    """What is written: sample 201 of query rewriting is one of the samples and one of the RL
    seeds."""
    asked = list(wanted(list(SAMPLES)))
    return {
        kind: [runs[one] for each, one in asked if each == kind and one in runs] for kind in KINDS
    }


def keep(runs: Runs) -> None:
    RESULT.write_text(
        json.dumps(by_kind(runs), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def unchanged_since(commit: str, profile: str) -> bool:
    """Whether no code or setting has changed that can change a result."""
    parts = [f"qinglan/{part}" for part in CODE]
    without = ("data/review", "evaluation/report", "evaluation/weights.yaml")
    paths = [
        *parts,
        *(f":!qinglan/{part}" for part in without),
        "tasks",
        "requirements.lock",
        f"configs/{profile}.yaml",
    ]
    return (
        subprocess.run(["git", "diff", "--quiet", commit, "--", *paths], check=False).returncode
        == 0
    )


def wanted(profiles: list[str]) -> Iterator[tuple[str, Asked]]:
    """Each kind's runs."""
    for profile in profiles:
        yield from (
            ("samples", (profile, FIRST_SAMPLE + number, RL_SEEDS[0]))
            for number in range(SAMPLES[profile])
        )
    if "embedded" in profiles:
        yield from (("rl_seeds", ("embedded", FIRST_SAMPLE, seed)) for seed in RL_SEEDS)


def run(asked: Asked, *, one_thread: bool = False) -> Found:
    """One pipeline run's figures, on a site of its own; the number of threads changes no weight."""
    profile, sample_seed, rl_seed = asked
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        settings: Found = {
            "embedded.sample_seed": sample_seed,
            "embedded.pretrain_seed": sample_seed,
            "rl.seed": rl_seed,
        }
        settings |= {"paths.runs": site / "runs", "paths.state": site / "state"}
        settings |= {"trainer.threads": 1} if one_thread else {}
        words = with_set(f"{key}={value}" for key, value in settings.items())
        qinglan(None, "run", "pipeline", "--profile", profile, *words)
        report = json.loads((site / "runs" / "latest" / "report.json").read_text(encoding="utf-8"))
    found = {(one["b"], one["metric"]): one for one in report["comparisons"] if one["a"] == "rl"}
    metric = report["metrics"][0]["name"]
    gains = {
        f"rl_minus_{rival}": {"diff": one["diff"], "ci95": one["ci95"]}
        for rival in ("teacher", "sft")
        if (one := found.get((rival, metric)))
    }
    first = gains[f"rl_minus_{RIVALS[profile]}"]
    decision = Decision.model_validate(report["decision"]).in_order[
        0
    ]  # about RL, also where SFT is released instead
    return {
        **{name: gain["diff"] for name, gain in gains.items()},
        "ci95": first["ci95"],
        "metric": metric,
        "released": decision.verdict == "promote",
        "verdict": decision.verdict,
        "failed": [rule.name for rule in decision.rules if rule.outcome != "pass"],
        "weights": {stage: digest[:12] for stage, digest in report["weights"]["found"].items()},
        "arms": {name: arm["scores"][metric]["mean"] for name, arm in report["arms"].items()},
        "minutes": sum(stage["seconds"] for stage in report["stages"]) / 60,
    }


def table(known: Found) -> Iterator[str]:
    """Markdown: a run a line, then the spread over samples and over RL seeds."""
    yield "\n| commit | profile | sample | RL seed | RL − | difference | 95% interval | released | held back by |"
    yield "| --- | --- | ---: | ---: | --- | ---: | --- | --- | --- |"
    for kind in KINDS:
        for one in known[kind]:
            rival, (low, high) = RIVALS[one["recipe"]], one["ci95"]
            which = f"{one['commit']} | {one['recipe']} | {one['sample_seed']} | {one['rl_seed']}"
            gain = f"{rival} | {one[f'rl_minus_{rival}']:+.3f} | [{low:+.3f}, {high:+.3f}]"
            yield f"| {which} | {gain} | {one['released']} | {', '.join(one['failed'])} |"
    yield ""
    for kind, profile in (*(("samples", profile) for profile in SAMPLES), ("rl_seeds", "embedded")):
        if runs := [one for one in known[kind] if one["recipe"] == profile]:
            gains = [one[f"rl_minus_{RIVALS[profile]}"] for one in runs]
            spread = f" ± {stdev(gains):.3f}" if len(gains) > 1 else ""
            above = sum(one["ci95"][0] > 0 for one in runs)
            yield (
                f"{profile}, {len(runs)} {kind}: {fmean(gains):+.3f}{spread} (mean ± standard deviation), interval "
                f"above 0 in {above}, released in {sum(one['released'] for one in runs)}"
            )


if __name__ == "__main__":
    main()
