"""A run's results as pandas DataFrames: `qinglan.run("latest").arms()`."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd

from qinglan.clients.roles import site_ledger
from qinglan.errors import ArtifactError
from qinglan.evaluation.models import Report, ReportPart
from qinglan.ledger.records import Attempt
from qinglan.runs.run import find_run, read_run, stage_of
from qinglan.statistics import Comparison


class RunFrames:
    """One run's results.

    A frame is read into memory whole; what is too large for that is JSON lines in the stage's
    folder.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def report(self) -> Report:
        """`report.json`; ArtifactError where the run has none yet."""
        return Report.read(self.directory / "report.json")

    def rows(self, stage: str = "validate") -> pd.DataFrame:
        """The rows that a stage left, failed rows with their `reason`.

        The columns are the fields of `Row`, nested ones with a dot (`inputs.reference`). The stages
        `evaluate` and `compare` have a line for each `arm` and question `row_id`, with the fields
        of `ArmRow`.

        Raises:
            ArtifactError: the stage left no rows.
        """
        artifacts = stage_of(self.directory, stage).artifacts
        arms = []
        for name, artifact in artifacts.items():
            if name.startswith("arm_"):
                arms.append(_lines(artifact.path).assign(arm=name.removeprefix("arm_")))
        if arms:
            return pd.concat(arms, ignore_index=True)
        if "rows" not in artifacts:
            raise ArtifactError(
                f"run {self.directory.name}: {stage} left no rows; ingest, distill and validate do"
            )
        return _lines(artifacts["rows"].path)

    def arms(self) -> pd.DataFrame:
        """A line for each arm, with its figures in `report.json`.

        A metric's columns are `scores.NAME.mean`, `.n`, `.low` and `.high`.
        """
        figures = self.report.arms
        return pd.DataFrame(map(_flat, figures.values()), index=pd.Index(figures, name="arm"))

    def comparisons(self) -> pd.DataFrame:
        """A line for each pair of arms `a` and `b` and each `metric`.

        The columns are `n` questions in `groups`, `mean_a`, `mean_b`, `diff` (a − b) from `low` to
        `high`, `wins`, `ties`, `losses`, `p_value`, `p_holm`, `detectable_diff` and so on.
        """
        return pd.DataFrame(map(_flat, self.report.comparisons))

    def samples(self) -> pd.DataFrame:
        """RL's samples in the order in which they were scored.

        The columns are `row_id`, the text, its reward and the parts of that.
        """
        # Another run's samples, where the stage was reused.
        run_id = stage_of(self.directory, "rl").run_id
        path = self.directory.with_name(run_id) / "rl" / "samples.jsonl"
        # Lines about outages have no text.
        return _lines(path, with_key="text")

    def ledger(self) -> pd.DataFrame:
        """The requests that this run sent, failed ones too.

        The columns are `created_s`, `request_hash`, `run_id`, `role`, `model`, `outcome`,
        `latency_ms`, `cost_usd`, and `estimated` where the cost is the most that it can have been.
        """
        run = read_run(self.directory)
        with site_ledger(run.profile) as ledger:
            attempts = [attempt.model_dump() for attempt in ledger.attempts("run_id", run.id)]
        # A frame without a line has its columns all the same.
        return pd.DataFrame(attempts, columns=list(Attempt.model_fields))


def run(name: str = "latest", runs: Path | str = "runs") -> RunFrames:
    """A run by its id, a unique prefix, its path or `latest`.

    Args:
        runs: the folder `paths.runs`.

    Raises:
        ConfigError: no run fits.
    """
    return RunFrames(find_run(Path(runs), name))


def _lines(path: Path, with_key: str = "") -> pd.DataFrame:
    """A frame of a file's JSON lines, or of those that have this key."""
    try:
        with path.open(encoding="utf-8") as stream:
            objects = [json.loads(line) for line in stream]
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing; run its stage again") from None
    if with_key:
        objects = [line for line in objects if with_key in line]
    return pd.json_normalize(objects)


def _flat(part: ReportPart | Comparison) -> dict[str, Any]:
    """Nested values by dotted names; an interval's ends in two columns."""
    (record,) = pd.json_normalize(part.model_dump()).to_dict(orient="records")
    flat = {str(name): value for name, value in record.items()}
    for name in list(flat):
        if name.endswith("ci95"):
            low, high = flat.pop(name) or (math.nan, math.nan)
            prefix = name.removesuffix("ci95")
            flat[f"{prefix}low"] = low
            flat[f"{prefix}high"] = high
    return flat
