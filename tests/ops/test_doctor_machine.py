"""Doctor's checks of the machine: each condition is made, none is this machine's own."""

import fcntl
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
from doubles import raising
from fixture_types import ProfileOf

from qinglan.config import Profile
from qinglan.ops.checks import Check
from qinglan.ops.doctor import machine
from qinglan.ops.doctor.machine import GB


def test_output_without_chinese(monkeypatch: pytest.MonkeyPatch):
    assert machine.check_text().problem is None
    monkeypatch.setattr(machine.sys, "getfilesystemencoding", lambda: "ascii")
    problem = "text: file names as ascii, which has no Chinese; export LANG=C.UTF-8 PYTHONUTF8=1"
    assert machine.check_text().problem == problem


def test_a_folder_that_can_not_be_written_to(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    assert machine.check_folders(profile).problem is None
    monkeypatch.setattr(
        machine.tempfile, "TemporaryFile", raising(OSError(30, "Read-only file system"))
    )
    problem = machine.check_folders(profile).problem or ""
    assert problem.startswith(
        f"paths.runs: {tmp_path} can't be written to: Read-only file system; paths.state: "
    )
    assert problem.endswith("give this user write access, or name another folder")


def disk(monkeypatch: pytest.MonkeyPatch, free: int, files: int = 10**6) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(
        machine.os, "statvfs", lambda _: SimpleNamespace(f_files=10**7, f_favail=files)
    )


def test_a_full_disk(profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch):
    profile = profile_of()
    disk(monkeypatch, GB // 2)
    assert "free, needed are " in (machine.check_disk(profile, "refresh").problem or "")
    disk(monkeypatch, 2 * GB)
    check = machine.check_disk(profile, "refresh")
    assert check.problem is None
    assert "only " in (check.note or "")
    disk(monkeypatch, 100 * GB)
    assert machine.check_disk(profile, "refresh").note is None
    disk(monkeypatch, 100 * GB, files=5)
    assert "space for 5 more files only (df -i)" in (
        machine.check_disk(profile, "refresh").problem or ""
    )
    large = profile_of(student={"base_model": "Qwen/Qwen3-32B"})
    disk(monkeypatch, 50 * GB)
    assert machine.check_disk(large, "refresh").problem is None
    assert "needed are " in (machine.check_disk(large, "train").problem or "")


def memory(monkeypatch: pytest.MonkeyPatch, total: float, available: float) -> None:
    figures = SimpleNamespace(total=int(total * GB), available=int(available * GB))
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: figures)
    monkeypatch.setattr(machine, "_CGROUP", Path("/no/cgroup"))


def test_memory_for_training_on_the_cpu(profile: Profile, monkeypatch: pytest.MonkeyPatch):
    memory(monkeypatch, 4, 3)
    problem = machine.check_memory(profile, "pipeline").problem or ""
    assert problem.startswith(
        "memory: this machine or container has 4.0 GB, and training on the CPU takes 5.0 GB; use"
    )
    assert machine.check_memory(profile, "refresh").problem is None
    memory(monkeypatch, 16, 3)
    check = machine.check_memory(profile, "pipeline")
    assert (check.problem, check.note) == (
        None,
        "training on the CPU takes 5.0 GB; end what else runs here first",
    )


def test_memory_for_a_model_by_its_size(
    profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    memory(monkeypatch, 100, 100)
    gpus = {"device": "cuda", "gpus_per_node": 8}
    rl = {"tensor_model_parallel_size": 4, "ppo_mini_batch_size": 32}

    def check(model: str) -> Check:
        return machine.check_memory(
            profile_of(trainer=gpus, rl=rl, student={"base_model": model}), "train"
        )

    assert "training Qwen/Qwen3-32B takes 129 GB; use a larger one" in (
        check("Qwen/Qwen3-32B").problem or ""
    )
    assert check("Qwen/Qwen3-8B").problem is None
    (tmp_path / "model.safetensors").write_bytes(bytes(8))
    for unknown in ("someone/our-model", str(tmp_path)):
        assert f"what {unknown} takes is not known" in check(unknown).detail


def test_a_container_s_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    memory(monkeypatch, 64, 60)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{8 * GB}\n")
    (tmp_path / "memory.current").write_text(f"{5 * GB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {2 * GB}\n")
    assert machine.memory_bytes() == (8 * GB, 5 * GB)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_bytes() == (64 * GB, 60 * GB)


def test_too_few_open_files(profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (256, 300))
    busy = profile_of(teacher={"model": "big", "concurrency": 100}, rag={"concurrency": 16})
    problem = machine.check_open_files(busy, "refresh").problem or ""
    assert (
        "256 may be open at once, and this profile's concurrency takes 520; "
        "raise it, and the hard limit"
    ) in problem
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert machine.check_open_files(busy, "refresh").problem is None


def test_databases_on_a_network_mount_and_locks_that_everybody_or_nobody_gets(
    profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch
):
    profile = profile_of()
    with_servers = profile_of(ledger={"url_env": "A_LEDGER"}, tracking={"uri": "http://mlflow"})
    mounts = [SimpleNamespace(mountpoint="/", fstype="nfs4")]
    monkeypatch.setattr(machine.psutil, "disk_partitions", lambda all: mounts)
    check = machine.check_locks(profile)
    assert check.problem is None
    assert (check.note or "").startswith(
        "ledger.db and mlflow.db there must be used from one machine only"
    )
    assert machine.check_locks(with_servers).note is None
    monkeypatch.setattr(machine, "_LOCKS", {"flock": lambda *_: None, "lockf": fcntl.lockf})
    problem = machine.check_locks(profile).problem or ""
    assert (
        "two processes get the same lock (flock), so two flows could write into one run; "
        "put it on a loc"
    ) in problem
    monkeypatch.setattr(machine, "_LOCKS", {"flock": raising(OSError(37, "No locks available"))})
    assert "can be locked in" in (machine.check_locks(profile).problem or "")


def test_python_is_one_that_qinglan_takes(monkeypatch: pytest.MonkeyPatch):
    assert machine.check_python().problem is None
    monkeypatch.setattr(machine.platform, "python_version", lambda: "3.9.2")
    assert "this is 3.9.2, Qinglan needs >=3.11" in (machine.check_python().problem or "")


def test_packages_that_are_missing_old_or_not_those_of_the_lock(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    requirements = [
        "pytest>=8",
        "no-such-package>=1",
        "pluggy>=99",
        'verl-of-no-one>=1; extra == "trainer"',
    ]
    monkeypatch.setattr(machine, "requires", lambda _: requirements)
    problem = machine.check_packages(profile, "refresh").problem or ""
    assert problem.startswith("packages: no-such-package is missing, pluggy is ")
    assert "verl-of-no-one" not in problem
    assert "verl-of-no-one is missing" in (machine.check_packages(profile, "train").problem or "")
    monkeypatch.setattr(machine, "requires", lambda _: ["PyTest>=8"])
    monkeypatch.setattr(machine, "LOCK", tmp_path / "requirements.lock")
    wheel = machine.check_packages(profile, "refresh")
    assert wheel.note is None
    assert "requirements.lock is only in a checkout" in wheel.detail
    machine.LOCK.write_text("pytest==8.0.0 \\\n    --hash=sha256:0\nother==1\n")
    assert "(tested with 8.0.0); run `make setup`" in (
        machine.check_packages(profile, "refresh").note or ""
    )
