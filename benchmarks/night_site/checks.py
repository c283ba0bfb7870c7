"""What must be right in the morning, whatever happened at night."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from night_site.faults import Fault, told_of
from night_site.site import PROFILE, Site
from qinglan.runs.artifacts import MANIFEST, StageResult
from qinglan.runs.run import RUN_FILE, runs_of

DISK_MB = 250.0
"""What a site of this size may come to, its databases and logs included."""


@dataclass
class Night:
    """How one night went."""

    number: int
    fault: str
    state: str
    attempts: int
    """Flow runs and retries that it took."""
    seconds: float
    rows: int
    """In the morning's dataset, failed ones included; 0 where the night's run failed."""
    paid: int
    """Answers of teacher and judge."""
    paid_twice: int
    disk_mb: float
    trained: bool
    wrong: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For the results' file."""
        return asdict(self)


def look(site: Site, night: Night, fault: Fault, runs: list[dict[str, Any]]) -> list[str]:
    """What is wrong this morning; nothing, one hopes."""
    wrong = []
    scheduled = [run for run in runs if run["auto_scheduled"]]
    if len(scheduled) != 1:
        wrong.append(f"the schedule fired {len(scheduled)} times")
    if night.state not in fault.states:
        wrong.append(
            f"the run ended {night.state}: {runs[-1]['state']['message'] if runs else 'there is none'}"
        )
    if night.state == "COMPLETED" and night.rows != site.rows:
        wrong.append(f"{night.rows} rows in the dataset, {site.rows} in the workbook")
    if night.state == "FAILED" and runs and not told_of(site, runs[-1]["name"]):
        wrong.append("nobody was told of the failure")
    if night.paid_twice > fault.asked_again:
        wrong.append(
            f"{night.paid_twice} answers paid for twice, at most {fault.asked_again} were under way"
        )
    if hanging := [run["name"] for run in site.unfinished()]:
        wrong.append(f"not ended: {', '.join(hanging)}")
    if orphans := strays(site):
        wrong.append(f"orphans: {'; '.join(orphans)}")
    if night.disk_mb > DISK_MB:
        wrong.append(f"{night.disk_mb:.0f} MB on disk")
    return wrong


def strays(site: Site) -> list[str]:
    """Processes of the site that `qinglan up` did not start, or whose parent is gone."""
    assert site.up is not None
    own = {site.up.pid} | {child.pid for child in site.up.children(recursive=True)}
    found = []
    for process in site.family():
        if process.pid not in own:
            try:
                found.append(" ".join(process.cmdline())[:120])
            except psutil.Error:
                continue
    return found


def rows_read(site: Site, flow_run_id: str) -> int:
    """What the finished refresh of this flow run read from the workbook."""
    for directory in runs_of(site.runs, PROFILE, ("refresh",)):
        state = json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))
        if state["finished"] and state["flow_run_id"] == flow_run_id:
            return StageResult.read(directory / "ingest" / MANIFEST).rows_in
    return 0


def trainings(site: Site) -> int:
    """Finished ones so far."""
    states = [
        json.loads((path / RUN_FILE).read_text())
        for path in runs_of(site.runs, PROFILE, ("train",))
    ]
    return sum(state["finished"] for state in states)
