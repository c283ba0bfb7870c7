"""Maintenance of a site: `qinglan doctor`, `deploy`, `clean-up`, `backup`, `restore`, `forget`."""

import re
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qinglan.cli.common import ProfileOption, SetOption, figures_table, out, say
from qinglan.config import FlowName, load_profile
from qinglan.errors import ConfigError, StageError
from qinglan.rows import normalise
from qinglan.text import size

# They take much of a second to import.
if TYPE_CHECKING:
    from qinglan.ops.checks import Check
    from qinglan.ops.forget import Forgotten

_MARKS = {"problem": "[red]✗[/red]", "note": "[yellow]![/yellow]", "fine": "[green]✓[/green]"}


def doctor(
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
    flow: Annotated[FlowName, typer.Option(help="Check what this flow needs.")] = "pipeline",
    paid_probe: Annotated[
        bool,
        typer.Option("--paid-probe", help="Also make one short call to each paid chat service."),
    ] = False,
    deploys: Annotated[
        bool, typer.Option("--deploy", help="Also the webhook, which deploying needs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check machine, files, keys, services and devices before anything is spent, in under 30 s."""
    from qinglan.ops.doctor import examine

    loaded = load_profile(profile, set_ or ())
    findings: list[dict[str, Any]] = []
    last_group = None
    # Said one by one: the slowest check takes half a minute.
    for group, check, seconds in examine(loaded, flow, may_pay=paid_probe, deploys=deploys):
        status = _status_of(check)
        if not as_json:
            if group != last_group:
                out.print(f"[bold]{group}[/bold]", highlight=False)
            out.print(_MARKS[status], end=" ", highlight=False)
            say(_line_about(check))
        last_group = group
        findings.append(
            {"group": group, **asdict(check), "status": status, "seconds": round(seconds, 2)}
        )
    problems = sum(finding["status"] == "problem" for finding in findings)
    if as_json:
        data = {"profile": profile, "flow": flow, "is_ready": not problems, "findings": findings}
        out.print_json(data=data, ensure_ascii=False, highlight=False)
    if problems:
        raise ConfigError(f"{problems} of the checks failed")


def _status_of(check: "Check") -> str:
    """The key of a check's result in `_MARKS`."""
    if check.problem:
        return "problem"
    return "note" if check.note else "fine"


def _line_about(check: "Check") -> str:
    """The result of a check, with its name in front."""
    text = check.problem or ": ".join(text for text in (check.detail, check.note) if text)
    return text if text.startswith(check.name) else f"{check.name}: {text}"


def deploy(profile: ProfileOption = "embedded", set_: SetOption = None) -> None:
    """Register work pools, deployments and this profile's automations on Prefect's server."""
    from qinglan.ops.prefect.deploy import deploy_site

    deploy_site(load_profile(profile, set_ or ()), say)


def clean_up(
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove old runs, checkpoints, flow runs and logs; what a registered model needs stays."""
    from qinglan.ops import cleanup

    cleaned = cleanup.clean_up(load_profile(profile, set_ or ()), dry_run=dry_run, say=say)
    if dry_run:
        for decision in cleaned.kept:
            say(f"stays: {decision.line}")
    say(cleaned.sentence)
    if cleaned.notes:
        raise StageError(f"clean-up: {len(cleaned.notes)} not done: {cleaned.notes[0]}")


def backup(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A new folder, on another disk if possible.")
    ],
    runs: Annotated[
        bool, typer.Option(help="The runs' folders too: checkpoints and models make them large.")
    ] = True,
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Keep ledger, datasets, verdicts, MLflow's and Prefect's databases and runs of a live site."""
    from qinglan.ops.backup.making import make_backup

    description = make_backup(load_profile(profile, set_ or ()), folder, say, runs=runs)
    reasons = Counter(path.reason for path in description.left_out)
    for reason, number_of_paths in reasons.most_common():
        say(f"left out: {number_of_paths:,} × {reason}")
    for store in description.elsewhere:
        say(f"not in it: {store}")
    if not runs:
        say("not in it: the runs, as --no-runs says")
    files = f"{len(description.entries):,} files, {size(description.bytes)}"
    say(f"{folder.expanduser().resolve()}: {files}; keep it as confidential as the site itself")


def restore(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `qinglan backup` made.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Put aside what is there; nothing is deleted.")
    ] = False,
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Bring a backup back to where it was taken, after checking all of it."""
    from qinglan.ops.backup.restoring import restore_backup

    restored = restore_backup(load_profile(profile, set_ or ()), folder, say, replace=replace)
    for store in restored.elsewhere:
        say(f"restore it yourself: {store}")
    files = f"{len(restored.entries):,} files, {size(restored.bytes)}"
    say(f"restored {files} of {restored.made_at:%Y-%m-%d %H:%M} UTC, Qinglan {restored.qinglan}")


def forget(
    row: Annotated[
        list[str] | None, typer.Option(help="A row's id; give it again for each row.")
    ] = None,
    text_file: Annotated[
        Path | None, typer.Option(help="A text file with a question a line.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Remove people's rows from all that the site keeps, for good, and let none come back."""
    from qinglan.data.sources.files import encoding_of
    from qinglan.ops import forget as forgetting

    row_ids = row or []
    for row_id in row_ids:
        if not re.fullmatch("[0-9a-f]{16}", row_id):
            hint = "rows.jsonl and the column 行编号 of rows.xlsx have it"
            raise ConfigError(f"--row {row_id!r}: is no row's id; {hint}")
    questions = text_file.read_text(encoding_of(text_file)).split("\n") if text_file else []
    if not (row_ids or any(map(normalise, questions))):
        raise ConfigError("forget: nothing is named; give --row ID or --text-file FILE")
    loaded = load_profile(profile, set_ or ())
    # Nothing brings back what is removed, so users see first what that would be.
    if dry_run or not yes:
        _print_forgotten(forgetting.forget(loaded, row_ids, questions, say, dry_run=True))
        if dry_run:
            return
        if not sys.stdin.isatty():
            hint = "give --yes, as there is no terminal to ask at"
            raise ConfigError(f"forget: nothing was removed; {hint}")
        typer.confirm("Remove this for good?", abort=True)
    forgotten = forgetting.forget(loaded, row_ids, questions, say)
    _print_forgotten(forgotten)
    if forgotten.notes:
        raise StageError(f"forget: {len(forgotten.notes)} not done: {forgotten.notes[0]}")


def _print_forgotten(forgotten: "Forgotten") -> None:
    """Print what was removed, or would be, from which store, and what lies outside our reach."""
    table = figures_table(["store", "removed"], ["count"])
    for (store, kind), removed in forgotten.removed.items():
        table.add_row(store, kind, f"{removed:,}")
    out.print(table)
    say("Outside our reach:")
    for line in forgotten.outside:
        say(f"  {line}")
