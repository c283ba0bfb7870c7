"""Doctor against a real Ray of two nodes: a job writes on the mount that all share, and says what a node lacks."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixture_types import ProfileOf
from ray_nodes import ray_folder, ray_node
from waiting import wait_until

from qinglan.ops.doctor import cluster
from qinglan.runs.processes import free_port

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.extended]


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a cluster of two nodes, of which only the head has A_KEY."""
    port, own_port = free_port(), free_port()
    url, cpus = f"http://127.0.0.1:{port}", "--num-cpus=2"
    with ray_folder(monkeypatch) as folder:
        head = ["--head", cpus, f"--port={own_port}", f"--dashboard-port={port}", f"--temp-dir={folder}"]
        with (
            ray_node(url, 1, folder, *head, A_KEY="sk-test"),
            ray_node(url, 2, folder, cpus, f"--address=127.0.0.1:{own_port}", A_KEY=""),
        ):
            yield url


def test_a_job_on_real_nodes_tells_what_they_have(
    profile_of: ProfileOf, dashboard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked(python: str = sys.executable, key: str | None = None) -> dict[str, str | None]:
        trainer = {"ray_dashboard_url": dashboard, "ray_token_env": "RAY_AUTH_TOKEN", "python": python}
        profile = profile_of(trainer=trainer, judge={"model": "small", "base_url": "http://x/v1", "api_key_env": key})
        checks = []

        def takes_jobs() -> bool:
            checks[:] = cluster.check_cluster(profile)
            told = " ".join(f"{check.problem} {check.note}" for check in checks)
            return not any(slow in told for slow in ("No available agent", "did not answer in time"))

        wait_until("a node that takes jobs", takes_jobs, explain=lambda: checks)
        assert python == "/no/python" or checks[0].detail.count(socket.gethostname()) == 2
        return {check.name: check.problem or check.note for check in checks}

    monkeypatch.setattr(cluster, "JOB_WITHIN_S", 300.0)
    assert looked() == {"mount": None, "nodes": None}
    lacking = f"node {socket.gethostname()} lacks A_KEY; export them there before `ray start`"
    assert looked(key="A_KEY") == {"mount": None, "nodes": lacking}
    assert "trainer.python: the cluster's node has no /no/python" in (looked(python="/no/python")["mount"] or "")
    assert not list(tmp_path.rglob(".doctor-*"))
