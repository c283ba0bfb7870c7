"""Ours: the refresh flow's first two stages inside a Prefect flow, with ledger, manifest and MLflow
as always.

    python qinglan_flow.py OUT.json fresh|reuse KEY=VALUE...

Writes when each stage began and ended by the system's monotonic clock, and what came out. An error
that the user would see on one line (the budget is spent) is a result too.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from qinglan.cli.common import without_garbage_collection
from qinglan.config import load_profile
from qinglan.errors import QinglanError
from qinglan.ops.up.site import prefect_for

PROFILE = "embedded"


def run_stages(settings: tuple[str, ...], fresh: bool, found: dict[str, Any]) -> None:
    """The stages, as flows/refresh.py calls them."""
    from qinglan.tasks import distill, ingest, session

    with session.open_session(PROFILE, settings, "refresh", fresh=fresh) as opened:
        found["run"] = opened.run.id
        found["ingest_start_s"] = time.monotonic()
        ingested = ingest.ingest_workbook(opened.run, opened.workbook)
        found["distill_start_s"] = time.monotonic()
        try:
            done = distill.distill_rows(opened.run, opened.services, ingested)
            found |= {"rows_in": done.rows_in, "rows_out": done.rows_out, "dropped": done.dropped}
        finally:
            found["distill_end_s"] = time.monotonic()


def main(out: Path, fresh: bool, settings: tuple[str, ...]) -> None:
    """Run, then write."""
    found: dict[str, Any] = {}
    profile = load_profile(PROFILE, settings)
    with prefect_for(profile.paths.state, print) as wait_for_prefect:
        with without_garbage_collection():  # what `qinglan run` does while the server starts
            from prefect import flow  # reads where its server is when it is imported

            from qinglan.tasks import distill, ingest, session  # noqa: F401
            from qinglan.tasks.stage import tracker_of

            tracker_of(profile)
        wait_for_prefect()
        try:
            flow(run_stages, name="distill", validate_parameters=False)(settings, fresh, found)
        except QinglanError as error:
            found["error"] = str(error).splitlines()[0]
        finally:
            session.send_what_is_queued()
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "fresh", tuple(sys.argv[3:]))
