"""What a flow reads: the sample of the recipe's world, or the user's own files."""

from collections.abc import Callable
from pathlib import Path

import pytest

from qinglan.config import Profile
from qinglan.simulators.domains import query_rewrite
from qinglan.tasks.session import _inputs

ProfileOf = Callable[..., Profile]
FEW = {"sample_train_rows": 2, "sample_dev_rows": 1, "sample_test_rows": 1}


def test_the_sample_is_written_once_for_both(profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written, write = [], query_rewrite.DOMAIN.write_sample
    monkeypatch.setattr(query_rewrite.DOMAIN, "write_sample", lambda *args: written.append(args) or write(*args))
    workbook, knowledge_base = _inputs(profile_of(embedded=FEW), tmp_path)
    assert workbook.is_file() and knowledge_base and knowledge_base.is_file()
    assert len(written) == 1


def test_a_users_own_files_need_no_world(profile_of: ProfileOf, tmp_path: Path):
    own = profile_of(data={"workbook": "q.xlsx"}, rag={"knowledge_base": "kb.jsonl"}, embedded={"domain": "none"})
    assert _inputs(own, tmp_path) == (Path("q.xlsx"), Path("kb.jsonl"))


def test_a_databases_rows_lie_with_the_run(profile_of: ProfileOf, tmp_path: Path):
    sql = {"url_env": "QUESTIONS", "query": "SELECT 1"}
    profile = profile_of(data={"sql": sql}, rag={"url": "http://rag/q"})
    assert _inputs(profile, tmp_path) == (tmp_path / "source.jsonl", None)
