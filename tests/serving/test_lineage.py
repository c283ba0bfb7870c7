"""Figures followed to their rows, and rows to the workbook and the ledger."""

from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_calls import call
from lineage_run import HIT, evaluated_run

from qinglan.clients.roles import site_ledger
from qinglan.config import Profile
from qinglan.errors import ArtifactError, ConfigError
from qinglan.runs.artifacts import Artifact, StageResult, write_json
from qinglan.serving.lineage import Subject, figure_of, rows_behind, subject_of


@pytest.fixture
def subject(profile: Profile) -> Subject:
    return evaluated_run(profile)


@pytest.mark.parametrize(
    ("metric", "value"), [("top1", 0.5), ("mrr10", 0.75), ("quality", 3.0), (None, 0.5)]
)
def test_the_rows_give_the_reported_figure(
    profile: Profile, subject: Subject, metric: str | None, value: float
):
    figure = figure_of(profile, subject, metric)
    assert figure.reported == value
    assert figure.recomputed == value
    assert figure.agrees
    assert (figure.rows, figure.of) == (2, 3)
    assert figure.file.name == "arm_rl.jsonl"


def replace_artifact(subject: Subject, name: str, path: Path) -> None:
    """Have the manifest name the file as it is now."""
    manifest = subject.run / "evaluate" / "manifest.json"
    result = StageResult.read(manifest)
    artifacts = result.artifacts | {name: Artifact.of(path)}
    changed = result.model_copy(update={"artifacts": artifacts})
    write_json(manifest, changed.model_dump(mode="json"))


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [("evaluation", "evaluation.json", '{"arms": 1}'), ("arm_rl", "arm_rl.jsonl", "{")],
)
def test_a_file_that_can_t_be_read_is_one_line(
    profile: Profile, subject: Subject, name: str, file: str, content: str
):
    path = subject.run / "evaluate" / file
    path.write_text(content)
    with pytest.raises(ArtifactError, match="was changed"):
        figure_of(profile, subject, "top1")
    replace_artifact(subject, name, path)
    with pytest.raises(
        ArtifactError, match=rf"{file}.* is damaged or of another version of Qinglan; run its stage"
    ):
        figure_of(profile, subject, "top1")


def test_another_figure_than_the_rows_give_is_seen(profile: Profile, subject: Subject):
    evaluation = subject.run / "evaluate" / "evaluation.json"
    evaluation.write_text(evaluation.read_text().replace('"mean": 0.5', '"mean": 0.9'))
    replace_artifact(subject, "evaluation", evaluation)
    assert not figure_of(profile, subject, "top1").agrees


def test_the_lowest_row_leads_to_its_cell_and_to_its_calls(profile: Profile, subject: Subject):
    with site_ledger(profile) as ledger:
        ledger.record([call("t-b"), call("j-b", role="judge", model="small")])
    (trace,) = rows_behind(profile, subject, "top1", worst=1)
    assert trace.row.source == "q.xlsx!问题!A3"
    assert trace.value == 0.0
    assert trace.entry.text == "乙"
    assert trace.teacher
    assert trace.teacher.retrieved == HIT
    costs = [(paid.role, paid.request, paid.call and paid.call.cost_usd) for paid in trace.paid]
    assert costs == [("teacher", "t-b", 0.25), ("judge", "j-b", 0.25)]
    for paid in trace.paid:
        assert paid.at_s
        assert paid.at_s > 1e9
    (trace_of_a,) = rows_behind(profile, subject, "top1", ids=["a"])
    calls = [(paid.request, paid.call) for paid in trace_of_a.paid]
    assert calls == [("t-a", None), ("j-a", None)], "not in the ledger"


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda p, s: figure_of(p, s, "latency_p50_ms"),
            "`latency_p50_ms`: is not a mean over rows; those are top1",
        ),
        (
            lambda p, s: figure_of(p, s._replace(arm="sft"), "top1"),
            "did not evaluate an arm `sft`; it has teacher, rl",
        ),
        (
            lambda p, s: rows_behind(p, s, "top1", ids=["z"]),
            "row `z`: is not among the 3 test questions",
        ),
        (
            lambda p, s: figure_of(p, s._replace(run=s.run.parent / "none"), "top1"),
            "has no finished evaluate",
        ),
        (lambda p, s: subject_of(p, "nope"), "run `nope`: not found"),
    ],
)
def test_a_mistake_is_one_line(
    profile: Profile, subject: Subject, ask: Callable[[Profile, Subject], object], message: str
):
    with pytest.raises(ConfigError, match=message):
        ask(profile, subject)
