"""Checks in the morning: what must be right, whatever happened at night."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from night_site.faults import Fault, is_reported
from night_site.site import PROFILE, Json, Site
from qinglan.runs.artifacts import MANIFEST, StageResult
from qinglan.runs.run import RUN_FILE, runs_of

DISK_MB = 250.0
"""Most that a site of this size may come to, its databases and logs included."""


@dataclass
class Night:
    """The figures of one night."""

    number: int
    fault: str
    state: str
    attempts: int
    """Flow runs and retries that it took."""
    seconds: float
    rows: int
    """Rows in the morning's dataset, failed ones included; 0 where the night's run failed."""
    paid: int
    """Answers of teacher and judge."""
    paid_twice: int
    disk_mb: float
    trained: bool
    wrong: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The form of the results' file."""
        return asdict(self)


def look(site: Site, night: Night, fault: Fault, runs: list[Json]) -> list[str]:
    """A sentence for each thing that is wrong this morning."""
    wrong = [*wrong_with_run(site, night, fault, runs)]
    if night.paid_twice > fault.asked_again:
        wrong.append(
            f"{night.paid_twice} answers paid for twice, at most {fault.asked_again} were under way"
        )
    hanging = [run["name"] for run in site.unfinished()]
    if hanging:
        wrong.append(f"not ended: {', '.join(hanging)}")
    orphans = strays(site)
    if orphans:
        wrong.append(f"orphans: {'; '.join(orphans)}")
    if night.disk_mb > DISK_MB:
        wrong.append(f"{night.disk_mb:.0f} MB on disk")
    return wrong


def wrong_with_run(site: Site, night: Night, fault: Fault, runs: list[Json]) -> list[str]:
    """A sentence for each thing that is wrong with the night's flow runs."""
    wrong = []
    scheduled = [run for run in runs if run["auto_scheduled"]]
    if len(scheduled) != 1:
        wrong.append(f"the schedule fired {len(scheduled)} times")
    if night.state not in fault.states:
        message = runs[-1]["state"]["message"] if runs else "there is none"
        wrong.append(f"the run ended {night.state}: {message}")
    if night.state == "COMPLETED" and night.rows != site.rows:
        wrong.append(f"{night.rows} rows in the dataset, {site.rows} in the workbook")
    if night.state == "FAILED" and runs and not is_reported(site, runs[-1]["name"]):
        wrong.append("nobody was told of the failure")
    return wrong


def strays(site: Site) -> list[str]:
    """Processes of the site that `qinglan up` did not start, or whose parent is gone."""
    assert site.up is not None
    # A process whose parent died is no descendant any more: that is how orphans are found.
    own_ids = {site.up.pid} | {child.pid for child in site.up.children(recursive=True)}
    command_lines = []
    for process in site.family():
        if process.pid not in own_ids:
            try:
                command_lines.append(" ".join(process.cmdline())[:120])
            except psutil.Error:
                continue
    return command_lines


def rows_read(site: Site, flow_run_id: str) -> int:
    """Rows that the finished refresh of this flow run read from the workbook."""
    for directory in runs_of(site.runs, PROFILE, ("refresh",)):
        state = json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))
        if state["finished"] and state["flow_run_id"] == flow_run_id:
            return StageResult.read(directory / "ingest" / MANIFEST).rows_in
    return 0


def trainings(site: Site) -> int:
    """Number of finished trainings so far."""
    finished = 0
    for directory in runs_of(site.runs, PROFILE, ("train",)):
        finished += json.loads((directory / RUN_FILE).read_text())["finished"]
    return finished
