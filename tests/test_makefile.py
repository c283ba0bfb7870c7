"""What `make` would run, without running it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def made(*words: str, status: int = 0) -> list[str]:
    environment = {
        name: text for name, text in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")
    }
    done = subprocess.run(
        ["make", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "profile"),
    [((), "embedded"), (("PROFILE=medical",), "medical"), (("PROFILE=a.yaml",), "a.yaml")],
)
def test_the_demo_asks_the_champion_of_the_profile_that_it_ran(
    words: tuple[str, ...], profile: str
):
    run, serve = (
        line.partition("qinglan ")[2]
        for line in made("-n", "demo", *words)
        if "bin/qinglan" in line
    )
    assert run == f"run pipeline --report-suffices --profile {profile}"
    assert serve.startswith(f"serve --check --if-released --profile {profile} ||")


@pytest.mark.parametrize(("failing", "status", "lines"), [("run", 2, 1), ("serve", 0, 3)])
def test_a_demo_fails_only_before_its_result(tmp_path: Path, failing: str, status: int, lines: int):
    program = tmp_path / "bin" / "qinglan"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho $1\ntest $1 != {failing} || exit 2\n")
    program.chmod(0o755)
    (tmp_path / ".installed").touch()
    assert len(made("demo", f"VENV={tmp_path}", status=status)) == lines


def test_help_names_every_recipes_demo():
    (demo,) = [line for line in made("help") if line.startswith("demo ")]
    assert "PROFILE=medical" in demo and "PROFILE=answer_judge" in demo
