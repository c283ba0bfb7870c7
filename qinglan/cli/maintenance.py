"""`qinglan doctor`, `deploy`, `clean-up`, `backup`, `restore` and `forget`: the maintenance of a
site."""

import re
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from qinglan.cli.common import ProfileOption, SetOption, figures_table, out, say
from qinglan.config import FlowName, load_profile
from qinglan.errors import ConfigError, StageError
from qinglan.rows import normalise
from qinglan.text import size

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
    """Check machine, files, keys, services and devices before anything is spent; takes under 30
    s."""
    from qinglan.ops.doctor import examine

    found: list[dict[str, Any]] = []
    for group, check, seconds in examine(
        load_profile(profile, set_ or ()), flow, may_pay=paid_probe, deploys=deploys
    ):
        status = "problem" if check.problem else "note" if check.note else "fine"
        if not as_json:
            if not found or found[-1]["group"] != group:
                out.print(f"[bold]{group}[/bold]", highlight=False)
            out.print(_MARKS[status], end=" ", highlight=False)
            text = check.problem or ": ".join(text for text in (check.detail, check.note) if text)
            say(text if text.startswith(check.name) else f"{check.name}: {text}")
        found.append(
            {"group": group, **asdict(check), "status": status, "seconds": round(seconds, 2)}
        )
    problems = sum(finding["status"] == "problem" for finding in found)
    if as_json:
        data = {"profile": profile, "flow": flow, "is_ready": not problems, "findings": found}
        out.print_json(data=data, ensure_ascii=False, highlight=False)
    if problems:
        raise ConfigError(f"{problems} of the checks failed")


def deploy(profile: ProfileOption = "embedded", set_: SetOption = None) -> None:
    """Register work pools, deployments and this profile's automations on Prefect's server."""
    from qinglan.ops.prefect.deploy import deploy_site

    deploy_site(load_profile(profile, set_ or ()), say)


def clean_up(
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove old runs, checkpoints, flow runs and logs of a profile; what a registered model needs
    stays."""
    from qinglan.ops import cleanup

    cleaned = cleanup.clean_up(load_profile(profile, set_ or ()), dry_run=dry_run, say=say)
    for kept in cleaned.kept:
        if dry_run:
            say(f"stays: {kept.line}")
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
    """Keep ledger, datasets, verdicts, MLflow's and Prefect's databases and runs, while the site
    works."""
    from qinglan.ops.backup.making import make_backup

    made = make_backup(load_profile(profile, set_ or ()), folder, say, runs=runs)
    for reason, count in Counter(each.reason for each in made.left_out).most_common():
        say(f"left out: {count:,} × {reason}")
    for what in made.elsewhere:
        say(f"not in it: {what}")
    if not runs:
        say("not in it: the runs, as --no-runs says")
    files = f"{len(made.entries):,} files, {size(made.bytes)}"
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
    for what in restored.elsewhere:
        say(f"restore it yourself: {what}")
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
    """Remove people's rows from everything that the site keeps, for good, and let none of them come
    back."""
    from qinglan.data.sources.files import encoding_of
    from qinglan.ops import forget as forgetting

    rows = row or []
    if wrong := [each for each in rows if not re.fullmatch("[0-9a-f]{16}", each)]:
        raise ConfigError(
            f"--row {wrong[0]!r}: is no row's id; rows.jsonl and the column 行编号 of rows.xlsx have it"
        )
    questions = text_file.read_text(encoding_of(text_file)).split("\n") if text_file else []
    if not (rows or any(map(normalise, questions))):
        raise ConfigError("forget: nothing is named; give --row ID or --text-file FILE")
    loaded = load_profile(profile, set_ or ())

    def show(found: forgetting.Forgotten) -> None:
        table = figures_table(["store", "removed"], ["count"])
        for (store, what), removed in found.removed.items():
            table.add_row(store, what, f"{removed:,}")
        out.print(table)
        say("Outside our reach:")
        for line in found.outside:
            say(f"  {line}")

    if dry_run or not yes:
        show(forgetting.forget(loaded, rows, questions, say, dry_run=True))
        if dry_run:
            return
        if not sys.stdin.isatty():
            raise ConfigError(
                "forget: nothing was removed; give --yes, as there is no terminal to ask at"
            )
        typer.confirm("Remove this for good?", abort=True)
    show(done := forgetting.forget(loaded, rows, questions, say))
    if done.notes:
        raise StageError(f"forget: {len(done.notes)} not done: {done.notes[0]}")
