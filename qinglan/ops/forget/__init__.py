"""`qinglan forget`: takes people's rows out of everything that a site keeps, and leaves tombstones.

First the rows that the tombstones name are looked for, with their texts (`finding`). Then each
file is cleaned (`cleaners`): it loses the records that have a row's id or one of its texts, be
they a line, a table's row or an entry of a JSON list, and elsewhere the text itself. A text that
another row has too stays there; short texts go with their records only. Last, what describes the
changed files is put right (`repair`).
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from qinglan.config import Profile
from qinglan.data.forgotten import Tombstones
from qinglan.data.sources.records import InputColumns
from qinglan.ops.forget.cleaners import clean_file
from qinglan.ops.forget.cleaners.ledger import drop_answers, has_ledger
from qinglan.ops.forget.finding import NamedRows, find_rows, texts_of_other_rows
from qinglan.ops.forget.notes import noting
from qinglan.ops.forget.outside import places_outside
from qinglan.ops.forget.repair import repair_site
from qinglan.ops.forget.stores import SiteFiles, site_files
from qinglan.ops.forget.traces import Traces
from qinglan.ops.prefect.server import LOCK_FILE, find_server
from qinglan.ops.up.site import only_one
from qinglan.recipes import get_recipe
from qinglan.runs.locks import removal_lock, require_no_process
from qinglan.runs.processes import Say


@dataclass
class Forgotten:
    """The result for a site: all that was removed or, in a dry run, would be."""

    removed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How much, by store and kind."""
    outside: list[str] = field(default_factory=list)
    """Where these rows may be as well."""
    notes: list[str] = field(default_factory=list)
    """What could not be done."""

    @property
    def lines(self) -> list[str]:
        return [f"{count:,} {kind} in {store}" for (store, kind), count in self.removed.items()]


def forget(
    profile: Profile,
    rows: Collection[str],
    questions: Collection[str],
    say: Say,
    *,
    dry_run: bool = False,
) -> Forgotten:
    """Remove the rows with these ids, and all that ask one of these questions.

    ConfigError where a process runs that could write them again.
    """
    state = profile.paths.state.resolve()
    runs = profile.paths.runs.resolve()
    tombstones = Tombstones.read(state).adding(rows, questions)
    if dry_run:
        return apply(profile, tombstones, questions, dry_run=True)
    runs.mkdir(parents=True, exist_ok=True)
    with only_one(state, say):
        require_no_process(state, runs, but=state / LOCK_FILE)
        request_log = profile.serve.request_log.folder
        if request_log:
            require_no_process(Path(request_log), pattern="*.partial")
        with removal_lock(runs, exclusive=True):
            return apply(profile, tombstones, questions)


def apply(
    profile: Profile,
    tombstones: Tombstones,
    questions: Collection[str] = (),
    *,
    dry_run: bool = False,
) -> Forgotten:
    """Remove what tombstones name from a site that stands still, and keep them."""
    forgotten = Forgotten()
    if not tombstones.lines:
        return forgotten
    state = profile.paths.state
    columns = InputColumns.of(profile.data, get_recipe(profile.recipe).INPUTS).names
    files = site_files(profile)
    # A mistake in the server's address shows before anything is removed.
    server = find_server(state)
    if not dry_run:
        tombstones.write(state)

    named_rows = find_rows(tombstones, questions, profile.tenant.id, columns, files)
    if not dry_run:
        # By its id a row's other traces are found, also once its question is gone.
        tombstones.adding(named_rows.ids).write(state)
    shared_texts = texts_of_other_rows(named_rows, columns, files)
    if shared_texts:
        forgotten.outside.append(
            f"other rows: {len(shared_texts)} of the texts are theirs as well, and stay in them"
        )
    traces = named_rows.traces(named_rows.texts - shared_texts, columns)

    _clean_ledger(profile, named_rows, traces, forgotten, dry_run=dry_run)
    lost_rows = _clean_files(files, traces, forgotten, dry_run=dry_run)
    if not dry_run:
        repair_site(files.paths, lost_rows, forgotten.notes)
    forgotten.outside += places_outside(profile, server, lost_rows, named_rows.review_files)
    return forgotten


def _clean_ledger(
    profile: Profile, named_rows: NamedRows, traces: Traces, forgotten: Forgotten, *, dry_run: bool
) -> None:
    if not has_ledger(profile):
        return
    forgotten.outside.append(
        "the ledger: answers to wordings, contexts and prompts that no file here has"
    )
    with noting("ledger", forgotten.notes):
        answers = drop_answers(profile, named_rows, traces.texts, forgotten.notes, dry_run=dry_run)
        forgotten.removed["ledger", "answers"] += answers


def _clean_files(
    files: SiteFiles, traces: Traces, forgotten: Forgotten, *, dry_run: bool
) -> dict[Path, int]:
    """Clean each file; returns those that lost something, with the number of rows that each lost.

    Databases are not among them, as nothing names their digests.
    """
    lost_rows: dict[Path, int] = {}
    for path in files.paths:
        with noting(path, forgotten.notes):
            removal = clean_file(path, traces, dry_run=dry_run)
            if not removal.count:
                continue
            forgotten.removed[files.store_of(path), removal.kind] += removal.count
            if removal.rows is not None:
                lost_rows[path] = removal.rows
    return lost_rows
