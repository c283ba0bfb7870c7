"""The path of a domain's base model, and the command that pretrains it.

A tiny Qwen3 is pretrained once per machine and kept under `paths.state`. Its key contains a digest
of the code that it is made with, so a changed corpus gives another model. The code of other domains
is no part of the key. This module imports no torch.
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

_LIBRARIES = ("torch", "transformers", "tokenizers")
_KEY_CHARS = 16


def cache_key(embedded: Embedded, domain: Domain) -> str:
    """Digest of everything that the pretrained weights depend on."""
    package = __package__
    makers = (f"{package}.pretrain", f"{package}.domains.{domain.name}")
    modules = import_closure(makers, lambda module: module.startswith(f"{package}."))
    # The instruction set decides in which order numbers are summed.
    modules |= {"qinglan.noise", "qinglan.cpu"}
    settings = asdict(domain.pretraining)
    settings["steps"] = _steps(embedded, domain)
    settings["seed"] = embedded.pretrain_seed
    return hash_of(
        digests_of_modules(modules),
        # The corpus contains the recipe's prompt.
        recipe_key(domain.name),
        red_team_questions(domain.name),
        settings,
        _library_versions(),
    )


def _steps(embedded: Embedded, domain: Domain) -> int:
    return embedded.pretrain_steps or domain.pretraining.steps


def _library_versions() -> dict[str, str]:
    versions = dict.fromkeys(_LIBRARIES, "absent")
    for name in _LIBRARIES:
        # The orchestrator's image may do without the trainer's libraries.
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def cached_path(paths: Paths, embedded: Embedded, domain: Domain) -> Path:
    """The model's Hugging Face folder, whether it exists or not."""
    key = cache_key(embedded, domain)[:_KEY_CHARS]
    return paths.state / "base_models" / f"qwen3-tiny-{domain.name}-{key}"


def is_complete(path: Path) -> bool:
    # The manifest is the last file that pretraining writes.
    return (path / MANIFEST).is_file()


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
        "steps": _steps(embedded, domain),
        "seed": embedded.pretrain_seed,
        "seconds_max": embedded.pretrain_seconds_max,
        "threads": threads,
    }
    return [python, "-m", "qinglan.simulators.pretrain", json.dumps(options)]
