"""The command that serves a model, without starting it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qinglan.config import Profile
from qinglan.serving.model_server import CPU_BATCH, backend_at, engine_of, places_of, serve_command

ProfileOf = Callable[..., Profile]
GPUS = {"device": "cuda", "gpus_per_node": 8}


def options(argv: list[str]) -> dict[str, str]:
    words = argv[3:]
    return {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}


def command(profile: Profile, folder: Path, gpus: tuple[str, ...] = ()):
    return serve_command(profile, folder, backend_at(8123, "7"), 8123, gpus)


def test_a_backend_goes_by_its_version():
    backend = backend_at(8123, "7")
    assert (backend.url, backend.model, backend.version) == ("http://127.0.0.1:8123/v1", "version-7", "7")


def test_the_server_is_started_as_a_module_which_stops_cleanly(profile_of: ProfileOf, tmp_path: Path):
    assert command(profile_of(), tmp_path).argv[:3] == [sys.executable, "-m", "swift.cli.deploy"]


def test_on_the_cpu_requests_are_answered_together(profile_of: ProfileOf, tmp_path: Path):
    given = options(command(profile_of(), tmp_path).argv)
    assert (given["infer_backend"], given["device_map"]) == ("transformers", "cpu")
    assert given["max_batch_size"] == str(CPU_BATCH)
    assert (given["host"], given["port"], given["served_model_name"]) == ("127.0.0.1", "8123", "version-7")


def test_the_model_is_served_as_it_was_trained(profile_of: ProfileOf, tmp_path: Path):
    given = options(command(profile_of(student={"max_new_tokens": 24}), tmp_path).argv)
    assert (given["model_type"], given["template"]) == ("qwen3", "qwen3_nothinking")
    assert (given["temperature"], given["max_new_tokens"]) == ("0", "24")
    assert Path(given["model"]).is_absolute()


def test_questions_stay_out_of_the_log(profile_of: ProfileOf, tmp_path: Path):
    given = options(command(profile_of(), tmp_path).argv)
    assert (given["verbose"], given["log_interval"]) == ("false", "-1")


def test_on_gpus_vllm_takes_its_share_of_them(profile_of: ProfileOf, tmp_path: Path):
    profile = profile_of(trainer=GPUS, rl={"tensor_model_parallel_size": 4}, serve={"models_per_gpu": 2})
    made = command(profile, tmp_path, ("4", "5", "6", "7"))
    given = options(made.argv)
    assert (given["infer_backend"], given["vllm_tensor_parallel_size"]) == ("vllm", "4")
    assert given["vllm_gpu_memory_utilization"] == "0.45"
    assert made.env["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert "device_map" not in given and "max_batch_size" not in given


def test_more_arguments_pass_through(profile_of: ProfileOf, tmp_path: Path):
    profile = profile_of(serve={"extra": {"vllm_max_model_len": 1024, "max_batch_size": 4}})
    given = options(command(profile, tmp_path).argv)
    assert (given["vllm_max_model_len"], given["max_batch_size"]) == ("1024", "4")


@pytest.mark.parametrize(
    ("serve", "trainer", "engine"),
    [({}, {}, "transformers"), ({}, GPUS, "vllm"), ({"backend": "transformers"}, GPUS, "transformers")],
)
def test_the_engine_follows_the_device_unless_it_is_named(
    profile_of: ProfileOf, serve: dict[str, str], trainer: dict[str, object], engine: str
):
    assert engine_of(profile_of(serve=serve, trainer=trainer)) == engine


def test_the_cpu_has_room_for_any_number_of_models(profile_of: ProfileOf):
    assert places_of(profile_of(), {}) is None


@pytest.mark.parametrize(
    ("per_gpu", "visible", "places"),
    [
        (1, {}, [["0", "1", "2", "3"], ["4", "5", "6", "7"]]),
        (2, {"CUDA_VISIBLE_DEVICES": "2,3,6,7"}, [["2", "3", "6", "7"]] * 2),
        (1, {"CUDA_VISIBLE_DEVICES": "2,3"}, []),
    ],
)
def test_models_get_groups_of_gpus(
    profile_of: ProfileOf, per_gpu: int, visible: dict[str, str], places: list[list[str]]
):
    profile = profile_of(trainer=GPUS, rl={"tensor_model_parallel_size": 4}, serve={"models_per_gpu": per_gpu})
    assert places_of(profile, visible) == places
