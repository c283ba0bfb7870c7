"""`qinglan forget` on a site that really ran: every file and table is searched for the person's
texts afterwards."""

import csv
import json
import shutil
import sqlite3
import subprocess
import sys
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Literal

import openpyxl
import pyarrow.parquet as pq
import pytest
import yaml
from filelock import FileLock
from fixture_types import ProfileOf, Qinglan
from ledger_calls import call

from qinglan.clients.completions import Request
from qinglan.clients.roles import site_ledger
from qinglan.config import Columns, Data, Profile, load_profile
from qinglan.data.forgotten import Tombstones
from qinglan.data.review import Review, add_reviews, fingerprint
from qinglan.data.versions import Version, find_version, publish, splits_of, versions_of
from qinglan.errors import ConfigError
from qinglan.ops.forget import forget
from qinglan.ops.forget.records import cells_of
from qinglan.recipes.requests import distill_requests, extract_requests, judge_requests
from qinglan.rows import DIALOGUE, Row, row_id
from qinglan.runs.artifacts import (
    MANIFEST,
    REFERENCE,
    Artifact,
    StageResult,
    read_jsonl,
    write_json,
    write_jsonl,
)
from qinglan.simulators.domains import sample_of
from qinglan.text import forms_of

QUESTION, PROFILE, HISTORY = (
    '我妈"问<虾青素>&鱼油能一起吃吗',
    "王小明，42 岁，糖尿病",
    '之前问过"降压药"与阿司匹林',
)
TEXTS = (QUESTION, PROFILE, HISTORY)
CAPITALS = str(Path(__file__).parents[1] / "support" / "capitals_recipe.py")


@pytest.mark.slow
@pytest.mark.extended
def test_a_forgotten_row_is_nowhere_and_neither_a_refresh_nor_a_backup_brings_it_back(
    tmp_path: Path,
):
    profile = make_site(tmp_path)
    run(tmp_path, "run", "refresh")
    assert [file for file in traces(tmp_path) if "prefect" in file] == []
    rows = rows_of(profile)
    (row_id,) = (row.id for row in rows if row.query == QUESTION and row.status == "ok")
    before = find_version(profile, "latest")
    leave_traces(profile, row_id)
    run(tmp_path, "backup", str(tmp_path / "kept"))
    assert len(traces(tmp_path)) > 20
    distilled = read_jsonl(profile.paths.runs / "latest" / "distill" / "rows.jsonl", Row)
    (answer,) = (forms_of(row.answer or "") for row in distilled if row.id == row_id)
    assert any(form in requests_traced(profile) for form in answer)

    announced = run(tmp_path, "forget", "--row", row_id, "--dry-run")
    assert len(traces(tmp_path)) > 20
    removed = run(tmp_path, "forget", "--row", row_id, "--yes")
    assert removed == announced
    for store in (
        "runs",
        "state/datasets",
        "state/mlartifacts",
        "state/reviews",
        "request log",
        "ledger",
        "kept",
    ):
        assert store in removed
    assert traces(tmp_path) == []
    assert not any(form in requests_traced(profile) for form in answer)
    assert requests_traced(profile)
    assert {row.id for row in rows_of(profile)} == {row.id for row in rows if row.query != QUESTION}
    for manifest in profile.paths.runs.glob(f"*/*/{MANIFEST}"):
        for artifact in StageResult.read(manifest).artifacts.values():
            artifact.verify()
    after = find_version(profile, before.id)
    assert after.forgotten == 2
    assert after.counts["rows"] == before.counts["rows"] - 2
    assert after.artifacts["rows"].rows == before.artifacts["rows"].rows - 2

    run(tmp_path, "run", "refresh")
    assert traces(tmp_path) == []
    assert [row.reason for row in rows_of(profile) if not row.query] == ["forgotten"] * 2
    assert len(versions_of(profile)) == 2

    run(tmp_path, "restore", str(tmp_path / "kept"), "--replace")
    assert traces(tmp_path) == []
    assert Tombstones.read(profile.paths.state).has_row(row_id)


def write_run(profile: Profile, *rows: Row) -> Path:
    """A run's folder with these rows, and what its later stages say of them."""
    folder = profile.paths.runs / "20260101-000000-0001"
    artifact = write_jsonl(folder / "ingest" / "rows.jsonl", rows)
    result = StageResult(
        stage="ingest", key="k", run_id=folder.name, seconds=1, artifacts={"rows": artifact}
    )
    write_json(folder / "ingest" / MANIFEST, result.model_dump(mode="json"))
    write_json(folder / f"rows.jsonl{REFERENCE}", artifact.model_dump(mode="json"))
    write_jsonl(folder / "rl" / "samples.jsonl", ({"row_id": row.id, "text": "甲"} for row in rows))
    write_jsonl(folder / "rl" / "dev.jsonl", [{"step": 0, "values": {row.id: 1.0 for row in rows}}])
    write_json(folder / "evaluated.json", {"sample": [row.id for row in rows]})
    write_json(
        folder / "tried.json",
        {"rl": [{"case_id": f"regression-{row.id}", "text": "甲"} for row in rows]},
    )
    return folder


def row(query: str, profile: str = "", status: Literal["ok", "failed"] = "ok", **more: str) -> Row:
    values = {
        "id": row_id("default", query, profile),
        "tenant": "default",
        "source": "q.csv:2",
    } | more
    return Row.model_validate(values | {"query": query, "profile": profile, "status": status})


def test_others_keep_what_they_have_in_common_with_a_forgotten_row(profile: Profile):
    person = row(QUESTION, PROFILE)
    other_row = row(QUESTION, "李雷，男，三十岁", group=person.id)  # its near-duplicate
    again = row(QUESTION, PROFILE, "failed", id="f" * 16, reason="duplicate")
    folder = write_run(profile, person, again, other_row)
    log = folder / "sft.log"
    log.write_bytes(f"{QUESTION}\n{PROFILE}\n".encode() + b"\xe6\n")  # a character that was cut off
    (folder / "~$review.xlsx").write_bytes(b"an open workbook's lock")
    forgotten = forget(profile, [person.id], [], print)
    assert list(read_jsonl(folder / "ingest" / "rows.jsonl", Row)) == [other_row]
    assert log.read_bytes() == f"{QUESTION}\n[forgotten]\n".encode() + b"\xe6\n"
    assert "other rows: 1 of the texts" in forgotten.outside[0]
    assert (
        "files of `review export`, `review reasons`, `dataset judge-pairs`, wherever they are"
        in forgotten.outside
    )
    for file in ("rl/samples.jsonl", "rl/dev.jsonl", "evaluated.json", "tried.json"):
        text = (folder / file).read_text()
        assert person.id not in text, file
        assert other_row.id in text, file
    (artifact,) = StageResult.read(folder / "ingest" / MANIFEST).artifacts.values()
    assert artifact.verify() == folder / "ingest" / "rows.jsonl"
    assert artifact.rows == 1
    reference = (folder / f"rows.jsonl{REFERENCE}").read_bytes()
    assert Artifact.model_validate_json(reference) == artifact
    assert forget(profile, [person.id], [], print).removed == {}
    (folder / "review.xlsx").write_bytes(b"damaged")
    (problem,) = forget(profile, [person.id], [], print).notes
    assert "review.xlsx: File is not a zip file" in problem


@pytest.mark.parametrize("by", ["row", "question"])
def test_a_forgotten_question_has_no_split_in_a_version_that_lacks_it(
    profile: Profile, tmp_path: Path, by: str
):
    tested = row(QUESTION, split="test")
    dev = row("钙片能嚼着吃吗", split="dev")
    train = row("鱼油", split="train")

    def published(*rows: Row) -> Version:
        return publish(profile, "r", {"rows": write_jsonl(tmp_path / f"{len(rows)}.jsonl", rows)})

    first = published(tested, dev, train)
    second = published(dev, train)
    latest = published(train)
    shutil.rmtree(first.directory)
    assert splits_of(latest) == {tested.id: "test", dev.id: "dev", train.id: "train"}
    if by == "row":
        forgotten = forget(profile, [tested.id], [], print)
    else:
        forgotten = forget(profile, [], [QUESTION], print)
    assert forgotten.removed == {("state/datasets", "rows"): 2}
    assert versions_of(profile) == [latest, second], "which never had the row itself"
    for version in (second, latest):
        assert splits_of(version) == {dev.id: "dev", train.id: "train"}, version.id
    forget(profile, [dev.id], [], print)
    for version in (find_version(profile, second.id), latest):
        assert splits_of(version) == {train.id: "train"}, version.id
    assert forget(profile, [tested.id, dev.id], [], print).removed == {}


def test_a_dialogue_and_what_was_read_in_it_are_forgotten(profile: Profile):
    asked_in_dialogue = row("能吃吗").with_inputs({DIALOGUE: f"用户：{HISTORY}，{PROFILE}"})
    folder = write_run(profile, asked_in_dialogue)
    extracted = asked_in_dialogue.with_inputs({}).with_context("", HISTORY)
    write_jsonl(folder / "extract" / "rows.jsonl", [extracted])
    dialogues = (asked_in_dialogue.inputs[DIALOGUE], "用户：在吗")
    source = [{"问题": asked_in_dialogue.query, "对话": dialogue} for dialogue in dialogues]
    write_jsonl(folder / "source.jsonl", source)
    profile = profile.model_copy(update={"data": Data(columns=Columns(dialogue="对话"))})
    request = extract_requests(profile)(asked_in_dialogue)
    assert request is not None
    with site_ledger(profile) as ledger:
        ledger.record([call(request.request_hash)])
    removed = forget(profile, [asked_in_dialogue.id], [], print).removed
    assert removed["ledger", "answers"] == 1
    assert traces(folder.parents[1]) == []
    assert json.loads((folder / "source.jsonl").read_text()) == source[1]


@pytest.mark.parametrize("recipe", ["query_rewrite", "medical", "answer_judge"])
def test_a_question_is_forgotten_whoever_asks_it_and_a_killed_process_is_completed(
    profile_of: ProfileOf, recipe: str
):
    rival = {"model": "small", "base_url": "http://127.0.0.1:9/v1"}
    profile = profile_of(recipe=recipe, answerer=rival, compare={"teachers": {"rival": rival}})
    asking = [row(QUESTION, HISTORY), row(f"{QUESTION}？", PROFILE)]
    other_row = row("钙片能嚼着吃吗")
    folder = write_run(profile, *asking, other_row)
    samples = (folder / "rl" / "samples.jsonl").read_text()
    typed = row(QUESTION, answer="虾青素 同服")  # on the page to try: no file has it
    rivals = profile.model_copy(update={"teacher": profile.answerer})
    requests: list[Request | None] = []
    for asker in (profile, rivals):
        requests += distill_requests(asker)(typed).values()
    requests.append(judge_requests(profile)(typed, "虾青素 同服"))
    out_of_reach = row(f"{QUESTION} 呢", "孕妇")
    requests += distill_requests(profile)(out_of_reach).values()
    hashes = dict.fromkeys(request.request_hash for request in requests if request)
    with site_ledger(profile) as ledger:
        ledger.record([call(request_hash, text="虾青素  同服") for request_hash in hashes])
        forgotten = forget(profile, [], [f"{QUESTION}\r", ""], print)
        assert ledger.get_many(hashes).keys() == set(list(hashes)[3:])
        assert forgotten.removed["ledger", "answers"] == 3
        assert (
            "the ledger: answers to wordings, contexts and prompts that no file here has"
            in forgotten.outside
        )
    assert list(read_jsonl(folder / "ingest" / "rows.jsonl", Row)) == [other_row]
    (folder / "rl" / "samples.jsonl").write_text(samples)
    forget(profile, [], [], print)
    assert len((folder / "rl" / "samples.jsonl").read_text().splitlines()) == 1
    capitals = profile.model_copy(update={"recipe": CAPITALS})
    assert forget(capitals, [], [QUESTION], print).notes == []


def test_a_users_own_column_may_be_called_as_ours():
    columns = {"query": "问题", "profile": "画像", "history": "历史"}
    assert cells_of({"query": QUESTION, "inputs": ["a"]}, columns) == {"query": QUESTION}


def test_prefects_database_is_found_in_the_home_that_it_has_itself(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_HOME", "~/theirs")
    (tmp_path / "theirs").mkdir()
    with closing(sqlite3.connect(tmp_path / "theirs" / "prefect.db")) as db:
        db.execute("CREATE TABLE artifact AS SELECT ? AS description", (QUESTION,))
        db.commit()
    assert forget(profile, [], [QUESTION], print).removed == {("Prefect", "values"): 1}


def test_nothing_is_removed_while_a_run_is_running_or_without_a_yes(
    profile: Profile, qinglan: Qinglan
):
    person = row(QUESTION, PROFILE)
    folder = write_run(profile, person)
    with FileLock(folder / ".lock"), pytest.raises(ConfigError, match="a process is running there"):
        forget(profile, [person.id], [], print)
    texts = folder.parent / "texts.txt"
    texts.write_bytes(QUESTION.encode("gbk"))
    refusals = (
        (["--row", "7"], "no row's id"),
        ([], "nothing is named"),
        (["--row", person.id], "nothing was removed"),
        (["--text-file", str(texts)], "nothing was removed"),
    )
    for words, message in refusals:
        status, _, err = qinglan("forget", *words, profile=profile)
        assert status == 2, words
        assert len(err.splitlines()) == 1, words
        assert message in err
    assert traces(folder.parents[1]) != []
    status, out, err = qinglan("forget", "--text-file", str(texts), "--yes", profile=profile)
    assert (status, err) == (0, "")
    assert "removed" in out
    assert list(read_jsonl(folder / "ingest" / "rows.jsonl", Row)) == []
    assert traces(folder.parents[1]) == []


def make_site(folder: Path) -> Profile:
    """A profile and a workbook in which one question stands twice."""
    small = {"sample_train_rows": 12, "sample_dev_rows": 4, "sample_test_rows": 4}
    values = {
        "extends": "embedded",
        "data": {"workbook": "questions.csv"},
        "paths": {"runs": str(folder / "runs"), "state": str(folder / "state")},
        "serve": {"request_log": {"folder": str(folder / "requests")}},
        # With this seed nobody else asks about 虾青素, so no passage traced is the answer.
        "embedded": {**small, "sample_seed": 11},
        "tracking": {"traces_per_stage": 1000},
    }
    (folder / "site.yaml").write_text(yaml.safe_dump(values))
    profile = load_profile(str(folder / "site.yaml"))
    sample = openpyxl.load_workbook(sample_of(profile, "data.workbook").workbook).worksheets[0]
    with (folder / "questions.csv").open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerows(sample.iter_rows(values_only=True))
        for _ in range(2):
            writer.writerow([QUESTION, PROFILE, HISTORY, "虾青素-mix", "train", "同服"])
    return profile


def leave_traces(profile: Profile, row_id: str) -> None:
    """Write where a refresh writes nothing: reviews, request log, a log, a judge that quotes."""
    review = {
        "tenant": "sample",
        "row": row_id,
        "verdict": "reject",
        "fingerprint": fingerprint("x"),
        "answer": QUESTION,
        "imported_at": "2026-01-01",
        "file": "s.xlsx",
        "file_sha256": "0",
    }
    add_reviews(profile, [Review.model_validate(review)])
    record = {
        "问题": QUESTION,
        "用户画像": PROFILE,
        "历史摘要": HISTORY,
        "qinglan": {"row_id": row_id},
    }
    write_jsonl(Path(profile.serve.request_log.folder or "") / "2026-01-01.jsonl", [record])
    (profile.paths.state / "logs" / "old.log").write_text(
        f"could not parse {json.dumps(QUESTION)}\n"
    )
    quoting = call(
        "quoting", role="judge", cost_usd=1.0, reasoning=f"The user asks {QUESTION}, so …"
    )
    with site_ledger(profile) as ledger:
        ledger.record([quoting])
    with closing(sqlite3.connect(profile.paths.state / "prefect" / "prefect.db")) as db:
        db.execute("UPDATE artifact SET description = ?", (f"about {QUESTION}",))
        db.commit()


def run(folder: Path, *words: str) -> str:
    argv = [sys.executable, "-m", "qinglan.cli", *words, "--profile", "site.yaml"]
    process = subprocess.run(
        argv, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def requests_traced(profile: Profile) -> str:
    with closing(sqlite3.connect(profile.paths.state / "mlflow.db")) as db:
        return "\n".join(content for (content,) in db.execute("SELECT content FROM spans"))


def rows_of(profile: Profile) -> list[Row]:
    return list(read_jsonl(profile.paths.runs / "latest" / "ingest" / "rows.jsonl", Row))


def traces(folder: Path) -> list[str]:
    """Files and databases of the site in which one of the texts is, in whatever form."""
    forms = [form.encode() for text in TEXTS for form in forms_of(text)]
    files: list[str] = []
    for root in ("runs", "state", "requests"):
        for path in (folder / root).rglob("*"):
            content = content_of(path) if path.is_file() else b""
            if any(form in content for form in forms):
                files.append(str(path))
    return files


def content_of(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix == ".xlsx":
        with zipfile.ZipFile(path) as archive:
            return b"".join(map(archive.read, archive.namelist()))
    if path.suffix == ".parquet":
        return content + repr(pq.read_table(path).to_pylist()).encode()
    return content
