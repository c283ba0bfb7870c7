"""Comparison of a run's weights with those that the repository states.

`weights.yaml` has their digests, by profile. They count only for the same settings, code and
libraries. benchmarks/expected_weights.py keeps a run's.
"""

from collections.abc import Mapping
from pathlib import Path

import yaml

from qinglan.config import Profile
from qinglan.evaluation.models import Weights
from qinglan.recipes import get_recipe
from qinglan.runs.artifacts import WEIGHTS_SHA256, StageResult, hash_of
from qinglan.runs.code_digest import code_of, digests_of_modules, module_path, modules_in

FILE = Path(__file__).with_suffix(".yaml")
_TRAINING_STAGES = ("base_model", "sft", "rl")
_DATA_STAGES = ("ingest", "extract", "distill", "validate", "select", "dataset")
_SETTINGS = {
    "recipe",
    "tenant",
    "data",
    "teacher",
    "answerer",
    "judge",
    "rag",
    "embedded",
    "distill",
    "validation",
    "select",
    "extract",
    "dataset",
    "student",
    "sft",
    "reward",
    "rl",
    "trainer",
}
"""Sections of the profile that the weights depend on."""


def weights_of(
    profile: Profile, stages: Mapping[str, StageResult], versions: Mapping[str, str]
) -> Weights | None:
    """The digests that a run's stages left, beside the expected ones.

    It is None where no stage left any.
    """
    digests: dict[str, str] = {}
    for stage in _TRAINING_STAGES:
        if stage in stages and WEIGHTS_SHA256 in stages[stage].details:
            digests[stage] = stages[stage].details[WEIGHTS_SHA256]
    if not digests:
        return None
    settings = profile.model_dump(mode="json", include=_SETTINGS)
    made_of = hash_of(settings, _code(profile), dict(versions))
    # An empty file is None in YAML.
    by_profile = yaml.safe_load(FILE.read_text(encoding="utf-8")) or {}
    stated = by_profile.get(profile.name, {})
    return Weights(
        made_of=made_of,
        found=digests,
        expected={stage: stated[stage] for stage in digests if stage in stated},
        is_of_same=stated.get("made_of") == made_of,
    )


def _code(profile: Profile) -> dict[str, str]:
    """The digests of all code that the weights depend on, the simulators' and the recipe's too."""
    digests = digests_of_modules(modules_in("qinglan.simulators"))
    for stage in (*_DATA_STAGES, *_TRAINING_STAGES):
        digests |= code_of(f"qinglan.tasks.{stage}")
    recipe_module = type(get_recipe(profile.recipe)).__module__
    if module_path(recipe_module):
        digests |= code_of(recipe_module)
    return digests
