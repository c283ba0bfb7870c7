"""Ours: the refresh flow's first two stages inside a Prefect flow.

    python qinglan_flow.py OUT.json fresh|reuse KEY=VALUE...

Ledger, manifest and MLflow are there as always. Writes when each stage began and ended by the
system's monotonic clock, and what came out. An error that the user would see on one line (the
budget is spent) is a result too.
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


def run_stages(settings: tuple[str, ...], fresh: bool, result: dict[str, Any]) -> None:
    """The stages, as qinglan/flows/refresh.py calls them; fills `result`."""
    from qinglan.tasks import distill, ingest, session

    with session.open_session(PROFILE, settings, "refresh", fresh=fresh) as opened:
        result["run"] = opened.run.id
        result["ingest_start_s"] = time.monotonic()
        ingested = ingest.ingest_workbook(opened.run, opened.workbook)
        result["distill_start_s"] = time.monotonic()
        try:
            distilled = distill.distill_rows(opened.run, opened.services, ingested)
            result["rows_in"] = distilled.rows_in
            result["rows_out"] = distilled.rows_out
            result["dropped"] = distilled.dropped
        finally:
            result["distill_end_s"] = time.monotonic()


def main(out: Path, fresh: bool, settings: tuple[str, ...]) -> None:
    """Run, then write."""
    result: dict[str, Any] = {}
    profile = load_profile(PROFILE, settings)
    with prefect_for(profile.paths.state, print) as wait_for_prefect:
        # As `qinglan run` does, everything is loaded while the server starts.
        with without_garbage_collection():
            # Prefect reads the server's address when it is imported.
            from prefect import flow

            from qinglan.tasks import distill, ingest, session  # noqa: F401
            from qinglan.tasks.stage import tracker_of

            tracker_of(profile)
        wait_for_prefect()
        try:
            flow(run_stages, name="distill", validate_parameters=False)(settings, fresh, result)
        except QinglanError as error:
            result["error"] = str(error).splitlines()[0]
        finally:
            session.send_what_is_queued()
    out.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "fresh", tuple(sys.argv[3:]))
