"""Are a run's weights those that the repository states? `weights.yaml` has their digests, by
profile.

They count only for the same settings, code and libraries. benchmarks/expected_weights.py keeps a
run's.
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
_STAGES = ("base_model", "sft", "rl")
_STAGES_BEFORE = ("ingest", "extract", "distill", "validate", "select", "dataset")
_SETTINGS = {
    *(
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
    ),
    *("extract", "dataset", "student", "sft", "reward", "rl", "trainer"),
}


def weights_of(
    profile: Profile, stages: Mapping[str, StageResult], versions: Mapping[str, str]
) -> Weights | None:
    """The digests that a run's stages left, beside the expected ones; None where no stage left
    any."""
    details = {stage: stages[stage].details for stage in _STAGES if stage in stages}
    found: dict[str, str] = {
        s: each[WEIGHTS_SHA256] for s, each in details.items() if WEIGHTS_SHA256 in each
    }
    if not found:
        return None
    made_of = hash_of(
        profile.model_dump(mode="json", include=_SETTINGS), _code(profile), dict(versions)
    )
    known = (yaml.safe_load(FILE.read_text(encoding="utf-8")) or {}).get(profile.name, {})
    expected = {stage: known[stage] for stage in found if stage in known}
    return Weights(
        made_of=made_of, found=found, expected=expected, is_of_same=known.get("made_of") == made_of
    )


def _code(profile: Profile) -> dict[str, str]:
    """The digests of all code that the weights depend on, the simulators' and the recipe's too."""
    digests = digests_of_modules([*modules_in("qinglan.simulators"), "qinglan.runs.cpu"])
    for stage in (*_STAGES_BEFORE, *_STAGES):
        digests |= code_of(f"qinglan.tasks.{stage}")
    recipe_module = type(get_recipe(profile.recipe)).__module__
    if module_path(recipe_module):
        digests |= code_of(recipe_module)
    return digests
