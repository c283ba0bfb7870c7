"""The path of a domain's base model, and the command that pretrains it; imports no torch.

A tiny Qwen3 is pretrained once per machine and kept under `paths.state`. Its key contains a digest
of the code that it is made with, so a changed corpus gives another model; the code of other domains
is no part of it.
"""

import json
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from qinglan.config import Embedded, Paths
from qinglan.recipes import recipe_key
from qinglan.runs.artifacts import MANIFEST, hash_of
from qinglan.runs.code_digest import digests_of_modules, import_closure
from qinglan.simulators.domains import Domain, red_team_questions


def cache_key(embedded: Embedded, domain: Domain) -> str:
    """Digest of everything that the pretrained weights depend on."""
    package = __package__
    makers = (
        f"{package}.pretrain",
        f"{package}.domains.{domain.name}",
    )
    code = import_closure(makers, lambda module: module.startswith(f"{package}."))
    size = asdict(domain.pretraining) | {
        "steps": embedded.pretrain_steps or domain.pretraining.steps
    }
    size |= {"seed": embedded.pretrain_seed}
    prompt = recipe_key(domain.name)  # the corpus contains it
    libraries = dict.fromkeys(("torch", "transformers", "tokenizers"), "absent")
    for name in libraries:
        with suppress(PackageNotFoundError):  # the orchestrator's image may do without
            libraries[name] = version(name)
    return hash_of(
        digests_of_modules({*code, "qinglan.noise", "qinglan.runs.cpu"}),
        prompt,
        red_team_questions(domain.name),
        size,
        libraries,
    )


def cached_path(paths: Paths, embedded: Embedded, domain: Domain) -> Path:
    """The model's Hugging Face folder, whether it exists or not."""
    return (
        paths.state / "base_models" / f"qwen3-tiny-{domain.name}-{cache_key(embedded, domain)[:16]}"
    )


def is_complete(path: Path) -> bool:
    return (path / MANIFEST).is_file()  # the last file that pretraining writes


def pretrain_argv(
    python: str,
    embedded: Embedded,
    domain: Domain,
    output_dir: Path,
    metrics_path: Path,
    threads: int,
) -> list[str]:
    """Command line of the pretraining process; it needs the trainer's environment."""
    options = {
        "domain": domain.name,
        "output": str(output_dir.resolve()),
        "metrics": str(metrics_path.resolve()),
        "steps": embedded.pretrain_steps or domain.pretraining.steps,
        "seed": embedded.pretrain_seed,
        "seconds_max": embedded.pretrain_seconds_max,
        "threads": threads,
    }
    return [python, "-m", "qinglan.simulators.pretrain", json.dumps(options)]
