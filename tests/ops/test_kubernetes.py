"""deployments/k8s says the same as compose.yaml and the deployments."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from qinglan.config import load_profile
from qinglan.ops.up.site import WORK_POOLS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deployments" / "k8s"
FILES = {path.name: list(yaml.safe_load_all(path.read_text(encoding="utf-8"))) for path in FOLDER.glob("*.yaml")}
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
TEXT = "".join(path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.yaml")))
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
ALL = list(FILES.values())
RAY: dict[str, Any] = FILES["raycluster.yaml"][0]["spec"]
PODS = [RAY["headGroupSpec"]["template"]["spec"], RAY["workerGroupSpecs"][0]["template"]["spec"]]


def everything(node: Any, key: str) -> list[Any]:
    """Values under `key`, wherever it stands."""
    if isinstance(node, list):
        return [found for each in node for found in everything(each, key)]
    if not isinstance(node, dict):
        return []
    here = [node[key]] if key in node else []
    return here + [found for each in node.values() for found in everything(each, key)]


def test_pods_are_ours_at_this_version_without_root_and_name_secrets_only() -> None:
    users = everything(ALL, "runAsUser")
    assert len(users) >= 7 and set(users) == {1000}, "the images' own"
    assert set(everything(ALL, "runAsNonRoot")) == {True}
    assert not re.search(r"(?i)\b(password|token|secret_?key|auth-?string): *[^\s{}]{12,}", TEXT)
    assert not re.search(r"://[^/@\s…]+:[^/@\s…]+@", TEXT)
    images = everything(ALL, "image")
    named = [i if isinstance(i, str) else f"{i['repository']}:{i.get('tag') or i.get('prefectTag')}" for i in images]
    assert len(named) >= 6
    assert {name.split("/")[-1] for name in named} <= {
        f"qinglan-{kind}:{VERSION}" for kind in ("orchestrator", "trainer")
    }


def test_every_claim_is_made_and_lies_where_the_profile_looks() -> None:
    made = {d["metadata"]["name"] for d in FILES["site.yaml"] if d["kind"] == "PersistentVolumeClaim"}
    assert {claim["claimName"] for claim in everything(ALL, "persistentVolumeClaim")} == made
    for pod in PODS:
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts["runs"] == "/srv/qinglan/runs" and mounts["state"] == "/srv/qinglan/.qinglan"
        assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}


def test_the_profile_is_that_of_compose_with_the_ray_cluster(tmp_path: Path) -> None:
    text = next(d for d in FILES["site.yaml"] if d["kind"] == "ConfigMap")["data"]["team.yaml"]
    (tmp_path / "team.yaml").write_text(text, encoding="utf-8")
    here = load_profile(str(tmp_path / "team.yaml"))
    there = load_profile(str(ROOT / "docker" / "team.example.yaml"))
    assert here.model_copy(update={"trainer": there.trainer}) == there
    assert here.trainer.ray_dashboard_url == "http://qinglan-head-svc:8265", "<name of the RayCluster>-head-svc"
    assert FILES["raycluster.yaml"][0]["metadata"]["name"] == "qinglan"


def test_ray_is_the_version_in_the_image_and_found_first_on_the_path() -> None:
    lock = (ROOT / "docker" / "trainer.lock").read_text(encoding="utf-8")
    assert f"\nray=={RAY['rayVersion']}\n" in lock
    for pod in PODS:
        env = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
        assert env["PATH"] == "/opt/trainer/bin:/usr/local/bin:/usr/bin:/bin"
        assert env["HF_HOME"] == COMPOSE["services"]["ray-head"]["environment"]["HF_HOME"]
    assert RAY["authOptions"] == {"mode": "token"}


def test_prefects_server_and_workers_have_the_settings_of_compose() -> None:
    given = {e["name"]: e.get("value") for e in FILES["prefect-server.values.yaml"][0]["global"]["prefect"]["env"]}
    compose = COMPOSE["services"]["prefect"]["environment"]
    for name in (n for n in compose if re.search("MESSAGING|ORDERING|LEASE|ANALYTICS|V2|PROMOTIONAL|SERVICES", n)):
        assert given[name] == compose[name], name
    pools = [p["config"]["workPool"] for p in everything(ALL, "worker") if "config" in p]
    assert sorted(pools) == sorted(WORK_POOLS)
    worker = FILES["prefect-worker.values.yaml"][0]["worker"]
    given = {each["name"]: each["value"] for each in worker["extraEnvVars"]}
    given["PREFECT_WORKER_QUERY_SECONDS"] = str(worker["config"]["queryInterval"])
    compose = COMPOSE["services"]["worker"]["environment"]
    assert given.items() <= compose.items()
    assert compose.keys() - given.keys() == {"PREFECT_API_URL", "TZ"}
