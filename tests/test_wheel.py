"""A wheel runs alone: in an empty folder, where folders named like our own stand in its way."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.extended]
ROOT = Path(__file__).parents[1]
SMALL = {"sample_train_rows": 40, "sample_dev_rows": 10, "sample_test_rows": 10}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, as setuptools leaves a build folder in what it builds.
    source = folder / "source"
    left_out = shutil.ignore_patterns(
        ".*", "build", "*.egg-info", "__pycache__", "tests", "docs", "benchmarks"
    )
    shutil.copytree(ROOT, source, ignore=left_out)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", folder]
    subprocess.run([sys.executable, "-m", "pip", "wheel", source, *options], check=True)
    return next(folder.glob("*.whl"))


def test_it_holds_profiles_deployments_flows_and_tasks_and_no_other_top_level_name(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"qinglan"}
    for file in (
        "configs/embedded.yaml",
        "deployments/prefect.yaml",
        "flows/pipeline.py",
        "tasks/ingest.py",
    ):
        assert f"qinglan/{file}" in names


def test_it_runs_with_the_lowest_versions_that_it_allows_in_an_empty_folder(
    wheel: Path, tmp_path: Path
):
    """The engines are left out: a site installs exactly the versions that are locked."""
    python = tmp_path / "venv" / "bin" / "python"
    work = tmp_path / "work"
    uv = [sys.executable, "-m", "uv", "--quiet"]
    subprocess.run([*uv, "venv", "--python", sys.executable, tmp_path / "venv"], check=True)
    lowest = ["pip", "install", "--python", python, "--resolution", "lowest-direct", wheel]
    subprocess.run([*uv, *lowest], check=True)
    for name in ("flows", "tasks"):
        (work / name).mkdir(parents=True)
        (work / name / "__init__.py").write_text(
            "raise ImportError('the working folder was imported')"
        )
    argv = [python, "-m", "qinglan.cli", "run", "refresh", "--profile", "embedded"]
    for key, value in SMALL.items():
        argv += ["--set", f"embedded.{key}={value}"]
    process = subprocess.run(
        argv,
        cwd=work,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "Report:" in process.stdout
    assert (work / "runs" / "latest" / "report.html").is_file()
