"""MLflow: one parent run per pipeline run, a child run per stage.

Always by explicit run ids (MLflow's active run is thread-local) and in batches (one metric at a
time costs 10 ms). The tracking server being away must not cost a training run, but it is said:
errors are logged, not raised, except when the run is opened.
"""

import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag, Span
from mlflow.exceptions import MlflowException
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TraceTagKey

from qinglan.config import Tracking
from qinglan.errors import ConfigError, first_line
from qinglan.runs.artifacts import REFERENCE, Artifact
from qinglan.runs.traces import CallSample, TracedCall

log = logging.getLogger(__name__)
# MLflow's own default is seven tries with back-off: minutes in which the training would go
# unwatched.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
MAX_ARTIFACT_BYTES = 20 * 2**20
"""A larger file is logged by reference: path and digest as tags."""
_QUOTING = frozenset({"card", "card_data", "evaluation", "report", "report_html", "review"})
"""Artifacts that are no files of rows, but quote some."""
# Without it MLflow's page opens for GenAI traces.
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
_UNSAFE = re.compile(r"[^\w./ -]")
"""A character that MLflow refuses in the name of a parameter or metric."""
_MAX_CHARS = 500
"""Longest value of a parameter, and longest name of a dataset."""
_TRACES_PER_REQUEST = 100
_NS_PER_MS = 1e6


def open_client(uri: str) -> MlflowClient:
    """A client of a tracking server or database.

    It shows no progress bars, and no log line for every new table.
    """
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    return MlflowClient(uri)


class Tracker:
    """Writes runs, and what belongs to them, to one tracking server or database."""

    def __init__(self, uri: str, tracking: Tracking, state: Path) -> None:
        try:
            self._client = MlflowClient(uri)
        except MlflowException as error:
            # A database of an earlier MLflow is not migrated by itself.
            raise ConfigError(
                f"tracking.uri: {first_line(error)} (docs/how-to/backup.md)"
            ) from error
        self._uri = uri
        self._tracking = tracking
        self._artifacts = state / "mlartifacts"

    # ---- runs ----

    def start_run(self, name: str, tags: Mapping[str, str], parent: str | None = None) -> str:
        """The id of a new run; raises ConfigError where the tracking server can't be reached."""
        run_tags = dict(tags)
        if parent:
            run_tags["mlflow.parentRunId"] = parent
        try:
            run = self._client.create_run(self._experiment_id(), run_name=name, tags=run_tags)
        except MlflowException as error:
            raise ConfigError(
                f"tracking.uri: MLflow can't be reached: {first_line(error)}"
            ) from error
        return str(run.info.run_id)

    def resume_run(self, run_id: str) -> bool:
        """Set a run that ended early, or whose process was killed, back to running.

        False where MLflow does not know the run.
        """
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            log.warning("MLflow did not continue run %s: %s", run_id, error)
            return False
        return True

    def end_run(self, run_id: str, *, failed: bool = False) -> None:
        with _warning(f"close run {run_id}"):
            self._client.set_terminated(run_id, "FAILED" if failed else "FINISHED")

    def _experiment_id(self) -> str:
        """The id of the profile's experiment, which is made where there is none."""
        name = self._tracking.experiment
        experiment_id = self._find_experiment(name)
        if experiment_id is not None:
            return experiment_id
        try:
            return str(
                self._client.create_experiment(
                    name, artifact_location=self._artifact_location(), tags=_EXPERIMENT_TAGS
                )
            )
        except MlflowException:
            # Another run may have been quicker.
            experiment_id = self._find_experiment(name)
            if experiment_id is None:
                raise
            return experiment_id

    def _find_experiment(self, name: str) -> str | None:
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id) if experiment else None

    def _artifact_location(self) -> str | None:
        """The folder for the files of a database of our own; a server knows where it keeps them."""
        uri = self._tracking.uri or "sqlite:"
        return self._artifacts.resolve().as_uri() if uri.startswith("sqlite:") else None

    # ---- tags, parameters and metrics ----

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def log_params(self, run_id: str, nested: Mapping[str, Any]) -> None:
        """Log settings; nested ones get dotted names."""
        params = []
        for key, value in _flatten(nested):
            params.append(Param(_UNSAFE.sub("_", key), str(value)[:_MAX_CHARS]))
        self._log_batch(run_id, params=params)

    def log_metrics(self, run_id: str, metrics: Mapping[str, float], step: int = 0) -> None:
        self.log_steps(run_id, [(step, metrics)])

    def log_steps(self, run_id: str, steps: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Log the metrics of several steps; values that are no numbers are left out."""
        now_ms = int(time.time() * 1000)
        metrics = []
        for step, values in steps:
            for key, value in values.items():
                if isinstance(value, int | float):
                    metrics.append(Metric(_UNSAFE.sub("_", key), float(value), now_ms, step))
        self._log_batch(run_id, metrics=metrics)

    def _log_batch(self, run_id: str, **entities: Any) -> None:
        """Log any number of entities at once.

        MLflow's client divides them into requests that a server takes.
        """
        with _warning(f"take a batch for run {run_id}"):
            self._client.log_batch(run_id, **entities)

    # ---- artifacts, prompts and datasets ----

    def log_artifact(
        self, run_id: str, name: str, artifact: Artifact, *, refer: bool = False
    ) -> None:
        """Log a small file itself; a directory or a large file by tags alone.

        A file that holds or quotes rows is logged as a reference alone, unless `tracking.rows` is
        `copy`; with `refer` always.
        """
        path = artifact.path
        tags = {f"artifact.{name}.path": str(path), f"artifact.{name}.sha256": artifact.sha256}
        if artifact.rows is not None:
            tags[f"artifact.{name}.rows"] = str(artifact.rows)
        self.set_tags(run_id, tags)
        has_rows = artifact.rows is not None or name in _QUOTING
        if refer or (has_rows and self._tracking.rows == "path"):
            with _warning(f"take the digest of {path.name}"):
                reference = artifact.model_dump(mode="json")
                self._client.log_dict(run_id, reference, f"{path.name}{REFERENCE}")
        elif path.is_file() and path.stat().st_size <= MAX_ARTIFACT_BYTES:
            with _warning(f"take {path.name}"):
                self._client.log_artifact(run_id, str(path))

    def register_prompt(self, name: str, text: str, tags: Mapping[str, str]) -> None:
        """Keep a prompt in MLflow's registry, as a new version where its text changed."""
        with _warning(f"take the prompt {name}"):
            newest = self._client.load_prompt(name, allow_missing=True, cache_ttl_seconds=0)
            if newest is None or newest.template != text:
                self._client.register_prompt(name, text, tags=dict(tags))

    def log_dataset(
        self,
        run_id: str,
        name: str,
        digest: str,
        source: Path,
        context: str,
        profile: Mapping[str, Any],
    ) -> None:
        """Note which dataset a run made or used.

        The run's page links it with all others of that dataset.

        Args:
            run_id: MLflow's id of the run.
            name: the dataset's name.
            digest: its version, at most 36 characters.
            source: its folder.
            context: the run's use of it, such as `training`.
            profile: figures to show beside it.
        """
        dataset = Dataset(
            name=name[:_MAX_CHARS],
            digest=digest,
            source_type="local",
            source=json.dumps({"uri": str(source)}),
            profile=json.dumps(profile, ensure_ascii=False),
        )
        context_tag = InputTag("mlflow.data.context", context)
        with _warning(f"take dataset {digest}"):
            self._client.log_inputs(run_id, [DatasetInput(dataset, [context_tag])])

    # ---- traces ----

    def new_sample(self) -> CallSample:
        """A sample for the calls of a stage's clients, to be given to `log_traces`.

        It takes nothing where MLflow gets no rows, as calls hold questions.
        """
        gets_rows = self._tracking.rows == "copy"
        return CallSample(self._tracking.traces_per_stage if gets_rows else 0)

    def log_traces(self, run_id: str, sample: CallSample) -> None:
        """Write calls as traces of a run.

        All in one request: one by one they take MLflow twice the time.
        """
        spans = list(map(_span, sample.calls()))
        if not spans:
            return
        trace_ids = [span.trace_id for span in spans]
        with _warning(f"take the traces of run {run_id}"):
            TracingClient(self._uri).log_spans(self._experiment_id(), spans)
            for start in range(0, len(trace_ids), _TRACES_PER_REQUEST):
                part = trace_ids[start : start + _TRACES_PER_REQUEST]
                self._client.link_traces_to_run(part, run_id)


def _span(call: TracedCall) -> Span:
    """The only span of a new trace.

    It ends when the call did, and is as long as the call's time on the wire.
    """
    number = uuid4().hex
    trace_id = f"tr-{number}"
    key = SpanAttributeKey
    attributes = call.attributes | {
        key.REQUEST_ID: trace_id,
        key.SPAN_TYPE: call.kind,
        key.INPUTS: call.inputs,
        key.OUTPUTS: call.outputs,
        f"{key.TRACE_TAG_PREFIX}{TraceTagKey.TRACE_NAME}": call.role,
        "latency_ms": call.latency_ms,
    }
    attributes_as_json = {
        name: json.dumps(value, ensure_ascii=False)
        for name, value in attributes.items()
        if value is not None
    }
    latency_ns = round(_NS_PER_MS * (call.latency_ms or 0.0))
    status = "ERROR" if call.failure else "OK"
    return Span.from_dict(
        {
            "name": call.role,
            "trace_id": trace_id,
            "span_id": number[:16],
            "parent_span_id": None,
            "start_time_unix_nano": call.ended_ns - latency_ns,
            "end_time_unix_nano": call.ended_ns,
            "status": {"code": status, "message": call.failure},
            "attributes": attributes_as_json,
            "events": [],
        }
    )


@contextmanager
def _warning(what: str) -> Iterator[None]:
    """Log what MLflow did not do; the caller goes on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (no record is worth a stage, and its stores raise anything)
        log.warning("MLflow did not %s: %s", what, first_line(error))


def _flatten(nested: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Dotted name and value of every setting; an empty section counts as a value."""
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
