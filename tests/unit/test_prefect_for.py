"""Which Prefect server a run talks to."""

import os
from pathlib import Path

import pytest

from qinglan import up
from qinglan.up import SERVER_FILE, prefect_for


def quiet(_: str) -> None:
    """Says nothing."""


def test_a_users_prefect_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.environ", {"PREFECT_API_URL": "http://prefect/api"})
    with prefect_for(tmp_path, quiet):
        assert os.environ["PREFECT_API_URL"] == "http://prefect/api"
        assert "PREFECT_HOME" not in os.environ
    assert not list(tmp_path.iterdir())


def test_the_sites_server_is_joined_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.environ", {})
    monkeypatch.setattr(up, "answers", lambda url: url == "http://127.0.0.1:4200/api/health")
    (tmp_path / SERVER_FILE).write_text("http://127.0.0.1:4200/api")
    with prefect_for(tmp_path, quiet):
        assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
