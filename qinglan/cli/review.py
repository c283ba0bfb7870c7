"""`qinglan review`: export a sample of answers for reviewers, and import their verdicts."""

from collections import Counter
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.table import Table
from rich.text import Text

from qinglan.cli.common import ProfileOption, SetOption, err, out, say
from qinglan.config import load_profile
from qinglan.errors import WorkbookError
from qinglan.text import NONE, one_line

app = typer.Typer(
    no_args_is_help=True, help="Review rewrites by hand: export a workbook, import its verdicts."
)
_SHOWN_PROBLEMS = 20


@app.command("export")
def export_workbook(
    run: Annotated[str, typer.Option(help="A run's id, a unique prefix, or `latest`.")] = "latest",
    rows: Annotated[int, typer.Option(min=1, max=10_000, help="Rows to review.")] = 200,
    workbook: Annotated[Path, typer.Option("--out", help="The workbook to write.")] = Path(
        "review.xlsx"
    ),
    again: Annotated[
        bool, typer.Option("--again", help="Also rows whose answer was reviewed before.")
    ] = False,
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Write a workbook of rows for reviewers: the risky ones, and some at random."""
    from qinglan.data.review.export import export_reviews

    done = export_reviews(load_profile(profile, set_ or ()), run, workbook, rows, again=again)
    say(f"{workbook}: {done.rows:,} rows of run {done.run} ({done.stage})")
    for title, count in done.strata.items():
        say(f"  {title} {count:,}")
    if done.reviewed:
        say(f"left out: {done.reviewed:,} rows that are reviewed (--again takes them too)")
    if done.unfaithful:
        say(f"left out: {done.unfaithful:,} rows whose text a cell can't hold as it is")


@app.command("import")
def import_workbook(
    file: Annotated[Path, typer.Argument(help="A filled-in review workbook.")],
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Store the verdicts of a workbook; with one bad cell in it, none of them."""
    from qinglan.data.review import add_reviews, store_path
    from qinglan.data.review.workbook import read_sheet

    loaded = load_profile(profile, set_ or ())
    sheet = read_sheet(file, loaded)
    if sheet.problems:
        for line in sheet.problems[:_SHOWN_PROBLEMS]:
            say(line, err)
        more = len(sheet.problems) - _SHOWN_PROBLEMS
        shown = f"{len(sheet.problems)} cells to correct" + (
            f", {more} of them not shown" if more > 0 else ""
        )
        raise WorkbookError(f"{file}: {shown}; nothing was imported")
    added = add_reviews(loaded, sheet.reviews)
    n = Counter(review.verdict for review in sheet.reviews)
    counts = f"{n['accept']:,} accepted, {n['reject']:,} rejected, {n['correct']:,} corrected"
    say(f"{file}: {counts}; {sheet.without_verdict:,} rows without a verdict")
    if sheet.lone_comments:
        say(f"not kept: {sheet.lone_comments:,} comments on rows without a verdict")
    counts = f"{len(added.new):,} new, {added.replaced:,} of them against an earlier verdict"
    say(f"{store_path(loaded)}: {counts}; {added.unchanged:,} unchanged")
    control = sheet.control
    if control.reviewed:
        low, high = control.interval
        silent = control.rows - control.reviewed
        bias = f"; {silent:,} control rows have no verdict, which may bias it" if silent else ""
        wrong = f"{control.wrong:,} of {control.reviewed:,} control rows rejected or corrected"
        rate = f"{control.wrong / control.reviewed:.1%} [{low:.1%}, {high:.1%}] (Wilson, 95%)"
        say(f"error rate of the rows that teach: {wrong} = {rate}{bias}")


@app.command("reasons")
def show_reasons(
    run: Annotated[str, typer.Option(help="A run's id, a unique prefix, or `latest`.")] = "latest",
    rows: Annotated[
        int, typer.Option(min=1, max=10_000, help="At most so many, those with the lowest scores.")
    ] = 200,
    below: Annotated[
        float, typer.Option(min=0, max=5.1, help="Only answers with a lower score.")
    ] = 4.0,
    cases: Annotated[
        Path | None, typer.Option(help="A file to write with red-team cases to choose from.")
    ] = None,
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Group what the judge said about weak answers, and propose rules and red-team cases; nothing
    is asked or set."""
    from qinglan.evaluation.judge_reasons import group_reasons, proposed_cases, proposed_rules

    loaded = load_profile(profile, set_ or ())
    name, groups = group_reasons(loaded, run, rows, below)
    if not groups:
        say(
            f"run {name}: the ledger has no reason of the judge about an answer that scored below {below:g}"
        )
        return
    table = Table("Rows", "Judge", "Reason", "For example")
    for group in groups:
        worst = group.rows[0]
        example = f"{one_line(worst.query)} → {one_line(worst.answer or '')}"
        table.add_row(
            f"{len(group.rows):,}", f"{worst.judge_score:g}", *map(Text, (group.reason, example))
        )
    out.print(table)
    say("Put into the profile what holds; until then the judge's words change nothing:\n")
    say(proposed_rules(groups))
    if cases:
        proposed = proposed_cases(groups, loaded)
        with cases.open("x", encoding="utf-8") as file:
            file.writelines(f"{case.model_dump_json(exclude_defaults=True)}\n" for case in proposed)
        general = sum(case.checks.gold_in_top3 is None for case in proposed)
        hint = (
            f"{general} take any good text, so write there what to check, such as keeps_any; "
            * bool(general)
        )
        say(
            f"{cases}: {len(proposed)} cases; {hint}delete what is none, then name the file as evaluate.red_team"
        )


@app.command("list")
def list_reviews(
    run: Annotated[
        str | None, typer.Option(help="Also count the verdicts that hold for this run.")
    ] = None,
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Count the current verdicts, by tenant and reviewer."""
    from qinglan.data.review import Reviews, ReviewVerdict, read_store, store_path
    from qinglan.data.review.export import count_verdicts

    loaded = load_profile(profile, set_ or ())
    table = Table("Tenant", "Reviewer", "Accepted", "Rejected", "Corrected", "Last import")
    for path in sorted(store_path(loaded).parent.glob("*.jsonl")):
        current = list(Reviews(read_store(path)).by_row.values())
        for reviewer in sorted({review.reviewer for review in current}):
            mine = [review for review in current if review.reviewer == reviewer]
            counts = Counter(review.verdict for review in mine)
            numbers = (f"{counts[verdict]:,}" for verdict in get_args(ReviewVerdict))
            who = (
                Text(mine[0].tenant),
                Text(one_line(reviewer) or NONE),
            )  # a cell's text may look like markup
            table.add_row(*who, *numbers, max(review.imported_at for review in mine))
    if not table.rows:
        say(f"no reviews under {store_path(loaded).parent}; start with `qinglan review export`")
        return
    out.print(table)
    if run:
        found = count_verdicts(loaded, run)
        changed, absent = (
            f"{found.changed:,} no longer (another answer)",
            f"{found.absent:,} are of rows",
        )
        say(
            f"run {found.run}: {found.hold:,} verdicts hold, {changed}, {absent} that it does not have"
        )
