"""compose.yaml, the Dockerfiles and the values for Kubernetes: each alone, and that they agree."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from qinglan.config import load_profile
from qinglan.ops.up.site import WORK_POOLS

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
OWN = ("qinglan-orchestrator", "qinglan-trainer")
STORES = ("postgres", "valkey", "s3")
SECRET_NAME = re.compile(r"PASSWORD|SECRET|TOKEN|AUTH|_KEY|CONNECTION_URL|DOCKET_URL")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


COMPOSE: dict[str, Any] = yaml.safe_load(read("compose.yaml"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
VERSION = tomllib.loads(read("pyproject.toml"))["project"]["version"]
SITES_OWN = ["secrets/keys/OPENAI_API_KEY", "data/questions.xlsx", "profiles/team.yaml", ".env"]
SITES_OWN += ["compose.override.yaml", "review.xlsx", "review-march.xlsx"]
K8S_TEXTS = {
    path.name: path.read_text(encoding="utf-8")
    for path in (ROOT / "qinglan" / "deployments" / "k8s").glob("*.yaml")
}
K8S = {name: list(yaml.safe_load_all(text)) for name, text in K8S_TEXTS.items()}
RAY: dict[str, Any] = K8S["raycluster.yaml"][0]["spec"]
every_service = pytest.mark.parametrize("name", SERVICES)


def secrets(service: dict[str, Any]) -> dict[str, str]:
    """Target in /run/secrets → source."""
    named = (
        s if isinstance(s, dict) else {"source": s, "target": s} for s in service.get("secrets", [])
    )
    return {s["target"]: s["source"] for s in named}


def default_of(value: str) -> str:
    """What compose takes where the variable is not given."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    text = re.sub(r"(?m)^#.*\n", "", dockerfile.read_text(encoding="utf-8"))
    return re.findall(r"^([A-Z]+) +(.+)", re.sub(r"\\\n", " ", text), flags=re.MULTILINE)


def test_schema_and_linter_have_nothing_to_say() -> None:
    schema = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        "compose.yaml",
    ]
    for argv in (schema, [Path(sys.executable).with_name("hadolint"), "--no-color", *DOCKERFILES]):
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@every_service
def test_a_service_is_pinned_unprivileged_and_reached_from_this_machine_alone(name: str) -> None:
    service = SERVICES[name]
    assert service["user"].split(":")[0] not in ("", "0", "root")
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not {"privileged", "cap_add", "network_mode"} & service.keys()
    repository, _, tag = default_of(service["image"]).partition(":")
    assert tag == VERSION if repository in OWN else re.match(r"\d+\.\d+", tag)
    ports = service.get("ports", [])
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []
    if name in STORES:
        assert not ports
        assert all(COMPOSE["networks"][net].get("internal") for net in service["networks"])


@every_service
def test_secrets_are_files_that_become_variables_where_the_entrypoint_makes_them(name: str) -> None:
    service, mounted = SERVICES[name], secrets(SERVICES[name])
    for variable, value in service.get("environment", {}).items():
        if SECRET_NAME.search(variable) and variable != "RAY_AUTH_MODE":
            assert variable.endswith("_FILE") and value.startswith("/run/secrets/"), variable
        assert not re.search(r"://[^/@]*:[^/@]+@", str(value)), f"{variable} holds a password"
        if str(value).startswith("/run/secrets/"):
            assert Path(value).name in mounted
    assert not re.search(
        r"://[^/@]*:[^/@]+@|password=", " ".join(map(str, service.get("command", [])))
    )
    for target, source in mounted.items():
        assert source in COMPOSE["secrets"], source
        own = service["image"].split(":")[0] in OWN
        assert re.fullmatch(r"[A-Z][A-Z0-9_]*", target) if own else target == source


def test_make_secrets_writes_what_compose_mounts(tmp_path: Path) -> None:
    subprocess.run(
        ["sh", "docker/make-secrets.sh", str(tmp_path / "secrets")], cwd=ROOT, check=True
    )
    written = {
        f"secrets/{path.name}" for path in (tmp_path / "secrets").iterdir() if path.is_file()
    }
    assert {secret["file"] for secret in COMPOSE["secrets"].values()} == written
    used = {source for service in SERVICES.values() for source in secrets(service).values()}
    assert used == COMPOSE["secrets"].keys()


@every_service
def test_every_address_is_that_of_a_service_within_reach(name: str) -> None:
    service = SERVICES[name]
    words = [
        str(w) for w in (*service.get("environment", {}).values(), *service.get("command", []))
    ]
    hosts = {
        (m[1], m[2])
        for w in words
        for m in re.finditer(r"(?:://(?:\w+@)?|--address=)([a-z][\w-]*):(\d+)", w)
    }
    hosts |= {
        (value, "")
        for key, value in service.get("environment", {}).items()
        if key.endswith("_HOST")
    }
    for host, port in hosts:
        assert set(service["networks"]) & set(SERVICES[host]["networks"]), (
            f"{name} can't reach {host}"
        )
        own_words = shlex.join(map(str, SERVICES[host].get("command", [])))
        assert host in STORES or f"port={port}" in own_words, f"{host} does not listen on {port}"


def test_every_work_pool_has_a_worker_which_is_what_its_image_starts() -> None:
    words = " ".join(
        str(word) for service in SERVICES.values() for word in service.get("command", [])
    )
    assert set(re.findall(r"--pool[= ](\S+)", words)) == {*WORK_POOLS}
    for image, service in (("orchestrator", "worker"), ("trainer", "trainer")):
        steps = instructions(ROOT / "docker" / f"{image}.Dockerfile")
        last = dict(steps)
        assert yaml.safe_load(last["CMD"]) == SERVICES[service]["command"]
        assert last["USER"] == SERVICES[service]["user"]
        given = dict(rest.split("=", 1) for word, rest in steps if word == "ARG")
        assert given.get("ORCHESTRATOR", f"{OWN[0]}:{VERSION}") == f"{OWN[0]}:{VERSION}"


@pytest.mark.parametrize(
    "lock",
    [
        "requirements.lock",
        *(f"docker/{name}.lock" for name in ("orchestrator", "trainer", "trainer-cpu")),
    ],
)
def test_every_pin_of_a_lock_has_the_hashes_that_its_install_asks_for(lock: str) -> None:
    text = re.sub(r"(?m)^#.*\n", "", read(lock)).replace("\\\n", " ")
    for pin in text.splitlines():
        assert re.fullmatch(r"\S+==\S+( +--hash=sha256:[0-9a-f]{64})+", pin), pin
    dockerfiles = "".join(file.read_text(encoding="utf-8") for file in DOCKERFILES)
    lines = (read("Makefile") + dockerfiles.replace("${LOCK}", "docker/trainer.lock")).splitlines()
    installs = [line for line in lines if re.search(rf"install .*{lock}$", line)]
    assert len(installs) == 1
    assert "--require-hashes" in installs[0]


def test_every_image_of_others_can_be_pinned_by_digest_with_one_command(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho sha256:$(printf %s \"$6\" | sha256sum | cut -d' ' -f1)\n")
    docker.chmod(0o755)
    script, env = ROOT / "docker" / "pin-images.sh", {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["sh", script], env=env, check=True, capture_output=True, text=True)
    pinned = dict(line.split("=", 1) for line in done.stdout.splitlines())
    for image in pinned.values():
        assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", image), image
    others = [s["image"] for s in SERVICES.values() if s["image"].split(":")[0] not in OWN]
    builds = [SERVICES[name]["build"] for name in ("prefect", "trainer")]
    given = [*others, *(image for build in builds for image in build["args"].values())]
    assert {re.sub(r"\$\{(\w+):-.*", r"\1", image) for image in given} == pinned.keys()
    for build in builds:
        steps = instructions(ROOT / build["dockerfile"])
        arguments = dict(rest.split("=", 1) for word, rest in steps if word == "ARG")
        assert {
            name: default_of(image) for name, image in build["args"].items()
        }.items() <= arguments.items()
        stages = {rest.split()[0] for word, rest in steps if word == "FROM"}
        assert stages - {"scratch"} == {
            f"${{{name}}}" for name in arguments if name not in ("LOCK", "TORCH")
        }


def test_the_builder_is_given_what_is_copied_and_nothing_else() -> None:
    given = {
        line.removeprefix("!")
        for line in read(".dockerignore").splitlines()
        if line.startswith("!")
    }
    copies = [
        rest.split() for file in DOCKERFILES for word, rest in instructions(file) if word == "COPY"
    ]
    own = [words for words in copies if not any(word.startswith("--from=") for word in words)]
    sources = [source for words in own for source in words[:-1] if not source.startswith("--")]
    assert {source.split("/")[0] for source in sources} == given
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_the_containers_profile_fits_what_compose_gives() -> None:
    profile = load_profile(str(ROOT / "docker" / "team.example.yaml"))
    targets = {v.split(":")[1] for v in SERVICES["worker"]["volumes"]}
    assert {str(profile.paths.runs), str(profile.paths.state)} <= targets
    assert profile.ledger.url_env in secrets(SERVICES["worker"])
    assert f"--profile={profile.name}" in SERVICES["serve"]["command"]


def test_git_passes_over_what_a_site_puts_into_the_checkout(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    ignored = subprocess.run(
        ["git", "check-ignore", *SITES_OWN], cwd=tmp_path, capture_output=True, text=True
    )
    assert ignored.stdout.split() == SITES_OWN


def everything(node: Any, key: str) -> list[Any]:
    """Values under `key`, wherever it stands."""
    if isinstance(node, list):
        return [found for each in node for found in everything(each, key)]
    if not isinstance(node, dict):
        return []
    here = [node[key]] if key in node else []
    return here + [found for each in node.values() for found in everything(each, key)]


def test_pods_are_ours_at_this_version_without_root_and_name_secrets_only() -> None:
    documents, text = [*K8S.values()], "".join(K8S_TEXTS.values())
    assert set(everything(documents, "runAsUser")) == {1000}, "the images' own"
    assert set(everything(documents, "runAsNonRoot")) == {True}
    assert not re.search(r"(?i)\b(password|token|secret_?key|auth-?string): *[^\s{}]{12,}", text)
    assert not re.search(r"://[^/@\s…]+:[^/@\s…]+@", text)
    images = everything(documents, "image")
    named = [
        i if isinstance(i, str) else f"{i['repository']}:{i.get('tag') or i.get('prefectTag')}"
        for i in images
    ]
    assert {name.split("/")[-1] for name in named} == {f"{image}:{VERSION}" for image in OWN}
    assert f"\nray=={RAY['rayVersion']} " in read("docker/trainer.lock")


def test_kubernetes_knows_every_key_of_what_is_applied() -> None:
    pods = [
        {"apiVersion": "v1", "kind": "Pod"} | template for template in everything(RAY, "template")
    ]
    for applied in (*K8S["files.yaml"], *K8S["site.yaml"], *pods):
        for version in ("1.34", "1.37"):
            kubernetes_validate.validate(applied, version, strict=True)


def test_every_claim_is_made_and_every_volume_mounted() -> None:
    made = {d["metadata"]["name"] for d in K8S["site.yaml"] if d["kind"] == "PersistentVolumeClaim"}
    assert {
        claim["claimName"] for claim in everything([*K8S.values()], "persistentVolumeClaim")
    } == made
    for pod in (
        RAY["headGroupSpec"]["template"]["spec"],
        RAY["workerGroupSpecs"][0]["template"]["spec"],
    ):
        mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_profile_is_that_of_compose_with_the_ray_cluster(tmp_path: Path) -> None:
    text = next(d for d in K8S["site.yaml"] if d["kind"] == "ConfigMap")["data"]["team.yaml"]
    (tmp_path / "team.yaml").write_text(text, encoding="utf-8")
    here, there = (
        load_profile(str(path))
        for path in (tmp_path / "team.yaml", ROOT / "docker" / "team.example.yaml")
    )
    assert here.model_copy(update={"trainer": there.trainer}) == there
    name = K8S["raycluster.yaml"][0]["metadata"]["name"]
    assert here.trainer.ray_dashboard_url == f"http://{name}-head-svc:8265"


def test_prefects_server_and_workers_have_the_settings_of_compose() -> None:
    given = {
        e["name"]: e.get("value")
        for e in K8S["prefect-server.values.yaml"][0]["global"]["prefect"]["env"]
    }
    compose = SERVICES["prefect"]["environment"]
    for name in (
        n
        for n in compose
        if re.search("MESSAGING|ORDERING|LEASE|ANALYTICS|V2|PROMOTIONAL|SERVICES", n)
    ):
        assert given[name] == compose[name], name
    pools = [
        p["config"]["workPool"] for p in everything([*K8S.values()], "worker") if "config" in p
    ]
    assert sorted(pools) == sorted(WORK_POOLS)
    worker = K8S["prefect-worker.values.yaml"][0]["worker"]
    given = {each["name"]: each["value"] for each in worker["extraEnvVars"]}
    given["PREFECT_WORKER_QUERY_SECONDS"] = str(worker["config"]["queryInterval"])
    compose = SERVICES["worker"]["environment"]
    assert given.items() <= compose.items()
    assert compose.keys() - given.keys() == {"PREFECT_API_URL", "TZ"}
