"""What benchmarks of whole runs share: Qinglan's commands, and where their figures go."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def qinglan(cwd: Path | None, *words: str) -> None:
    """Run a command in a folder; the benchmark ends where it fails."""
    if subprocess.run(
        [sys.executable, "-m", "qinglan.cli", *words], cwd=cwd, check=False
    ).returncode:
        sys.exit(f"error: `qinglan {' '.join(words[:4])}` failed; see above")


def with_set(settings: Iterable[str]) -> list[str]:
    """The words of a command line that make these settings."""
    return [word for setting in settings for word in ("--set", setting)]


def parse_options(parser: argparse.ArgumentParser, result: Path) -> argparse.Namespace:
    """The parser's options with `--set`, `--to` and `--site`; other settings must not overwrite the
    kept `result`."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all runs"
    )
    parser.add_argument("--to", type=Path, default=result, help="where the figures are written")
    parser.add_argument(
        "--site", type=Path, help="a folder with runs, such as one in which `make demo` ran"
    )
    asked = parser.parse_args()
    if asked.set and asked.to == result:
        parser.error(
            "--set measures something else than the shipped profiles; write it elsewhere with --to"
        )
    return asked


def write_figures(path: Path, figures: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"Written to {path}")
