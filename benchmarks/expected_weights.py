"""Keeps the digests of a run's weights as the expected ones of its profile.

python benchmarks/expected_weights.py RUN/report.json
"""

import sys
from pathlib import Path

import yaml

from qinglan.evaluation.models import Report
from qinglan.evaluation.weights import FILE


def main() -> None:
    """Write the digests of the report that the command line names."""
    report = Report.read(Path(sys.argv[1]))
    assert report.weights, "nothing was trained in this run"
    text = FILE.read_text(encoding="utf-8")
    header = "".join(f"{line}\n" for line in text.splitlines() if line.startswith("#"))
    entries = yaml.safe_load(text)
    entries[report.profile] = {"made_of": report.weights.made_of, **report.weights.found}
    FILE.write_text(header + yaml.safe_dump(entries), encoding="utf-8")


if __name__ == "__main__":
    main()
