"""Exports a sample of a run's rows for review, and counts the verdicts that hold for a run."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from qinglan.clients.roles import site_ledger
from qinglan.config import Profile
from qinglan.data.grade_columns import grade_columns
from qinglan.data.review import fingerprint, load_reviews
from qinglan.data.review.columns import row_id_cell
from qinglan.data.review.sample import ReviewSample, draw_sample
from qinglan.data.review.writing import write_sample
from qinglan.data.sheets import MAX_CELL_CHARS
from qinglan.data.sources.records import without_illegal
from qinglan.errors import ConfigError, StageError, TeacherError
from qinglan.grading.judge_answers import read_json
from qinglan.recipes import Recipe, get_recipe
from qinglan.recipes.prompting import one_line
from qinglan.recipes.requests import judge_requests
from qinglan.rows import Row
from qinglan.runs.artifacts import MANIFEST, StageResult, read_jsonl
from qinglan.runs.run import find_run, runs_of, stage_of

_STAGES = ("dataset", "select", "validate")
_MAX_EXPLANATION_CHARS = 200


class ReviewExport(NamedTuple):
    """The outcome of an export."""

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
    """Write a sample of at most `size` rows, in bounded memory.

    Rows that were reviewed before are among them only with `again`.
    """
    if path.suffix.lower() != ".xlsx":
        raise ConfigError(f"{path}: a review workbook is an .xlsx file; let its name end in that")
    # The file may hold hours of a reviewer's work.
    if path.exists():
        raise ConfigError(
            f"{path}: exists already; choose another --out, "
            "or delete it once its verdicts are imported"
        )
    run, stage = newest_rows(profile, run_name)
    left_out: Counter[str] = Counter()
    recipe = get_recipe(profile.recipe)
    rows = _candidates(rows_of(profile, run, stage), profile, again, left_out)
    sample = draw_sample(rows, profile.select, size, grade_columns(recipe).strata)
    reviewed = left_out["reviewed"]
    if not sample.rows:
        hint = ""
        if reviewed:
            hint = f"; {reviewed:,} of its rows are reviewed, --again takes them too"
        raise StageError(f"run {run.name}: its {stage.stage} stage has nothing to review{hint}")
    explanations = judge_reasons(profile, [row for row, _ in sample.rows])
    source = f"{run.name} / {stage.stage}"
    write_sample(path, sample, recipe, explanations, tenant=profile.tenant.id, source=source)
    return ReviewExport(
        run=run.name,
        stage=stage.stage,
        rows=len(sample.rows),
        strata=_rows_by_stratum(sample),
        reviewed=reviewed,
        unfaithful=left_out["unfaithful"],
    )


def _rows_by_stratum(sample: ReviewSample) -> dict[str, int]:
    """Numbers of rows by the titles of their strata, without strata that have none."""
    drawn = sample.drawn
    return {stratum.title: drawn[stratum.name] for stratum in sample.strata if drawn[stratum.name]}


class VerdictCounts(NamedTuple):
    """The tenant's verdicts, counted by what they mean for a run."""

    run: str
    hold: int
    changed: int
    """Verdicts on rows that have another answer now."""
    absent: int
    """Verdicts on rows that the run does not have."""


def count_verdicts(profile: Profile, run_name: str) -> VerdictCounts:
    """Compare the tenant's verdicts with the newest data stage of a run."""
    run, stage = newest_rows(profile, run_name)
    reviews = load_reviews(profile)
    hold = 0
    changed = 0
    for row in rows_of(profile, run, stage):
        if row.id not in reviews.by_row:
            continue
        if reviews.current(row) is None:
            changed += 1
        else:
            hold += 1
    absent = len(reviews.by_row) - hold - changed
    return VerdictCounts(run.name, hold, changed, absent)


def newest_rows(profile: Profile, name: str) -> tuple[Path, StageResult]:
    """A run's directory and the last of its data stages that is finished, its rows verified.

    `latest` is the profile's newest refresh or pipeline with a finished data stage, whatever ran
    since.
    """
    if name == "latest":
        runs = runs_of(profile.paths.runs, profile.name, ("refresh", "pipeline"))
    else:
        runs = [find_run(profile.paths.runs, name)]
    # The last stage comes first: it has the rows as far as the run has brought them.
    for run in runs:
        for stage in _STAGES:
            if (run / stage / MANIFEST).exists():
                result = stage_of(run, stage)
                result.artifacts["rows"].verify()
                return run, result
    advice = f"name a refresh or pipeline of {profile.name} with --run"
    raise ConfigError(f"run `{name}`: has no finished data stage ({', '.join(_STAGES)}); {advice}")


def rows_of(profile: Profile, run: Path, stage: StageResult) -> Iterator[Row]:
    """The stage's rows, one at a time; ConfigError where they belong to another tenant."""
    for row in read_jsonl(stage.path("rows"), Row):
        if row.tenant != profile.tenant.id:
            raise ConfigError(
                f"run {run.name}: holds rows of tenant `{row.tenant}`, "
                f"but profile `{profile.name}` is of tenant `{profile.tenant.id}`; "
                "give its --profile"
            )
        yield row


def judge_reasons(profile: Profile, rows: Collection[Row]) -> dict[str, str]:
    """The judge's reasons for its scores, as it gave them at that time, by row id.

    Rows are left out whose judge's answer gives no reason.
    """
    request_of = judge_requests(profile)
    request_hashes: dict[str, str] = {}
    for row in rows:
        if row.judge_score is None:
            continue
        request = request_of(row, row.answer or "")
        if request:
            request_hashes[row.id] = request.request_hash
    if not request_hashes:
        return {}
    with site_ledger(profile) as ledger:
        answers = ledger.get_many(request_hashes.values())
    reasons: dict[str, str] = {}
    for row_id, request_hash in request_hashes.items():
        # The ledger may lack an old answer, and an answer may be unreadable.
        with suppress(KeyError, TeacherError):
            reason = read_json(answers[request_hash].text, "reason")
            if isinstance(reason, str) and reason.strip():
                reasons[row_id] = one_line(reason).strip()[:_MAX_EXPLANATION_CHARS]
    return reasons


def _candidates(
    rows: Iterable[Row], profile: Profile, again: bool, left_out: Counter[str]
) -> Iterator[Row]:
    """The rows that may be reviewed; those that may not are counted in `left_out`."""
    reviews = load_reviews(profile)
    recipe = get_recipe(profile.recipe)
    for row in rows:
        if not again and reviews.current(row):
            left_out["reviewed"] += 1
        elif not _survives(row, recipe):
            left_out["unfaithful"] += 1
        else:
            yield row


def _survives(row: Row, recipe: Recipe) -> bool:
    """Would an import of the workbook find this row and this answer?"""
    if fingerprint(_read_back(row.answer or "")) != fingerprint(row.answer):
        return False
    inputs = {name: _read_back(text) for name, text in row.inputs.items()}
    read_row = row.with_question(
        query=_read_back(row.query),
        profile=_read_back(row.profile),
        history=_read_back(row.history),
    ).with_inputs(inputs)
    return row_id_cell(read_row, recipe) == row_id_cell(row, recipe)


def _read_back(text: str) -> str:
    """The text that an import reads from a cell into which this one was written."""
    # XML reads every end of a line as \n.
    lines_ended_alike = without_illegal(text).replace("\r\n", "\n").replace("\r", "\n")
    return lines_ended_alike[:MAX_CELL_CHARS]
