"""The simulators as processes: addresses, failures, and no orphans."""

from pathlib import Path

import httpx2
import psutil
import pytest
from fake_service import SIMULATED
from fixture_types import ProfileOf

from qinglan.simulators.domains.query_rewrite import write_sample
from qinglan.simulators.services import embedded_services

pytestmark = pytest.mark.slow

FEW = {"sample_train_rows": 1, "sample_dev_rows": 1, "sample_test_rows": 1}


def test_start_serve_and_stop(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAG_KEY", "s3cret")
    settings = profile_of(**SIMULATED, embedded=FEW, rag={"api_key_env": "RAG_KEY"})
    knowledge_base = write_sample(tmp_path, settings.embedded).knowledge_base
    # Among them may be a server that another test's module shares.
    earlier_children = set(psutil.Process().children())
    with (
        embedded_services(settings, knowledge_base) as services,
        httpx2.Client(trust_env=False, timeout=120) as client,
    ):
        # A run that reuses every stage asks for no address.
        assert set(psutil.Process().children()) - earlier_children == set()
        addresses = services()
        children = set(psutil.Process().children()) - earlier_children
        assert [child.environ()["RAG_KEY"] for child in children] == [""] * 2
        assert addresses.teacher_url == addresses.judge_url
        assert addresses.teacher_url.endswith("/v1")
        assert client.get(f"{addresses.teacher_url}/models").status_code == 200
        answer = client.post(addresses.rag_url, json={"query": "虾青素 适用人群"}).json()
        assert answer["data"]["recall"][0]["id"] == "虾青素-who"
    assert children
    assert [child for child in children if child.is_running()] == []
