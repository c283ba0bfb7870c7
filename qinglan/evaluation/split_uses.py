"""How often models were evaluated on one test split: each evaluation is another chance for a model
that is no better.

Rows keep their split while new ones arrive, so a test split is known by its rows: two that share
half of a fixed sample of them are one. `evaluated.json` lies beside the dataset versions, where no
clean-up of runs removes it.
"""

import heapq
from collections.abc import Iterable
from datetime import UTC, datetime

from filelock import FileLock
from pydantic import BaseModel, ValidationError

from qinglan.config import Profile
from qinglan.data.versions import LOCK, tenant_folder
from qinglan.errors import ArtifactError, first_line
from qinglan.rows import hash_fraction
from qinglan.runs.artifacts import write_json
from qinglan.runs.schema_version import dump_record, read_record

_FILE, _SAMPLED = "evaluated.json", 100


class SplitUse(BaseModel, frozen=True, extra="forbid"):
    """One evaluation."""

    models: str
    """Digest of what was evaluated."""
    run_id: str
    at: str
    sample: list[str]
    """Ids of test rows: the same of equal splits, and mostly the same of one that grew."""


class SplitUses(BaseModel, extra="forbid"):
    """`evaluated.json`: all of a tenant's evaluations, the oldest first."""

    evaluations: list[SplitUse] = []


def note_evaluation(profile: Profile, run_id: str, models: str, test: Iterable[str]) -> int:
    """Record an evaluation of `models` on these row ids, and count those of other models on the
    same split before."""
    root = tenant_folder(profile)
    root.mkdir(parents=True, exist_ok=True)
    sample = sorted(heapq.nsmallest(_SAMPLED, test, key=hash_fraction))
    with FileLock(root / LOCK):
        path, known = root / _FILE, list[SplitUse]()
        if path.exists():
            try:
                known = read_record(SplitUses, path).evaluations
            except ValidationError as error:
                hint = "remove it, and the count starts anew"
                raise ArtifactError(
                    f"{path}: not readable ({first_line(error)}); {hint}"
                ) from error
        same = [
            each
            for each in known
            if 2 * len({*each.sample}.intersection(sample)) >= len(each.sample)
        ]
        earlier = list(dict.fromkeys(each.models for each in same))
        if models in earlier:
            return earlier.index(models)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        uses = SplitUses(
            evaluations=[*known, SplitUse(models=models, run_id=run_id, at=at, sample=sample)]
        )
        write_json(path, dump_record(uses))
        return len(earlier)
