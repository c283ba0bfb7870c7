"""Parts that benchmarks of whole runs share: Qinglan's commands, and where their figures go."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def qinglan(cwd: Path | None, *words: str) -> None:
    """Run a command in a folder; the benchmark ends where it fails."""
    argv = [sys.executable, "-m", "qinglan.cli", *words]
    if subprocess.run(argv, cwd=cwd, check=False).returncode:
        sys.exit(f"error: `qinglan {' '.join(words[:4])}` failed; see above")


def with_set(settings: Iterable[str]) -> list[str]:
    """The words of a command line that make these settings."""
    words: list[str] = []
    for setting in settings:
        words += ["--set", setting]
    return words


def parse_options(parser: argparse.ArgumentParser, result: Path) -> argparse.Namespace:
    """The parser's options with `--set`, `--to` and `--site`.

    Figures of other settings must not overwrite the kept `result`.
    """
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all runs"
    )
    parser.add_argument("--to", type=Path, default=result, help="where the figures are written")
    parser.add_argument(
        "--site", type=Path, help="a folder with runs, such as one in which `make demo` ran"
    )
    options = parser.parse_args()
    if options.set and options.to == result:
        parser.error(
            "--set measures something else than the shipped profiles; write it elsewhere with --to"
        )
    return options


def write_figures(path: Path, figures: Any) -> None:
    """Write as JSON and say where."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"Written to {path}")
