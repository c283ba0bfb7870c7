"""Preflight: every problem is found before anything is spent, and no secret is shown."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_service import PRICE, SIMULATED
from fixture_types import ProfileOf, Serve

from qinglan.config import Profile
from qinglan.ops.checks import Check
from qinglan.ops.preflight import inspect_profile, trainer

CAPITALS = str(Path(__file__).parents[1] / "support" / "capitals_recipe.py")


def problems(profile: Profile, flow: Any = "refresh") -> dict[str, str]:
    return {check.name: check.problem for check in inspect_profile(profile, flow) if check.problem}


def names_of_checks(profile: Profile, flow: Any) -> list[str]:
    return [check.name for check in inspect_profile(profile, flow)]


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "TRAINER_PACKAGES", ("pytest",))


@pytest.mark.parametrize("flow", ["refresh", "pipeline"])
def test_the_simulators_need_nothing_on_a_cpu(profile_of: ProfileOf, flow: str):
    assert problems(profile_of(**SIMULATED, trainer={"device": "cpu"}), flow) == {}
    assert problems(profile_of())["judge"].startswith(
        "judge.model: no simulated model is called small; there are "
    )


def test_teachers_are_not_compared_on_answers_that_rows_bring(profile_of: ProfileOf):
    rivals = {"teachers": {"other": {"base_url": "embedded", "model": "simulated-rewriter"}}}
    medical = SIMULATED | {"recipe": "medical", "compare": rivals}
    compared = problems(profile_of(**medical), "compare")
    assert compared["compare"].startswith("compare: recipe `medical` takes the answers that its")
    evaluated = problems(profile_of(**medical, evaluate={"teachers": ["other"]}), "evaluate")
    assert evaluated["recipe"].startswith("evaluate.teachers: recipe `medical` takes the answers")


def test_flows_check_only_what_they_use(profile_of: ProfileOf):
    services = ["recipe", "teacher", "judge", "red team", "champion", "rag", "ledger"]
    names_by_flow = {
        "refresh": ["recipe", "workbook", "teacher", "judge", "rag", "ledger"],
        "train": [*services, "base model", "schedule", "device", "trainer packages"],
        "evaluate": [*services, "device", "trainer packages"],
    }
    for flow, names in names_by_flow.items():
        assert names_of_checks(profile_of(), flow) == names
    without_teacher = profile_of(gate={"rivals": ["sft"]})
    assert "teacher" not in names_of_checks(without_teacher, "evaluate"), "it is asked nothing"
    unjudged = profile_of(validation={"judge_baseline": False})
    assert names_of_checks(unjudged, "refresh") == [
        "recipe",
        "workbook",
        "teacher",
        "rag",
        "ledger",
    ]


def test_what_evaluation_asks_beside_the_judge_is_checked(profile_of: ProfileOf, tmp_path: Path):
    endpoint = {"base_url": "http://127.0.0.1:9/v1", "model": "small"}
    teachers = {"cheap": endpoint, "other": endpoint}
    evaluate = {"teachers": ["cheap"], "red_team": str(tmp_path / "none.jsonl")}
    by_check = problems(profile_of(compare={"teachers": teachers}, evaluate=evaluate), "train")
    problem = by_check["compare.teachers.cheap"]
    assert "compare.teachers.cheap.base_url can't be reached" in problem
    assert "no such file" in by_check["red team"]
    assert "compare.teachers.other" not in by_check


@pytest.mark.parametrize(
    ("sections", "name", "message"),
    [
        ({"recipe": "query_rewrit"}, "recipe", "did you mean `query_rewrite`?"),
        ({"data": {"workbook": "/no/such.xlsx"}}, "workbook", "/no/such.xlsx"),
        (
            {"recipe": "medical", "gate": {"rivals": ["original"]}},
            "recipe",
            "does not retrieve; name another arm than",
        ),
        (
            {"recipe": CAPITALS},
            "workbook",
            "data.workbook: recipe capitals_recipe has no simulated domain; give your",
        ),
        (
            {"recipe": CAPITALS},
            "base model",
            "student.base_model: recipe capitals_recipe has no simulated domain",
        ),
        (
            {"teacher": {"model": "big", "base_url": "http://127.0.0.1:9/v1"}},
            "teacher",
            "base_url can't be reached",
        ),
        (
            {
                "teacher": {"model": "gpt-4.1", "reasoning_effort": "low"},
                "prices": {"gpt-4.1": PRICE, "small": PRICE},
            },
            "teacher",
            "teacher.reasoning_effort: gpt-4.1 takes none and would refuse; remove it",
        ),
        (
            {"judge": {"model": "big", "base_url": "no-scheme"}},
            "judge",
            "judge.base_url can't be reached",
        ),
        ({"rag": {"url": "http://127.0.0.1:9/q"}}, "rag", "rag.url can't be reached"),
        (
            {"rag": {"knowledge_base": __file__}},
            "rag",
            "test_preflight.py, line 1: `content`: Invalid JSON",
        ),
        (
            {"rag": {"preset": "dify"}},
            "rag",
            "the simulator keeps Qinglan's own contract; set `qinglan`",
        ),
        ({"student": {"base_model": "/no/model"}}, "base model", "no config.json in it"),
        (
            {"student": {"base_model": "/no/model", "revision": "v1"}},
            "base model",
            "leave out student.revision",
        ),
        (
            {"student": {"base_model": "a/b"}, "rl": {"start_from": "base"}},
            "base model",
            "base_model is a/b; download",
        ),
        (
            {"rl": {"critic_model": "no/critic", "critic_revision": "v1"}},
            "critic model",
            "no/critic --revision v1`",
        ),
        ({"trainer": {"device": "cuda"}}, "device", "this machine has none"),
        (
            {"rl": {"rollout_engine": "vllm"}, "trainer": {"python": "/no/python"}},
            "trainer packages",
            "no such interpreter; name that of the trainer's, or run `make setup-vllm`",
        ),
        ({"trainer": {"python": "/no/python"}}, "trainer packages", "no such interpreter"),
    ],
)
def test_wrong_settings(
    profile_of: ProfileOf,
    monkeypatch: pytest.MonkeyPatch,
    sections: dict[str, Any],
    name: str,
    message: str,
):
    monkeypatch.setattr(trainer.shutil, "which", lambda _: None)
    assert message in problems(profile_of(**sections), "pipeline")[name]


def test_a_hub_model_without_a_revision_is_noted(
    profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: "found")

    def notes(revision: str | None) -> dict[str, str | None]:
        student = {"base_model": "Qwen/Qwen3-8B", "revision": revision}
        rl = {"critic_model": "Qwen/Qwen3-4B", "critic_revision": revision}
        checks = inspect_profile(profile_of(student=student, rl=rl), "train")
        notes = {check.name: check.note for check in checks}
        return {name: notes[name] for name in ("base model", "critic model")}

    unpinned = "whatever the hub has under that name is taken"
    assert notes(None) == {
        "base model": (
            f"student.base_model: Qwen/Qwen3-8B: {unpinned}; name a commit in student.revision"
        ),
        "critic model": (
            f"rl.critic_model: Qwen/Qwen3-4B: {unpinned}; name a commit in rl.critic_revision"
        ),
    }
    assert notes("abc123") == {"base model": None, "critic model": None}


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_the_trainers_environment_is_checked(
    profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    python = program(tmp_path / "python", "echo no libpython >&2; exit 127")
    problem = problems(profile_of(trainer={"python": python}), "train")["trainer packages"]
    assert problem.endswith(f"exits with 127: no libpython; try `{python}` by hand, and correct it")
    own = profile_of(trainer={"python": sys.executable})
    assert "trainer packages" not in problems(own, "train")
    monkeypatch.setattr(trainer, "TRAINER_PACKAGES", ("pytest", "no-such-package"))
    lacking = problems(own, "train")["trainer packages"]
    assert lacking.startswith(
        f"trainer.python: {sys.executable} lacks no-such-package; see docker/"
    )


def test_gpus_are_counted_and_vllm_is_needed(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program(
        tmp_path / "nvidia-smi",
        "echo 'GPU 0: H100 (UUID: x)'; echo '  MIG 1g.10gb'; echo 'GPU 1: H100'",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def problems_with(gpus: int) -> dict[str, str]:
        return problems(profile_of(trainer={"device": "cuda", "gpus_per_node": gpus}), "train")

    assert "asks for 4 and this machine has 2" in problems_with(4)["device"]
    with_two = problems_with(2)
    assert "device" not in with_two
    hint = "see docker/trainer.Dockerfile; set trainer.python to that environment's"
    assert with_two["trainer packages"] == f"trainer.python: {sys.executable} lacks vllm; {hint}"


def test_the_ledger_is_opened(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    on_server = profile_of(ledger={"url_env": "A_LEDGER"})
    assert "needs the environment variable A_LEDGER" in problems(on_server)["ledger"]
    monkeypatch.setenv("A_LEDGER", "postgresql://me:s3cret@127.0.0.1:9/db")
    problem = problems(on_server)["ledger"]
    assert "127.0.0.1" in problem
    assert "s3cret" not in problem
    monkeypatch.setenv("A_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    assert "ledger" not in problems(on_server)
    (tmp_path / "file").write_text("x")
    profile = profile_of(paths={"runs": str(tmp_path), "state": str(tmp_path / "file")})
    assert problems(profile)["ledger"].startswith("paths.state: ")
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state" / "ledger.db").write_text("no database " * 100)
    assert "file is not a database" in problems(profile_of())["ledger"]


def test_a_remote_cluster_needs_a_ledger_on_a_server(profile_of: ProfileOf):
    remote = profile_of(
        trainer={"ray_dashboard_url": "http://head.invalid:8265"}, rl={"critic_model": "no/critic"}
    )
    by_check = problems(remote, "train")
    beginning = "ledger.url_env: is not given, and the nodes of http://head.invalid:8265"
    assert by_check["ledger"].startswith(beginning)
    assert "critic model" not in by_check
    assert "ledger" not in problems(remote, "refresh")
    here = {"ray_dashboard_url": "http://127.0.0.1:9"}
    assert "ledger" not in problems(profile_of(trainer=here | {"nodes": 1}), "train")
    behind_a_tunnel = profile_of(trainer=here | {"nodes": 2})
    assert "ledger" in problems(behind_a_tunnel, "train")


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "refuses the key (HTTP 401); check A_KEY"), (503, "answers HTTP 503"), (200, None)],
)
def test_a_live_teacher(
    profile_of: ProfileOf,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    message: str | None,
):
    monkeypatch.setenv("A_KEY", "sk-secret")
    service = serve(lambda _: (status, {}))
    profile = profile_of(teacher={"model": "big", "base_url": service.url, "api_key_env": "A_KEY"})
    problem = problems(profile).get("teacher")
    if message is None:
        assert problem is None
    else:
        assert message in str(problem)
    assert service.headers[0]["authorization"] == "Bearer sk-secret"
    monkeypatch.setenv("A_KEY", "sk-sec\nret")  # no header can hold it
    assert "sk-sec" not in f"{problem} {problems(profile)['teacher']}"
    monkeypatch.delenv("A_KEY")
    assert "teacher big needs the environment variable A_KEY" in problems(profile)["teacher"]


@pytest.mark.parametrize(
    ("reply", "note"),
    [
        ((200, {"data": [{"id": "big"}, {"id": "other"}]}), None),
        (
            (200, {"data": [{"id": "bigger"}, {"id": "else"}]}),
            "the service does not list this model; it has bigger, …",
        ),
        ((200, b"<html>"), "the model is not checked: the service lists none"),
        ((404, {}), "the model is not checked: GET /models answers HTTP 404"),
    ],
)
def test_a_model_that_is_not_listed_is_noted(
    profile_of: ProfileOf, serve: Serve, reply: Any, note: str | None
):
    profile = profile_of(teacher={"model": "big", "base_url": serve(lambda _: reply).url})
    (check,) = [check for check in inspect_profile(profile, "refresh") if check.name == "teacher"]
    assert (check.problem, check.note) == (None, note)


def test_a_recipe_says_which_services_are_checked_and_which_inputs_there_are(
    profile_of: ProfileOf, tmp_path: Path
):
    (tmp_path / "q.csv").write_text("问题,提示\n法国,塞纳河\n", encoding="utf-8")
    data = {"workbook": str(tmp_path / "q.csv")}
    capitals = profile_of(recipe=CAPITALS, data=data, **SIMULATED)
    assert names_of_checks(capitals, "refresh") == ["recipe", "workbook", "teacher", "ledger"]
    assert problems(capitals) == {}
    judging = profile_of(recipe=CAPITALS.replace("capitals", "judging"), data=data, **SIMULATED)
    by_check = problems(judging)
    assert list(by_check) == ["answerer"]
    assert "name one: {base_url: …, model: …}" in by_check["answerer"]
    of_dialogues = data | {"columns": {"dialogue": "提示"}}
    problem = problems(profile_of(recipe=CAPITALS, data=of_dialogues, **SIMULATED))["recipe"]
    assert (
        "data.columns.dialogue: recipe `capitals_recipe` reads no dialogues; leave it out"
        in problem
    )
    unknown_input = {"columns": {"inputs": {"hnt": "提示"}}}
    assert problems(profile_of(recipe=CAPITALS, data=unknown_input)) == {
        "recipe": (
            "data.columns.inputs: recipe `capitals_recipe` has no input `hnt`; "
            "it has capital, given, hint"
        )
    }


@pytest.fixture
def workbook(profile_of: ProfileOf) -> Callable[..., Check]:
    def check(**data: Any) -> Check:
        checks = inspect_profile(profile_of(data=data), "refresh")
        return next(check for check in checks if check.name == "workbook")

    return check


def test_only_the_first_rows_are_read_and_one_good_row_is_enough(
    workbook: Callable[..., Check], tmp_path: Path
):
    path = tmp_path / "q.jsonl"
    path.write_text('{"问题": "头疼"}\n' * 1000 + "not JSON\n")
    assert workbook(workbook=str(path)).problem is None
    path.write_text('{"问题": "头疼"}\n' * 999 + "not JSON\n")
    assert "q.jsonl:1000: not valid JSON" in str(workbook(workbook=str(path)).problem)
    path = tmp_path / "q.csv"
    path.write_text("问题\n" + "42\n" * 1500 + "？\n")
    problem = str(workbook(workbook=str(path)).problem)
    assert problem.startswith(f"{path}: no row can be used; empty_query: fill in")
    assert "; not_text: write" in problem
    path.write_text(path.read_text() + "头疼\n")
    assert workbook(workbook=str(path)).problem is None


def test_a_drop_folder_and_what_is_skipped_in_it(workbook: Callable[..., Check], tmp_path: Path):
    assert "holds no .xlsx" in str(workbook(workbook=str(tmp_path)).problem)
    (tmp_path / "q.csv").write_text("问题\n头疼\n")
    (tmp_path / "README.md").write_text("x")
    check = workbook(workbook=str(tmp_path))
    assert (check.problem, check.note) == (None, "skipped, by their suffix: README.md")


def test_a_database(workbook: Callable[..., Check], monkeypatch: pytest.MonkeyPatch):
    sql = {"url_env": "LOG_DB", "query": "SELECT '头疼' AS 问题"}
    assert "data.sql needs the environment variable LOG_DB" in str(workbook(sql=sql).problem)
    monkeypatch.setenv("LOG_DB", "sqlite://")
    assert workbook(sql=sql).problem is None
