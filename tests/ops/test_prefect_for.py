"""Which Prefect server a run talks to."""

import os
from pathlib import Path

import pytest

from qinglan.ops.prefect.server import LOCK_FILE, SERVER_FILE, find_server
from qinglan.ops.up import site
from qinglan.ops.up.site import only_one, prefect_for


def test_a_users_prefect_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.environ", {"PREFECT_API_URL": "http://prefect/api"})
    with prefect_for(tmp_path, print):
        assert os.environ["PREFECT_API_URL"] == "http://prefect/api"
        assert "PREFECT_HOME" not in os.environ
    assert not list(tmp_path.iterdir())


def test_the_sites_server_is_joined_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.environ", {"PREFECT_HOME": str(tmp_path)})
    healthy = "http://127.0.0.1:4200/api/health"
    monkeypatch.setattr(site, "health_problem", lambda url: None if url == healthy else "no answer")
    (tmp_path / SERVER_FILE).write_text("http://127.0.0.1:4200/api")
    with only_one(tmp_path, print), prefect_for(tmp_path, print):
        assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"


def test_what_a_killed_site_announced_is_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.environ", {"PREFECT_HOME": str(tmp_path)})
    (tmp_path / SERVER_FILE).write_text("http://127.0.0.1:4200/api")
    (tmp_path / LOCK_FILE).write_text("12345")
    assert find_server(tmp_path) is None
