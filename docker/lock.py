"""Writes the images' locks: what pip resolves for them, from metadata alone; nothing is installed.

    python docker/lock.py [orchestrator] [trainer]

On Linux x86_64 with Python 3.11, as the images have them; the trainer's takes some minutes.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
IMAGES = ("orchestrator", "trainer")
HEADER = """\
# Every package of the {image} image, as pip resolved them on Linux x86_64 with Python 3.11. Installed with --no-deps.
# Written by docker/lock.py from docker/{image}.in{also}
"""


def requirements(image: str) -> list[str]:
    """Arguments for pip: what the image needs, and what holds it back."""
    given = ["--requirement", str(HERE / f"{image}.in")]
    if image != "orchestrator":
        return given
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # The tests run with requirements.lock, so the image has its versions.
    return [*given, "--constraint", str(ROOT / "requirements.lock"), *project["dependencies"]]


def resolved(image: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        # --ignore-installed: what this interpreter's environment has does not count.
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        subprocess.run([*pip, "--report", str(report), *requirements(image)], check=True)
        packages = json.loads(report.read_text(encoding="utf-8"))["install"]
    pins = (f"{package['metadata']['name']}=={package['metadata']['version']}" for package in packages)
    return sorted(pins, key=str.lower)


def write(image: str) -> None:
    also = ", pyproject.toml and requirements.lock" if image == "orchestrator" else ""
    lines = resolved(image)
    text = HEADER.format(image=image, also=also) + "\n".join(lines) + "\n"
    (HERE / f"{image}.lock").write_text(text, encoding="utf-8")
    sys.stdout.write(f"docker/{image}.lock: {len(lines)} packages\n")


if __name__ == "__main__":
    for image in sys.argv[1:] or IMAGES:
        write(image)
