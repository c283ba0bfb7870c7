"""The commands that `make` would run, without running them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def output_of_make(*words: str, status: int = 0) -> list[str]:
    # Not those of the `make` that may run these tests.
    env = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")
    }
    process = subprocess.run(
        ["make", *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert process.returncode == status, process.stderr
    return process.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "profile"),
    [((), "embedded"), (("PROFILE=medical",), "medical"), (("PROFILE=a.yaml",), "a.yaml")],
)
def test_the_demo_asks_the_champion_of_the_profile_that_it_ran(
    words: tuple[str, ...], profile: str
):
    lines = [line for line in output_of_make("-n", "demo", *words) if "bin/qinglan" in line]
    run, serve = (line.partition("qinglan ")[2] for line in lines)
    assert run == f"run pipeline --report-suffices --profile {profile}"
    assert serve.startswith(f"serve --check --if-released --profile {profile} ||")


@pytest.mark.parametrize(("failing", "status", "lines"), [("run", 2, 1), ("serve", 0, 3)])
def test_a_demo_fails_only_before_its_result(tmp_path: Path, failing: str, status: int, lines: int):
    program = tmp_path / "bin" / "qinglan"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho $1\ntest $1 != {failing} || exit 2\n")
    program.chmod(0o755)
    (tmp_path / ".installed").touch()
    assert len(output_of_make("demo", f"VENV={tmp_path}", status=status)) == lines


def test_help_names_every_recipes_demo():
    (demo,) = [line for line in output_of_make("help") if line.startswith("demo ")]
    assert "PROFILE=medical" in demo
    assert "PROFILE=answer_judge" in demo
