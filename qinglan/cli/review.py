"""`qinglan review`: export a sample of answers for reviewers, and import their verdicts."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.table import Table
from rich.text import Text

from qinglan.cli.common import ProfileOption, SetOption, err, out, say
from qinglan.config import load_profile
from qinglan.errors import WorkbookError
from qinglan.text import NONE, one_line

# It takes much of a second to import.
if TYPE_CHECKING:
    from qinglan.data.review.workbook import ControlResult

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

    export = export_reviews(load_profile(profile, set_ or ()), run, workbook, rows, again=again)
    say(f"{workbook}: {export.rows:,} rows of run {export.run} ({export.stage})")
    for title, count in export.strata.items():
        say(f"  {title} {count:,}")
    if export.reviewed:
        say(f"left out: {export.reviewed:,} rows that are reviewed (--again takes them too)")
    if export.unfaithful:
        say(f"left out: {export.unfaithful:,} rows whose text a cell can't hold as it is")


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
    # All or nothing, so that the corrected workbook can be imported as a whole.
    if sheet.problems:
        for line in sheet.problems[:_SHOWN_PROBLEMS]:
            say(line, err)
        hidden = len(sheet.problems) - _SHOWN_PROBLEMS
        cells = f"{len(sheet.problems)} cells to correct"
        if hidden > 0:
            cells += f", {hidden} of them not shown"
        raise WorkbookError(f"{file}: {cells}; nothing was imported")
    added = add_reviews(loaded, sheet.reviews)
    counts = Counter(review.verdict for review in sheet.reviews)
    verdicts = (
        f"{counts['accept']:,} accepted, {counts['reject']:,} rejected, "
        f"{counts['correct']:,} corrected"
    )
    say(f"{file}: {verdicts}; {sheet.without_verdict:,} rows without a verdict")
    if sheet.lone_comments:
        say(f"not kept: {sheet.lone_comments:,} comments on rows without a verdict")
    new = f"{len(added.new):,} new, {added.replaced:,} of them against an earlier verdict"
    say(f"{store_path(loaded)}: {new}; {added.unchanged:,} unchanged")
    if sheet.control.reviewed:
        _say_error_rate(sheet.control)


def _say_error_rate(control: "ControlResult") -> None:
    """Say how often reviewers found the rows wrong that were drawn at random."""
    low, high = control.interval
    without_verdict = control.rows - control.reviewed
    bias = ""
    if without_verdict:
        bias = f"; {without_verdict:,} control rows have no verdict, which may bias it"
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
    """Group what the judge said about weak answers, and propose rules and red-team cases.

    Nothing is asked or set.
    """
    from qinglan.evaluation.judge_reasons import group_reasons, proposed_cases, proposed_rules

    loaded = load_profile(profile, set_ or ())
    name, groups = group_reasons(loaded, run, rows, below)
    if not groups:
        answers = f"an answer that scored below {below:g}"
        say(f"run {name}: the ledger has no reason of the judge about {answers}")
        return
    table = Table("Rows", "Judge", "Reason", "For example")
    for group in groups:
        worst_row = group.rows[0]
        example = f"{one_line(worst_row.query)} → {one_line(worst_row.answer or '')}"
        score = f"{worst_row.judge_score:g}"
        table.add_row(f"{len(group.rows):,}", score, Text(group.reason), Text(example))
    out.print(table)
    say("Put into the profile what holds; until then the judge's words change nothing:\n")
    say(proposed_rules(groups))
    if cases:
        proposals = proposed_cases(groups, loaded)
        with cases.open("x", encoding="utf-8") as file:
            for case in proposals:
                file.write(f"{case.model_dump_json(exclude_defaults=True)}\n")
        general = sum(case.checks.gold_in_top3 is None for case in proposals)
        hint = "delete what is none, then name the file as evaluate.red_team"
        if general:
            to_do = "write there what to check, such as keeps_any"
            hint = f"{general} take any good text, so {to_do}; {hint}"
        say(f"{cases}: {len(proposals)} cases; {hint}")


@app.command("list")
def list_reviews(
    run: Annotated[
        str | None, typer.Option(help="Also count the verdicts that hold for this run.")
    ] = None,
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Count the current verdicts, by tenant and reviewer."""
    from qinglan.data.review import Reviews, read_store, store_path
    from qinglan.data.review.export import count_verdicts
    from qinglan.rows import ReviewVerdict

    loaded = load_profile(profile, set_ or ())
    table = Table("Tenant", "Reviewer", "Accepted", "Rejected", "Corrected", "Last import")
    for path in sorted(store_path(loaded).parent.glob("*.jsonl")):
        reviews_by_reviewer = defaultdict(list)
        for review in Reviews(read_store(path)).by_row.values():
            reviews_by_reviewer[review.reviewer].append(review)
        for reviewer, reviews in sorted(reviews_by_reviewer.items()):
            counts = Counter(review.verdict for review in reviews)
            numbers = [f"{counts[verdict]:,}" for verdict in get_args(ReviewVerdict)]
            # A cell's text may look like markup.
            names = (Text(reviews[0].tenant), Text(one_line(reviewer) or NONE))
            table.add_row(*names, *numbers, max(review.imported_at for review in reviews))
    if not table.rows:
        say(f"no reviews under {store_path(loaded).parent}; start with `qinglan review export`")
        return
    out.print(table)
    if run:
        counted = count_verdicts(loaded, run)
        changed = f"{counted.changed:,} no longer (another answer)"
        absent = f"{counted.absent:,} are of rows that it does not have"
        say(f"run {counted.run}: {counted.hold:,} verdicts hold, {changed}, {absent}")
