"""`qinglan dataset`: a tenant's dataset versions, what changed between two; workbooks of public
data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from qinglan.cli.common import ProfileOption, SetOption, err, facts_table, out, say
from qinglan.config import load_profile
from qinglan.errors import ConfigError
from qinglan.text import NONE, count, number, one_line, usd, without_controls

if (
    TYPE_CHECKING
):  # each costs much of a second to import, which --help and other commands need not wait for
    from qinglan.data.versions import Version

app = typer.Typer(no_args_is_help=True, help="Dataset versions, and workbooks of public data.")
_VERSION_HELP = "A version's id, a unique prefix, or `latest`."


@app.command("list")
def list_versions(profile: ProfileOption = "embedded", set_: SetOption = None) -> None:
    """The tenant's versions, the newest first."""
    from qinglan.data.versions import last_training, tenant_folder, versions_of

    loaded = load_profile(profile, set_ or ())
    versions, trained = versions_of(loaded), last_training(loaded)
    if not versions:
        raise ConfigError(
            f"{tenant_folder(loaded)}: no dataset version yet; run `qinglan run refresh` first"
        )
    table = Table(
        "version",
        "created (UTC)",
        "parent",
        "rows",
        "ok",
        "train",
        "drift",
        box=None,
        pad_edge=False,
    )
    for version in versions:
        drift = "" if version.drift is None else "; ".join(version.drift.warnings) or "none"
        mark = " (trained)" if trained and trained.version == version.id else ""
        table.add_row(
            version.id + mark,
            version.created[:16].replace("T", " "),
            version.parent or NONE,
            *(count(version.counts.get(name)) for name in ("rows", "ok", "train_ok")),
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

    found = find_version(load_profile(profile, set_ or ()), version)
    if row is not None:
        out.print(_lineage(found, row))
        return
    out.print(Markdown(without_controls((found.directory / CARD).read_text(encoding="utf-8"))))
    say(f"Files: {found.directory}")


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
        raise ConfigError(
            f"dataset version {new.id}: is the tenant's first, so there is none to compare it with"
        )
    old = find_version(loaded, a or new.parent)
    found = diff(old, new)
    changes = f"{count(found.added)} rows added, {count(found.removed)} removed, {count(found.changed)} changed"
    say(f"{found.a} → {found.b}: {changes}, {count(found.unchanged)} as they were")
    for what, n in found.what.items():
        say(f"  {what}: {count(n)}")
    if not found.examples:
        return
    ids = {change.row_id for change in found.examples}
    rows = find_rows(old, ids) | find_rows(new, ids)
    table = Table(box=None, pad_edge=False)
    for head in ("", "row", "source", "question", "rewrite", "what"):
        longest = 19 if head == "what" else None  # worse_than_original
        table.add_column(
            head, no_wrap=head in ("", "row", "source"), overflow="fold", min_width=longest
        )
    for change in found.examples:
        row = rows[change.row_id]
        verdict = ", ".join(change.what) or row.reason or f"ok, {row.split}"
        cells = (change.kind, change.row_id, row.source, row.query, row.target or NONE, verdict)
        lines = map(one_line, cells)
        table.add_row(*(Text(line if len(line) <= 40 else f"{line[:39]}…") for line in lines))
    out.print(table)


@app.command("import")
def import_file(
    layout: Annotated[Literal["flashrag", "medical-r1"], typer.Argument(help="How its rows look.")],
    file: Annotated[
        Path, typer.Argument(help="A .jsonl file, or a .json file that holds one list.")
    ],
    workbook: Annotated[Path, typer.Option("--out", help="The workbook to write.")],
) -> None:
    """Write a workbook for answer_judge (flashrag) or medical (medical-r1) from rows in a public
    layout."""
    from qinglan.data.public_layouts import import_rows

    lines, rows, left_out = import_rows(layout, file, workbook, lambda line: say(line, err))
    say(
        f"{workbook}: {count(lines)} lines of {count(rows)} rows; {count(left_out)} rows were left out"
    )


@app.command("judge-pairs")
def write_judge_pairs(
    workbook: Annotated[Path, typer.Option("--out", help="The workbook to write.")],
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's id, a unique prefix, or `latest`.")
    ] = "latest",
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Write a workbook for passage_judge: what a run's RL found, and what its judge said of it;
    nothing is asked."""
    from qinglan.evaluation.judge_pairs import write_pairs

    name, kinds = write_pairs(load_profile(profile, set_ or ()), run, workbook)
    say(
        f"{workbook}: passages of run {name}: {', '.join(f'{count(n)} {what}' for what, n in kinds.items())}"
    )


def _lineage(version: "Version", row_id: str) -> Table:
    from qinglan.data.versions import INDEX, find_rows
    from qinglan.rows import top1_of

    if (row := find_rows(version, {row_id}).get(row_id)) is None:
        index = version.directory / INDEX
        raise ConfigError(
            f"dataset version {version.id}: has no row `{row_id}`; ids are in {index}"
        )
    ranks = [  # a dash where nothing is to be found
        str(found.rank(row.gold_id) or "missed") if found and row.gold_id is not None else NONE
        for found in (row.original_retrieved, row.answer_retrieved)
    ]
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
        "top-1 score": f"{number(top1_of(row.original_retrieved))} → {number(top1_of(row.answer_retrieved))}",
        "gold document's rank": " → ".join(ranks),
        "judge": number(row.judge_score, 2),
        "run": version.run_id,
    }
    return facts_table(facts.items())
