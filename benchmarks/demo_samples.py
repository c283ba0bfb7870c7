"""Is the demo's result luck? The shipped profiles on several samples, each with its own base, SFT and RL model.

    make bench NAME=demo_samples
    python benchmarks/demo_samples.py --recipe medical

Ten samples (`embedded.sample_seed`, and as many base models) of query rewriting, one of them with three RL seeds, and
five of the two other recipes. The runs take some minutes each and can be made in several goes: what was measured before
is kept. If code that can change a result has changed since, one earlier run of the profile is repeated: where its
weights and figures are the same as before, the others are kept too. Prints the table and writes
benchmarks/results/demo_samples.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from qinglan.evaluation.models import Decision

RESULT = Path(__file__).parent / "results" / "demo_samples.json"
SAMPLES = {"embedded": 10, "answer_judge": 5, "medical": 5}
"""By profile."""
RIVALS = {"embedded": "teacher", "answer_judge": "sft", "medical": "sft"}
FIRST_SAMPLE, RL_SEEDS = 101, (1, 2, 3)
CODE = (
    *("config", "recipes", "simulators", "data", "training", "evaluation", "noise.py", "noise.yaml", "rows.py"),
    *("statistics.py", "runs/cpu.py"),
)
"""What can change a result: the parts of `qinglan`."""
KINDS = ("samples", "rl_seeds")
Found = dict[str, Any]


def main() -> None:
    """Run what is missing, then print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", choices=SAMPLES, action="append", help="only this profile; all if not given")
    profiles = parser.parse_args().recipe or list(SAMPLES)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    known: Found = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    known = {kind: known.get(kind, []) for kind in KINDS}
    for profile in profiles:
        check(known, profile, commit)
    for kind, profile, sample_seed, rl_seed in wanted(profiles):
        asked = {"recipe": profile, "sample_seed": sample_seed, "rl_seed": rl_seed}
        found = {each: [one for one in known[each] if asked.items() <= one.items()] for each in KINDS}
        if not found[kind]:
            same = next((one for ones in found.values() for one in ones), None)
            new = same or asked | {"commit": commit, "checked": commit} | run(profile, sample_seed, rl_seed)
            known[kind].append(new)
            keep(known)
    print("\n".join(table(known)))


def check(known: Found, profile: str, commit: str) -> None:
    """Where the code has changed, repeat an earlier run; if it comes out otherwise, forget all runs of the profile."""
    earlier = [one for kind in KINDS for one in known[kind] if one["recipe"] == profile]
    if not earlier or all(unchanged_since(one["checked"], profile) for one in earlier):
        return
    again = run(profile, earlier[0]["sample_seed"], earlier[0]["rl_seed"])
    same = all(again[name] == earlier[0][name] for name in again if name != "minutes")
    for kind in KINDS:
        known[kind] = [one for one in known[kind] if same or one["recipe"] != profile]
    for one in earlier:
        one["checked"] = commit
    keep(known)


def keep(known: Found) -> None:
    RESULT.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def unchanged_since(commit: str, profile: str) -> bool:
    """Whether no code or setting has changed that can change a result."""
    parts = [f"qinglan/{part}" for part in CODE]
    paths = [*parts, ":!qinglan/evaluation/report", "tasks", "requirements.lock", f"configs/{profile}.yaml"]
    return subprocess.run(["git", "diff", "--quiet", commit, "--", *paths], check=False).returncode == 0


def wanted(profiles: list[str]) -> Iterator[tuple[str, str, int, int]]:
    """A run's kind, profile, sample and RL seed."""
    for profile in profiles:
        yield from (("samples", profile, FIRST_SAMPLE + number, RL_SEEDS[0]) for number in range(SAMPLES[profile]))
    if "embedded" in profiles:
        yield from (("rl_seeds", "embedded", FIRST_SAMPLE, seed) for seed in RL_SEEDS)


def run(profile: str, sample_seed: int, rl_seed: int) -> Found:
    """One pipeline run's figures, on a site of its own."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        settings = {"embedded.sample_seed": sample_seed, "embedded.pretrain_seed": sample_seed, "rl.seed": rl_seed}
        settings |= {"paths.runs": site / "runs", "paths.state": site / "state"}
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        argv = [sys.executable, "-m", "qinglan.cli", "run", "pipeline", "--profile", profile, *words]
        if subprocess.run(argv, check=False).returncode:
            sys.exit("error: the run failed; see above")
        report = json.loads((site / "runs" / "latest" / "report.json").read_text(encoding="utf-8"))
    found = {(one["b"], one["metric"]): one for one in report["comparisons"] if one["a"] == "rl"}
    metric = report["metrics"][0]["name"]
    gains = {
        f"rl_minus_{rival}": {"diff": one["diff"], "ci95": one["ci95"]}
        for rival in ("teacher", "sft")
        if (one := found.get((rival, metric)))
    }
    first = gains[f"rl_minus_{RIVALS[profile]}"]
    decision = Decision.model_validate(report["decision"]).in_order[0]  # about RL, also where SFT is released instead
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
