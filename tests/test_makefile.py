"""What `make` would run, without running it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def made(*words: str) -> list[str]:
    environment = {name: text for name, text in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(["make", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "profile"), [((), "embedded"), (("PROFILE=medical",), "medical"), (("PROFILE=a.yaml",), "a.yaml")]
)
def test_the_demo_asks_the_champion_of_the_profile_that_it_ran(words: tuple[str, ...], profile: str):
    commands = [line.partition("qinglan ")[2] for line in made("-n", "demo", *words) if "bin/qinglan" in line]
    assert commands == [f"run pipeline --profile {profile}", f"serve --check --if-released --profile {profile}"]


def test_help_names_every_recipes_demo():
    (demo,) = [line for line in made("help") if line.startswith("demo ")]
    assert "PROFILE=medical" in demo and "PROFILE=answer_judge" in demo
