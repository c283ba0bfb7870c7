"""Artifacts notice change, and files are written whole or not at all."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from qinglan.errors import ArtifactError
from qinglan.rows import Row
from qinglan.runs.artifacts import hash_of, read_jsonl, sha256_of, write_jsonl

ROW = Row(id="1", tenant="t", query="头疼\u2028吗", source="s")


def test_hash_of_ignores_key_order_but_not_values() -> None:
    assert hash_of({"a": 1, "b": 2}) == hash_of({"b": 2, "a": 1})
    assert (
        len({hash_of("a", "b"), hash_of("ab"), hash_of("b", "a"), hash_of(["a", "b"]), hash_of(1), hash_of("1")}) == 6
    )


def test_digest_of_a_directory_sees_names_and_contents(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").write_text("x")
    before = sha256_of(folder)
    (folder / "a").rename(folder / "b")
    renamed = sha256_of(folder)
    (folder / "b").write_text("y")
    assert len({before, renamed, sha256_of(folder)}) == 3


def test_verify_refuses_a_changed_or_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    artifact = write_jsonl(path, [ROW])
    assert (artifact.verify(), artifact.rows, list(read_jsonl(path, Row))) == (path, 1, [ROW])
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
