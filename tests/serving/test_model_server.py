"""The command that serves a model, without starting it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qinglan.config import Profile
from qinglan.runs.launcher import Command
from qinglan.serving.routes import Backend
from qinglan.serving.server_process import CPU_BATCH, places_of, serve_command

ProfileOf = Callable[..., Profile]
GPUS = {"device": "cuda", "gpus_per_node": 8}


def command(profile: Profile, folder: Path, gpus: tuple[str, ...] = ()) -> tuple[Command, dict[str, str]]:
    """The command, and its options by name."""
    backend = Backend(url="http://127.0.0.1:8123/v1", model="version-7", version="7")
    made = serve_command(profile, folder, backend, 8123, gpus)
    words = made.argv[3:]
    options = zip(words[::2], words[1::2], strict=True)
    return made, {name.removeprefix("--"): value for name, value in options}


def test_on_the_cpu_the_model_is_served_as_it_was_trained(profile_of: ProfileOf, tmp_path: Path):
    made, given = command(profile_of(student={"max_new_tokens": 24}), tmp_path)
    assert made.argv[:3] == [sys.executable, "-m", "swift.cli.deploy"]
    assert Path(given.pop("model")).is_absolute()
    expected = {
        "infer_backend": "transformers", "device_map": "cpu", "max_batch_size": str(CPU_BATCH), "host": "127.0.0.1",
        "port": "8123", "served_model_name": "version-7", "template": "qwen3_nothinking", "max_new_tokens": "24",
    }  # fmt: skip
    assert expected.items() <= given.items()


def test_on_gpus_vllm_takes_its_share_of_them(profile_of: ProfileOf, tmp_path: Path):
    serve = {"models_per_gpu": 2, "extra": {"vllm_max_model_len": 1024}}
    profile = profile_of(trainer=GPUS, rl={"tensor_model_parallel_size": 4}, serve=serve)
    made, given = command(profile, tmp_path, ("4", "5", "6", "7"))
    assert (given["infer_backend"], given["vllm_tensor_parallel_size"]) == ("vllm", "4")
    assert (given["vllm_gpu_memory_utilization"], given["vllm_max_model_len"]) == ("0.45", "1024")
    assert made.env["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert "device_map" not in given and "max_batch_size" not in given


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
    assert places_of(profile_of(), visible) is None, "the CPU takes any number of models"
