"""Count of the models that were evaluated on one test split.

Each evaluation is another chance for a model that is no better. Rows keep their split while new
ones arrive, so a test split is known by its rows: two that share half of a fixed sample of them are
one. `evaluated.json` lies beside the dataset versions, where no clean-up of runs removes it.
"""

import heapq
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock
from pydantic import BaseModel, ValidationError

from qinglan.config import Profile
from qinglan.data.versions import LOCK, tenant_folder
from qinglan.errors import ArtifactError, first_line
from qinglan.rows import hash_fraction
from qinglan.runs.artifacts import write_json
from qinglan.runs.schema_version import dump_record, read_record

_FILE = "evaluated.json"
_SAMPLED = 100
"""Test rows that a split is known by."""


class SplitUse(BaseModel, frozen=True, extra="forbid"):
    """One evaluation."""

    models: str
    """Digest of the evaluated models."""
    run_id: str
    at: str
    sample: list[str]
    """Ids of test rows: the same of equal splits, and mostly the same of one that grew."""


class SplitUses(BaseModel, extra="forbid"):
    """`evaluated.json`: all of a tenant's evaluations, the oldest first."""

    evaluations: list[SplitUse] = []


def note_evaluation(profile: Profile, run_id: str, models: str, test: Iterable[str]) -> int:
    """Record an evaluation, and count those of other models on the same split before.

    Args:
        models: digest of the models.
        test: ids of the test rows.
    """
    root = tenant_folder(profile)
    root.mkdir(parents=True, exist_ok=True)
    sample = sorted(heapq.nsmallest(_SAMPLED, test, key=hash_fraction))
    # Two runs of a tenant may end at the same time.
    with FileLock(root / LOCK):
        path = root / _FILE
        evaluations = _read_evaluations(path)
        same_split = [use for use in evaluations if _is_same_split(use, sample)]
        earlier_models = list(dict.fromkeys(use.models for use in same_split))
        # Evaluated once more, these models count no further chance.
        if models in earlier_models:
            return earlier_models.index(models)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        use = SplitUse(models=models, run_id=run_id, at=at, sample=sample)
        write_json(path, dump_record(SplitUses(evaluations=[*evaluations, use])))
        return len(earlier_models)


def _read_evaluations(path: Path) -> list[SplitUse]:
    if not path.exists():
        return []
    try:
        return read_record(SplitUses, path).evaluations
    except ValidationError as error:
        hint = "remove it, and the count starts anew"
        raise ArtifactError(f"{path}: not readable ({first_line(error)}); {hint}") from error


def _is_same_split(use: SplitUse, sample: list[str]) -> bool:
    common = set(use.sample).intersection(sample)
    return 2 * len(common) >= len(use.sample)
