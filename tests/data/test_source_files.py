"""Folders, parquet and big files: one stream, file by file, and what can't be read is named."""

import os
from datetime import date
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qinglan.config import Columns, Data, Tenant
from qinglan.data.sources import files
from qinglan.data.sources.files import digest_of, list_files
from qinglan.data.workbook import read_rows
from qinglan.errors import WorkbookError
from qinglan.rows import Row


def read(path: Path, **data: Any) -> list[Row]:
    return list(read_rows(path, Data(**data), Tenant()))


def error_of(path: Path, **data: Any) -> str:
    with pytest.raises(WorkbookError) as caught:
        read(path, **data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    """A drop folder with one file of each kind, and what else lies in such folders."""
    folder = tmp_path / "drop"
    (folder / "done").mkdir(parents=True)
    (folder / "done" / "old.csv").write_text("问题\n旧的\n")
    (folder / "b.csv").write_text("问题\n失眠\n头疼\n\n")
    (folder / "c.JSONL").write_text('{"问题": "胃疼", "标准文档": 7}\n')
    parquet(folder / "d.parquet", 问题=["咳嗽", "头疼", None], 划分=["dev", None, None])
    book = openpyxl.Workbook()
    for value in ("问题", "头疼", None, "发烧"):
        book.active.append([value])
    book.save(folder / "a.xlsx")
    for name in ("~$a.xlsx", ".hidden.csv", "e.csv.partial", "f.tmp", "README.md"):
        (folder / name).write_text("x")
    return folder


# Folders


def test_a_folder_is_one_stream_in_the_order_of_names(drop: Path) -> None:
    rows = read(drop)
    assert [row.source for row in rows] == [
        *("a.xlsx!Sheet!A2", "a.xlsx!Sheet!A3", "a.xlsx!Sheet!A4", "b.csv:2", "b.csv:3", "c.JSONL:1"),
        *("d.parquet:1", "d.parquet:2", "d.parquet:3"),
    ]
    assert [row.query for row in rows] == ["头疼", "", "发烧", "失眠", "头疼", "胃疼", "咳嗽", "头疼", ""]
    assert [row.reason for row in rows if row.query == "头疼"] == [None, "duplicate", "duplicate"]
    assert len({row.id for row in rows}) == len(rows)
    assert [row.query for row in read(drop, limit=3)] == ["头疼", "", "发烧"]
    assert [file.name for file in list_files(drop).skipped] == ["README.md"]


def test_a_file_that_cant_be_read_is_named(drop: Path) -> None:
    (drop / "b.csv").write_text("question\nx\n")
    assert "b.csv, line 1: no column `问题`" in error_of(drop)
    (drop / "a.xlsx").rename(drop / "a.xls")
    assert f"{drop / 'a.xls'}: is the old Excel format" in error_of(drop)


def test_a_folder_without_questions(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("x")
    expected = f"{tmp_path}: holds no .xlsx, .csv, .jsonl, .parquet file; put one there or correct data.workbook"
    assert error_of(tmp_path) == expected
    (tmp_path / "a.csv").write_text("问题\n\n")
    assert f"{tmp_path}: its files have headers but no rows" in error_of(tmp_path)
    (tmp_path / "b.csv").write_text("问题\n头疼\n")
    assert [row.source for row in read(tmp_path)] == ["b.csv:2"]


def test_a_digest_is_of_what_is_read(drop: Path) -> None:
    first = digest_of(drop)
    (drop / "README.md").write_text("y")
    (drop / "done" / "old.csv").unlink()
    assert digest_of(drop) == first
    (drop / "b.csv").rename(drop / "bb.csv")
    renamed = digest_of(drop)
    (drop / "bb.csv").write_text("问题\n失眠\n")
    assert len({first, renamed, digest_of(drop)}) == 3
    with pytest.raises(WorkbookError, match="no such file"):
        digest_of(drop / "no.csv")


# Parquet


def test_parquet_values_are_read_as_in_excel(tmp_path: Path) -> None:
    path = parquet(
        tmp_path / "q.parquet",
        问题=["头疼", "失眠", "胃疼"],
        用户画像=[35.0, float("nan"), 1.5],
        历史摘要=[date(2026, 1, 2), None, None],
        标准文档=[1234567890123456789, 7, 8],
        其他=[[1], [2], [3]],
    )
    rows = read(path)
    assert [row.profile for row in rows] == ["35", "", "1.5"]
    assert [row.reason for row in read(path, columns=Columns(query="其他"))] == ["not_text"] * 3
    assert (rows[0].history, rows[0].gold_id) == ("2026-01-02", "1234567890123456789")


def test_parquet_without_the_column_and_no_parquet(tmp_path: Path) -> None:
    assert "no column `问题` (found: query" in error_of(parquet(tmp_path / "q.parquet", query=["x"]))
    assert "--set data.columns.gold=" in error_of(
        parquet(tmp_path / "q.parquet", 问题=["x"]), columns=Columns(gold="g")
    )
    whole = parquet(tmp_path / "w.parquet", 问题=["头疼"] * 1000).read_bytes()
    (tmp_path / "q.parquet").write_bytes(whole[: len(whole) // 2])
    assert "q.parquet: is damaged or no parquet file" in error_of(tmp_path / "q.parquet")
    assert "has a header but no rows" in error_of(parquet(tmp_path / "e.parquet", 问题=pa.array([], pa.string())))


# Streams


def test_nothing_is_read_beyond_the_limit(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"问题": "一"}\n{"问题": "二"}\nnot JSON\n')
    assert [row.query for row in read(tmp_path / "q.jsonl", limit=2)] == ["一", "二"]
    assert "q.jsonl:3: not valid JSON" in error_of(tmp_path / "q.jsonl")


def test_a_column_may_first_appear_far_down_in_json_lines(tmp_path: Path) -> None:
    lines = [f'{{"问题": "问{n}", "x{n}": 1}}' for n in range(1500)]
    (tmp_path / "q.jsonl").write_text("\n".join([*lines, '{"问题": "末", "文档": "d"}']))
    assert read(tmp_path / "q.jsonl", columns=Columns(gold="文档"))[-1].gold_id == "d"


def test_a_file_that_is_one_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MAX_LINE", 20)
    (tmp_path / "q.jsonl").write_text('{"问题": "一"}\n[' + '{"问题": "一"}, ' * 9)
    assert "q.jsonl:2: longer than" in error_of(tmp_path / "q.jsonl")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "gb18030"])
def test_characters_may_be_cut_by_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    monkeypatch.setattr(files, "BLOCK", 1)
    content = "问题\n头疼怎么办\n㐀𠀀失眠\n"
    path = tmp_path / "q.csv"
    path.write_bytes(content.encode(encoding))
    assert [row.query for row in read(path)] == ["头疼怎么办", "㐀𠀀失眠"]
    path.write_bytes(content.encode(encoding) + b"\xff\n")
    assert "q.csv:4: byte 0xff" in error_of(path)
    path.write_bytes(content.encode(encoding)[:-2])
    assert "q.csv:3: byte" in error_of(path)


def test_many_blank_lines_at_the_end_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    path.write_text("问题,用户画像\n头疼,老人\n" + " ,\n" * 20_000)
    assert len(read(path)) == 1
    with path.open("a") as stream:
        stream.write("失眠,\n")
    rows = read(path)
    assert (len(rows), rows[1].reason, rows[-1].source) == (20_002, "empty_query", "q.csv:20003")


def test_a_file_is_closed_when_reading_stops(tmp_path: Path) -> None:
    (tmp_path / "q.csv").write_text("问题\n" + "".join(f"问{n}\n" for n in range(100_000)))
    rows = read_rows(tmp_path / "q.csv", Data(), Tenant())
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    next(rows)
    assert len(os.listdir("/proc/self/fd")) == before + 1  # noqa: PTH208
    rows.close()  # type: ignore[attr-defined]
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
