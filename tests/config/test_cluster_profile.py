"""The effect of a Ray cluster in the profile: on the checks before a run, and on what commands ask
for."""

from pathlib import Path
from typing import Any

import letters
import pytest
from fake_ray import FakeRay
from fixture_types import ProfileOf

from qinglan.config import Profile
from qinglan.ops.checks import Check
from qinglan.ops.preflight import inspect_profile, trainer
from qinglan.training.engines.generate import generate_commands
from qinglan.training.engines.swift import engine_python, merge_command, sft_command
from qinglan.training.engines.verl import export_command


def on_cluster(profile_of: ProfileOf, url: str, is_live: bool = False, **trainer: Any) -> Profile:
    settings = {
        "device": "cuda",
        "gpus_per_node": 4,
        "nodes": 1,
        "ray_dashboard_url": url,
    } | trainer
    live = {"rag": {"url": url}, "judge": {"model": "small", "base_url": url}} if is_live else {}
    return profile_of(
        trainer=settings,
        rl={"tensor_model_parallel_size": 2, "ppo_micro_batch_size_per_gpu": 2},
        **live,
    )


def check_of(profile: Profile, name: str) -> Check:
    return next(check for check in inspect_profile(profile, "train") if check.name == name)


def test_no_gpu_of_this_machine_is_asked_for(
    profile_of: ProfileOf, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trainer.shutil, "which", lambda _: None)
    profile = on_cluster(profile_of, ray.url)
    assert check_of(profile, "device").problem is None
    assert check_of(profile, "ray") == Check("ray", ray.url)
    assert "trainer packages" not in [check.name for check in inspect_profile(profile, "train")]


@pytest.mark.parametrize(("nodes", "nodes_text"), [([], "none"), ([2, 2], "2, 2"), ([4], "4")])
def test_a_cluster_without_enough_gpus(
    profile_of: ProfileOf, ray: FakeRay, nodes: list[int], nodes_text: str
):
    ray.nodes = [{"state": "ALIVE", "resources_total": {"GPU": float(count)}} for count in nodes]
    ray.nodes.append({"state": "DEAD", "resources_total": {"GPU": 8.0}})
    problem = check_of(on_cluster(profile_of, ray.url, is_live=True, nodes=2), "ray").problem
    assert (
        f"asks for 2 × 4 GPUs (gpus_per_node) and the nodes of {ray.url} have {nodes_text};"
        in str(problem)
    )


def test_a_dashboard_or_simulators_out_of_reach(profile_of: ProfileOf, ray: FakeRay):
    profile = on_cluster(profile_of, ray.url, nodes=2)  # so the address is a tunnel's
    assert "the simulators for RAG and judge answer on this machine only" in str(
        check_of(profile, "ray").problem
    )
    asks_neither = profile.model_copy(update={"recipe": str(Path(letters.__file__))})
    assert "simulators" not in str(check_of(asks_neither, "ray").problem)
    ray.is_down = True
    assert str(check_of(profile, "ray").problem).startswith(f"Ray {ray.url}: ")


def gpus_of(profile: Profile, folder: Path) -> list[int]:
    sft = sft_command(
        profile, model="m", train_file=folder, dev_file=folder, output_dir=folder, resume_from=None
    )
    merge = merge_command(profile, adapter=folder, output_dir=folder, model="m")
    (generate, *_) = generate_commands(profile, {"sft": "m"}, folder, folder, {})
    export = export_command(profile, checkpoint=folder, base_model=folder, output_dir=folder)
    return [command.gpus for command in (sft, merge, generate, export)]


def test_commands_name_the_gpus_that_they_use_themselves(profile_of: ProfileOf, tmp_path: Path):
    assert gpus_of(on_cluster(profile_of, "http://127.0.0.1:1"), tmp_path) == [4, 4, 2, 1]
    assert gpus_of(profile_of(), tmp_path) == [0, 0, 0, 0]
    assert engine_python(on_cluster(profile_of, "http://127.0.0.1:1")) == "python", (
        "that of the nodes"
    )
