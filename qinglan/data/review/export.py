"""Exports a sample of a run's rows to a review workbook, and counts the verdicts that hold for a
run."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from qinglan.clients.roles import site_ledger
from qinglan.config import Profile
from qinglan.data.review import fingerprint, load_reviews
from qinglan.data.review.sample import ANSWER_STRATA, STRATA, draw_sample
from qinglan.data.review.workbook import cell_of, write_sample
from qinglan.data.sources.records import without_illegal
from qinglan.data.workbook_writer import MAX_CELL_CHARS
from qinglan.errors import ConfigError, StageError, TeacherError
from qinglan.grading.judge_answers import read_json
from qinglan.recipes import Recipe, get_recipe
from qinglan.recipes.prompting import one_line
from qinglan.recipes.requests import judge_requests
from qinglan.rows import Row
from qinglan.runs.artifacts import MANIFEST, StageResult, read_jsonl
from qinglan.runs.run import find_run, runs_of, stage_of

_STAGES = ("dataset", "select", "validate")


class ReviewExport(NamedTuple):
    run: str
    stage: str
    rows: int
    strata: dict[str, int]
    """Rows by stratum's title; a row may be in several."""
    reviewed: int
    """Rows of the run that were left out because a verdict holds for them."""
    unfaithful: int
    """Rows left out because a cell can't hold their text, so that an import could not identify the
    reviewed answer."""


def export_reviews(
    profile: Profile, run_name: str, path: Path, size: int, *, again: bool = False
) -> ReviewExport:
    """Write a sample of at most `size` rows, of those reviewed before only with `again`; in bounded
    memory."""
    if path.suffix.lower() != ".xlsx":
        raise ConfigError(f"{path}: a review workbook is an .xlsx file; let its name end in that")
    if path.exists():  # it may hold hours of a reviewer's work
        raise ConfigError(
            f"{path}: exists already; choose another --out, or delete it once its verdicts are imported"
        )
    run, stage = newest_rows(profile, run_name)
    left_out: Counter[str] = Counter()
    recipe = get_recipe(profile.recipe)
    rows = _candidates(rows_of(profile, run, stage), profile, again, left_out)
    sample = draw_sample(
        rows, profile.select, size, STRATA if recipe.grader.retrieves else ANSWER_STRATA
    )
    if not sample.rows:
        n = left_out["reviewed"]
        reviewed = f"; {n:,} of its rows are reviewed, --again takes them too" if n else ""
        raise StageError(f"run {run.name}: its {stage.stage} stage has nothing to review{reviewed}")
    said = judge_reasons(profile, [row for row, _ in sample.rows])
    write_sample(
        path, sample, recipe, said, tenant=profile.tenant.id, source=f"{run.name} / {stage.stage}"
    )
    counts = Counter(stratum.title for sampled in sample.rows for stratum in sampled.strata)
    strata = {
        stratum.title: counts[stratum.title] for stratum in sample.strata if counts[stratum.title]
    }
    return ReviewExport(
        run.name,
        stage.stage,
        len(sample.rows),
        strata,
        left_out["reviewed"],
        left_out["unfaithful"],
    )


class VerdictCounts(NamedTuple):
    run: str
    hold: int
    changed: int
    """The row has another answer now."""
    absent: int
    """The run has no such row."""


def count_verdicts(profile: Profile, run_name: str) -> VerdictCounts:
    """Compare the tenant's verdicts with the newest data stage of a run."""
    run, stage = newest_rows(profile, run_name)
    reviews = load_reviews(profile)
    here = [row for row in rows_of(profile, run, stage) if row.id in reviews.by_row]
    hold = sum(reviews.current(row) is not None for row in here)
    return VerdictCounts(run.name, hold, len(here) - hold, len(reviews.by_row) - len(here))


def newest_rows(profile: Profile, name: str) -> tuple[Path, StageResult]:
    """A run's directory and the last of its data stages that is finished, its rows verified.

    `latest` is the profile's newest refresh or pipeline with a finished data stage, whatever ran
    since.
    """
    runs = profile.paths.runs
    named = (
        runs_of(runs, profile.name, ("refresh", "pipeline"))
        if name == "latest"
        else [find_run(runs, name)]
    )
    finished = (
        (run, stage) for run in named for stage in _STAGES if (run / stage / MANIFEST).exists()
    )
    run, stage = next(finished, (None, ""))
    if run is None:
        advice = f"name a refresh or pipeline of {profile.name} with --run"
        raise ConfigError(
            f"run `{name}`: has no finished data stage ({', '.join(_STAGES)}); {advice}"
        )
    result = stage_of(run, stage)
    result.artifacts["rows"].verify()
    return run, result


def rows_of(profile: Profile, run: Path, stage: StageResult) -> Iterator[Row]:
    """The stage's rows, one at a time; ConfigError where they are another tenant's than the
    profile's."""
    for row in read_jsonl(stage.path("rows"), Row):
        if row.tenant != profile.tenant.id:
            mine = f"profile `{profile.name}` is of tenant `{profile.tenant.id}`"
            raise ConfigError(
                f"run {run.name}: holds rows of tenant `{row.tenant}`, but {mine}; give its --profile"
            )
        yield row


def judge_reasons(profile: Profile, rows: Collection[Row]) -> dict[str, str]:
    """By row id, why the judge gave its score, as it answered at that time; without rows whose
    answer gives none."""
    request, found = judge_requests(profile), {}
    judged = (
        (row.id, request(row, row.answer or "")) for row in rows if row.judge_score is not None
    )
    asked = {row_id: one.request_hash for row_id, one in judged if one}
    with site_ledger(profile) if asked else nullcontext() as ledger:
        answers = ledger.get_many(asked.values()) if ledger else {}
    for row_id, request_hash in asked.items():
        with suppress(KeyError, TeacherError):
            reason = read_json(answers[request_hash].text, "reason")
            if isinstance(reason, str) and reason.strip():
                found[row_id] = one_line(reason).strip()[:200]
    return found


def _candidates(
    rows: Iterable[Row], profile: Profile, again: bool, left_out: Counter[str]
) -> Iterator[Row]:
    reviews, recipe = load_reviews(profile), get_recipe(profile.recipe)
    for row in rows:
        if not again and reviews.current(row):
            left_out["reviewed"] += 1
        elif not _survives(row, recipe):
            left_out["unfaithful"] += 1
        else:
            yield row


def _survives(row: Row, recipe: Recipe) -> bool:
    """Would an import of the workbook find this row and this answer?"""
    texts = {name: _read_back(getattr(row, name)) for name in ("query", "profile", "history")}
    inputs = {name: _read_back(text) for name, text in row.inputs.items()}
    same_answer = fingerprint(_read_back(row.answer or "")) == fingerprint(row.answer)
    return same_answer and cell_of(
        row.model_copy(update=texts | {"inputs": inputs}), recipe
    ) == cell_of(row, recipe)


def _read_back(text: str) -> str:
    return without_illegal(text).replace("\r\n", "\n").replace("\r", "\n")[:MAX_CELL_CHARS]
