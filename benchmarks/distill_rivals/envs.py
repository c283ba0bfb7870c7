"""An environment of its own for each rival, made once: below BENCH_ENVS, or
~/.cache/qinglan-bench."""

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
    # requests: distilabel imports it and leaves it to huggingface-hub, which no longer needs it.
    "distilabel": [
        "distilabel[openai]==1.5.3",
        "openai==3.52.0",
        "datasets==5.2.0",
        "requests==2.34.2",
    ],
}


class NotInstalledError(Exception):
    """The last line of what pip said."""


def python_of(rival: str) -> str:
    """The interpreter of a rival's environment.

    Raises:
        NotInstalledError: pip could not install it.
    """
    folder, wanted = FOLDER / rival, "\n".join(PACKAGES[rival])
    python, mark = folder / "bin" / "python", folder / "installed.txt"
    if mark.exists() and mark.read_text(encoding="utf-8") == wanted:
        return str(python)
    print(f"{rival}: installing {' '.join(PACKAGES[rival])} into {folder}, minutes", flush=True)
    for argv in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", *PACKAGES[rival]],
    ):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotInstalledError(
                ((done.stderr or done.stdout).strip().splitlines() or ["no output"])[-1]
            )
    mark.write_text(wanted, encoding="utf-8")
    return str(python)


def offline_env(home: Path) -> dict[str, str]:
    """No hub, no telemetry, no proxy, and a home of its own for caches: nothing outlives a run,
    nothing is reused."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    return kept | {
        "HOME": str(home),
        "OPENAI_API_KEY": "bench",
        "NO_PROXY": "127.0.0.1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "TELEMETRY_ENABLED": "false",  # curator's
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else curator's litellm fetches it
    }
