"""An environment of its own for each rival, made once.

It is made below BENCH_ENVS, or ~/.cache/qinglan-bench.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(os.environ.get("BENCH_ENVS") or Path.home() / ".cache" / "qinglan-bench")
PACKAGES = {
    # The same client library as ours, so that it does not decide.
    "asyncio_script": [
        *(f"{name}=={version(name)}" for name in ("openai", "pandas", "openpyxl")),
        "tenacity==9.2.1",
    ],
    "curator": [
        "bespokelabs-curator==0.1.31",
        "litellm==1.83.7",
        "aiohttp==3.13.5",
        "datasets==3.6.0",
    ],
    # Requests is named as distilabel imports it and leaves it to huggingface-hub, which no longer
    # needs it.
    "distilabel": [
        "distilabel[openai]==1.5.3",
        "openai==3.52.0",
        "datasets==5.2.0",
        "requests==2.34.2",
    ],
}


class NotInstalledError(Exception):
    """A rival's packages could not be installed; the message is the last line of pip's output."""


def python_of(rival: str) -> str:
    """The interpreter of a rival's environment.

    Raises:
        NotInstalledError: pip could not install it.
    """
    folder = FOLDER / rival
    packages = PACKAGES[rival]
    python = folder / "bin" / "python"
    # Written last: it says that all of these packages are there.
    mark = folder / "installed.txt"
    if mark.exists() and mark.read_text(encoding="utf-8") == "\n".join(packages):
        return str(python)
    print(f"{rival}: installing {' '.join(packages)} into {folder}, minutes", flush=True)
    for argv in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", *packages],
    ):
        process = subprocess.run(argv, capture_output=True, text=True, check=False)
        if process.returncode:
            output = (process.stderr or process.stdout).strip().splitlines()
            raise NotInstalledError(output[-1] if output else "no output")
    mark.write_text("\n".join(packages), encoding="utf-8")
    return str(python)


def offline_env(home: Path) -> dict[str, str]:
    """A process's environment without hub, telemetry and proxy.

    A home of its own takes the caches, so that nothing outlives a run and nothing is reused.
    """
    inherited = {
        name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ
    }
    return {
        **inherited,
        "HOME": str(home),
        "OPENAI_API_KEY": "bench",
        "NO_PROXY": "127.0.0.1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        # Curator's own telemetry, and the prices that its litellm would fetch.
        "TELEMETRY_ENABLED": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
