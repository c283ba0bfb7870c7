"""The shipped profiles: no secret, and command lines that the engines accept."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from verl_config import command_of, compose

from qinglan.clients.openai_protocol import request_parameters
from qinglan.config import EMBEDDED, Profile, load_profile
from qinglan.flows.refresh import refresh
from qinglan.ops.preflight import TRAINER_CHECKS, require
from qinglan.training.engines.swift import sft_command

PROFILES = [
    load_profile(str(path))
    for path in sorted((Path(__file__).parents[2] / "qinglan" / "configs").glob("*.yaml"))
]
ON_GPUS = [
    profile
    for profile in PROFILES
    if profile.trainer.device == "cuda" and profile.teacher.base_url != EMBEDDED
]
every_profile = pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
gpu_profile = pytest.mark.parametrize("profile", ON_GPUS, ids=lambda profile: profile.name)


@every_profile
def test_services_are_embedded_on_loopback_or_encrypted(profile: Profile):
    for url in (profile.teacher.base_url, profile.judge.base_url, profile.rag.url):
        address = urlsplit(url)
        is_safe = address.scheme == "https" or address.hostname == "127.0.0.1"
        assert url == EMBEDDED or is_safe, url


@gpu_profile
def test_models_that_think_have_room_to_answer(profile: Profile):
    for endpoint in (profile.teacher, profile.judge):
        sent = request_parameters(endpoint)
        assert endpoint.api_key_env
        assert sent.get("max_completion_tokens", sent.get("max_tokens")) >= 2048


@every_profile
def test_engines_accept_the_command_lines(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("A_KEY", "sk-secret")
    profile = profile.scheduled(560, 800)
    files = {
        "train_file": tmp_path / "train.jsonl",
        "dev_file": tmp_path / "dev.jsonl",
        "output_dir": tmp_path,
    }
    sft = sft_command(profile, model=profile.student.base_model, resume_from=None, **files)
    assert [word for word in sft.argv if not isinstance(word, str)] == []
    assert {"None", "True", "False"}.isdisjoint(sft.argv)
    assert [word for word in [*sft.argv, *sft.env.values()] if "sk-secret" in word] == []
    rl = compose(command_of(profile, tmp_path))
    assert min(rl.trainer.total_training_steps, rl.trainer.save_freq, rl.trainer.test_freq) > 0
    assert (
        rl.actor_rollout_ref.rollout.name
        == {"vllm": "vllm", "cpu": "hf_cpu"}[profile.rollout_engine]
    )


@gpu_profile
def test_a_rehearsal_decides_as_its_profile_does_on_simulators(profile: Profile):
    rehearsed = load_profile(f"{profile.name}_rehearsal")
    assert rehearsed.gate == profile.gate.model_copy(update={"approval": "none"})
    for section in ("dataset", "select", "reward", "evaluate", "targets"):
        assert getattr(rehearsed, section) == getattr(profile, section)
    assert rehearsed.budget == profile.budget.model_copy(
        update={"rl_new_share": rehearsed.budget.rl_new_share}
    )
    assert rehearsed.tenant.teacher_rules == profile.tenant.teacher_rules
    assert rehearsed.sft.num_train_epochs == profile.sft.num_train_epochs
    assert {rehearsed.teacher.base_url, rehearsed.judge.base_url, rehearsed.rag.url} == {EMBEDDED}
    assert not rehearsed.teacher.api_key_env
    assert rehearsed.trainer.device == "cpu"
    assert rehearsed.prices[rehearsed.teacher.model] == profile.prices[profile.teacher.model]


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning"
)  # Prefect's, MLflow's
@gpu_profile
def test_rehearsal_keeps_rows_and_lacks_nothing(
    profile: Profile, prefect_server: None, tmp_path: Path, database: str
):
    site = (
        f"paths.runs={tmp_path}/runs",
        f"paths.state={tmp_path}/state",
        f"tracking.uri={database}",
    )
    rehearsed = load_profile(f"{profile.name}_rehearsal", site)
    refresh(rehearsed.name, overrides=(*site, "data.limit=60", "embedded.teacher_latency_ms=0"))
    train_file = tmp_path / "runs" / "latest" / "dataset" / "sft_train.jsonl"
    assert len(train_file.read_text("utf-8").splitlines()) > 30
    problems: list[str] = []
    require(rehearsed, "pipeline", problems.append, leave_out=TRAINER_CHECKS)
    too_few = "[0-9,]+ test questions can (show a gain|rule out a loss)[^;]+;[^;]+"
    other_problems = [
        problem for problem in problems if not re.fullmatch(f"{too_few}(; {too_few})?", problem)
    ]
    assert other_problems == []
