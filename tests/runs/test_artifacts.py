"""Artifacts notice change, and files are written whole or not at all."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk import disk_events
from fixture_types import ProfileOf
from run_stages import end_stage

from qinglan.errors import ArtifactError
from qinglan.rows import Row
from qinglan.runs.artifacts import (
    WEIGHTS,
    Artifact,
    hash_of,
    read_jsonl,
    sha256_of,
    sync,
    write_json,
    write_jsonl,
)
from qinglan.runs.run import Run

ROW = Row(id="1", tenant="t", query="头疼\u2028吗", source="s")


def test_hash_of_ignores_key_order_but_not_values() -> None:
    assert hash_of({"a": 1, "b": 2}) == hash_of({"b": 2, "a": 1})
    hashes = {
        hash_of("a", "b"),
        hash_of("ab"),
        hash_of("b", "a"),
        hash_of(["a", "b"]),
        hash_of(1),
        hash_of("1"),
    }
    assert len(hashes) == 6


def test_digest_of_a_directory_sees_names_and_contents_and_that_of_its_weights_nothing_else(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").write_text("x")
    (folder / "model.safetensors").write_text("weights")
    before = sha256_of(folder)
    weights = sha256_of(folder, WEIGHTS)
    (folder / "a").rename(folder / "b")
    with_other_name = sha256_of(folder)
    (folder / "b").write_text("y")
    with_other_content = sha256_of(folder)
    assert len({before, with_other_name, with_other_content}) == 3
    assert sha256_of(folder.rename(tmp_path / "elsewhere"), WEIGHTS) == weights


def test_verify_refuses_a_changed_or_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    artifact = write_jsonl(path, [ROW])
    assert artifact.verify() == path
    assert artifact.rows == 1
    assert list(read_jsonl(path, Row)) == [ROW]
    path.write_text("{}\n")
    with pytest.raises(ArtifactError, match="was changed after it was written"):
        artifact.verify()
    path.unlink()
    with pytest.raises(ArtifactError, match="is missing; run its stage again"):
        artifact.verify()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    before = write_jsonl(path, [ROW])

    def broken() -> Iterator[Row]:
        yield ROW
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        write_jsonl(path, broken())
    assert before.verify() == path


def test_a_file_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    events = disk_events(monkeypatch)
    write_json(folder / "a.json", {})
    write_jsonl(folder / "b.jsonl", [ROW])
    assert events == [
        ("sync", "a.json.partial"),
        ("name", "a.json.partial"),
        ("sync", "folder"),
        ("sync", "b.jsonl.partial"),
        ("name", "b.jsonl.partial"),
        ("sync", "folder"),
    ]


def test_a_stage_s_files_are_on_the_disk_before_its_manifest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile_of: ProfileOf
) -> None:
    model = tmp_path / "runs" / "r" / "sft" / "model"
    (model / "deep").mkdir(parents=True)
    (model / "deep" / "weights").write_bytes(b"x")
    (model / "link").symlink_to("nowhere")
    run = Run(id="r", flow="train", profile=profile_of(), directory=tmp_path / "runs" / "r")
    events = disk_events(monkeypatch)
    end_stage(run, "sft", artifacts={"model": Artifact.of(model)})
    assert {("sync", "weights"), ("sync", "deep"), ("sync", "model")} == {*events[:3]}
    assert events[3:] == [
        ("sync", "manifest.json.partial"),
        ("name", "manifest.json.partial"),
        ("sync", "sft"),
    ]


def test_a_folder_that_can_t_be_synced_is_no_error_a_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    sync(tmp_path)
    with pytest.raises(OSError, match="Input/output error"):
        write_json(tmp_path / "a.json", {})
    assert list(tmp_path.iterdir()) == []
