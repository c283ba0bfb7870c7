"""`qinglan dataset`: a tenant's dataset versions and how two differ; workbooks of public data."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from qinglan.cli.common import ProfileOption, SetOption, err, facts_table, out, say
from qinglan.config import load_profile
from qinglan.errors import ConfigError
from qinglan.text import NONE, count, number, one_line, usd, without_controls

# Each costs much of a second to import, which --help and other commands need not wait for.
if TYPE_CHECKING:
    from qinglan.data.versions import RowChange, Version
    from qinglan.rows import Retrieved, Row

app = typer.Typer(no_args_is_help=True, help="Dataset versions, and workbooks of public data.")
_VERSION_HELP = "A version's id, a unique prefix, or `latest`."


@app.command("list")
def list_versions(profile: ProfileOption = "embedded", set_: SetOption = None) -> None:
    """The tenant's versions, the newest first."""
    from qinglan.data.versions import last_training, tenant_folder, versions_of

    loaded = load_profile(profile, set_ or ())
    versions = versions_of(loaded)
    training = last_training(loaded)
    if not versions:
        hint = "run `qinglan run refresh` first"
        raise ConfigError(f"{tenant_folder(loaded)}: no dataset version yet; {hint}")
    headings = ("version", "created (UTC)", "parent", "rows", "ok", "train", "drift")
    table = Table(*headings, box=None, pad_edge=False)
    for version in versions:
        is_trained = training is not None and training.version == version.id
        counts = [count(version.counts.get(name)) for name in ("rows", "ok", "train_ok")]
        drift = ""
        if version.drift is not None:
            drift = "; ".join(version.drift.warnings) or "none"
        table.add_row(
            f"{version.id} (trained)" if is_trained else version.id,
            version.created[:16].replace("T", " "),
            version.parent or NONE,
            *counts,
            drift,
        )
    out.print(table)


@app.command()
def show(
    version: Annotated[str, typer.Argument(help=_VERSION_HELP)] = "latest",
    row: Annotated[
        str | None, typer.Option(help="Only this row: where it came from and what became of it.")
    ] = None,
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Print a version's data card, or the lineage of one row."""
    from rich.markdown import Markdown

    from qinglan.data.versions import CARD, find_version

    dataset = find_version(load_profile(profile, set_ or ()), version)
    if row is not None:
        out.print(_lineage(dataset, row))
        return
    card = (dataset.directory / CARD).read_text(encoding="utf-8")
    out.print(Markdown(without_controls(card)))
    say(f"Files: {dataset.directory}")


@app.command("diff")
def show_diff(
    a: Annotated[
        str | None, typer.Argument(help=f"{_VERSION_HELP} The parent of B if not given.")
    ] = None,
    b: Annotated[str, typer.Argument(help=_VERSION_HELP)] = "latest",
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Print which rows came, went or changed from version A to version B."""
    from qinglan.data.versions import diff, find_rows, find_version

    loaded = load_profile(profile, set_ or ())
    new = find_version(loaded, b)
    if a is None and not new.parent:
        problem = "is the tenant's first, so there is none to compare it with"
        raise ConfigError(f"dataset version {new.id}: {problem}")
    old = find_version(loaded, a or new.parent)
    difference = diff(old, new)
    counts = (
        f"{count(difference.added)} rows added, {count(difference.removed)} removed, "
        f"{count(difference.changed)} changed, {count(difference.unchanged)} as they were"
    )
    say(f"{difference.a} → {difference.b}: {counts}")
    for field, number_of_rows in difference.what.items():
        say(f"  {field}: {count(number_of_rows)}")
    if difference.examples:
        ids = {change.row_id for change in difference.examples}
        # A changed row is shown as the new version has it.
        rows = find_rows(old, ids) | find_rows(new, ids)
        out.print(_changes_table(difference.examples, rows))


@app.command("import")
def import_file(
    layout: Annotated[Literal["flashrag", "medical-r1"], typer.Argument(help="How its rows look.")],
    file: Annotated[
        Path, typer.Argument(help="A .jsonl file, or a .json file that holds one list.")
    ],
    workbook: Annotated[Path, typer.Option("--out", help="The workbook to write.")],
) -> None:
    """Write a workbook for answer_judge (flashrag) or medical (medical-r1) from public data."""
    from qinglan.data.public_layouts import import_rows

    lines, rows, left_out = import_rows(layout, file, workbook, lambda line: say(line, err))
    counts = f"{count(lines)} lines of {count(rows)} rows; {count(left_out)} rows were left out"
    say(f"{workbook}: {counts}")


@app.command("judge-pairs")
def write_judge_pairs(
    workbook: Annotated[Path, typer.Option("--out", help="The workbook to write.")],
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's id, a unique prefix, or `latest`.")
    ] = "latest",
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Write a workbook for passage_judge: what a run's RL found, and what its judge said of it.

    Nothing is asked.
    """
    from qinglan.evaluation.judge_pairs import write_pairs

    name, counts = write_pairs(load_profile(profile, set_ or ()), run, workbook)
    passages = ", ".join(f"{count(n)} {kind}" for kind, n in counts.items())
    say(f"{workbook}: passages of run {name}: {passages}")


def _changes_table(changes: "Sequence[RowChange]", rows: "dict[str, Row]") -> Table:
    """The changed rows, with cells that are cut to 40 characters."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "row", "source"):
        table.add_column(heading, no_wrap=True, overflow="fold")
    for heading in ("question", "rewrite"):
        table.add_column(heading, overflow="fold")
    # As wide as the reason worse_than_original.
    table.add_column("what", overflow="fold", min_width=19)
    for change in changes:
        row = rows[change.row_id]
        verdict = ", ".join(change.what) or row.reason or f"ok, {row.split}"
        cells = (change.kind, change.row_id, row.source, row.query, row.target or NONE, verdict)
        table.add_row(*map(_short_cell, cells))
    return table


def _short_cell(text: str) -> Text:
    line = one_line(text)
    return Text(line if len(line) <= 40 else f"{line[:39]}…")


def _lineage(version: "Version", row_id: str) -> Table:
    """A table of facts: the source of one row, and what became of it."""
    from qinglan.data.versions import INDEX, find_rows
    from qinglan.rows import top1_of

    row = find_rows(version, {row_id}).get(row_id)
    if row is None:
        index = version.directory / INDEX
        problem = f"has no row `{row_id}`; ids are in {index}"
        raise ConfigError(f"dataset version {version.id}: {problem}")
    ranks = [_rank(row, passages) for passages in (row.original_retrieved, row.answer_retrieved)]
    scores = [number(top1_of(row.original_retrieved)), number(top1_of(row.answer_retrieved))]
    facts = {
        "row": row.id,
        "source": row.source,
        "question": row.query,
        "profile": row.profile,
        "history": row.history,
        "gold document": row.gold_id or NONE,
        "rewrite": row.answer or NONE,
        "corrected": row.corrected or NONE,
        "ledger request": row.answer_request or NONE,
        "cost": usd(row.answer_cost_usd),
        "verdict": f"failed: {row.reason}" if row.status == "failed" else "ok",
        "review": row.review or NONE,
        "split": row.split or NONE,
        "top-1 score": " → ".join(scores),
        "gold document's rank": " → ".join(ranks),
        "judge": number(row.judge_score, 2),
        "run": version.run_id,
    }
    return facts_table(facts.items())


def _rank(row: "Row", retrieved: "Retrieved | None") -> str:
    """The gold document's rank among retrieved passages; a dash where there is nothing to find."""
    if not retrieved or row.gold_id is None:
        return NONE
    return str(retrieved.rank(row.gold_id) or "missed")
