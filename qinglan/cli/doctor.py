"""`qinglan doctor`: what is wrong, and what to do about it, before anything is spent."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from qinglan.cli.common import ProfileOption, SetOption, out, say
from qinglan.config import FlowName, load_profile
from qinglan.errors import ConfigError

if TYPE_CHECKING:  # each costs much of a second to import, which --help and other commands need not wait for
    from qinglan.ops.doctor import DoctorFinding


def doctor(
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
    flow: Annotated[FlowName, typer.Option(help="Check what this flow needs.")] = "pipeline",
    paid_probe: Annotated[
        bool, typer.Option("--paid-probe", help="Also make one short call to each paid chat service.")
    ] = False,
    deploys: Annotated[
        bool, typer.Option("--deploy", help="Also what only `qinglan up` and `qinglan deploy` need: the webhook.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check machine, files, keys, services and devices before anything is spent; takes under 30 s."""
    from qinglan.ops.doctor import DoctorFinding, examine

    found: list[DoctorFinding] = []
    for finding in examine(load_profile(profile, set_ or ()), flow, may_pay=paid_probe, deploys=deploys):
        if not as_json:
            _print(finding, is_new_group=not found or found[-1].group != finding.group)
        found.append(finding)
    problems = sum(finding.check.problem is not None for finding in found)
    if as_json:
        out.print_json(data=_as_data(profile, flow, found), ensure_ascii=False, highlight=False)
    if problems:
        raise ConfigError(f"{problems} of the checks failed")


def _print(finding: "DoctorFinding", *, is_new_group: bool) -> None:
    check = finding.check
    if is_new_group:
        out.print(f"[bold]{finding.group}[/bold]", highlight=False)
    mark = "[red]✗[/red]" if check.problem else "[yellow]![/yellow]" if check.note else "[green]✓[/green]"
    out.print(f"{mark} ", end="", highlight=False)
    text = check.problem or ": ".join(text for text in (check.detail, check.note) if text)
    say(text if text.startswith(check.name) else f"{check.name}: {text}")


def _as_data(profile: str, flow: FlowName, found: "list[DoctorFinding]") -> dict[str, object]:
    return {
        "profile": profile,
        "flow": flow,
        "is_ready": not any(finding.check.problem for finding in found),
        "findings": [
            {
                "group": finding.group,
                **asdict(finding.check),
                "status": "problem" if finding.check.problem else "note" if finding.check.note else "fine",
                "seconds": round(finding.seconds, 2),
            }
            for finding in found
        ],
    }
