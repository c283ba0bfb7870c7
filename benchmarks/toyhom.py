"""6,146 real patient questions through the data stages, with the keyword-extracting stand-in as teacher.

    make bench NAME=toyhom DATA=toyhom

Prints the tables of docs/toyhom.md and writes them there. The data (MIT licence) is not part of this repository.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DATA = Path(os.environ.get("DATA", "toyhom"))
PAGE = Path(__file__).parent.parent / "docs" / "toyhom.md"
SETTINGS = (f"data.workbook={DATA / 'questions.xlsx'}", f"rag.knowledge_base={DATA / 'kb.jsonl'}")

INTRO = """# Real questions through the data stages

The embedded default also takes real data. These are the {n:,} patient questions of the public Toyhom dialogues (MIT
licence; internal medicine) with their {documents:,} documents. The teacher is the stand-in, which knows nothing of
medicine and falls back to keyword extraction (jieba), so this shows the stages at work on real, messy text, not what
a language model would achieve. Made by `make bench NAME=toyhom`:

```
{command}
```
"""


def main() -> None:
    """Run the refresh flow, then write the page."""
    if not DATA.is_dir():
        sys.exit(f"error: {DATA} is not there; set DATA to the folder with questions.xlsx and kb.jsonl")
    command = ["run", "refresh", "--profile", "embedded", *(part for s in SETTINGS for part in ("--set", s))]
    subprocess.run([sys.executable, "-m", "qinglan.cli", *command], check=True)
    report = json.loads(Path("runs/latest/report.json").read_text(encoding="utf-8"))
    documents = sum(1 for _ in (DATA / "kb.jsonl").open(encoding="utf-8"))
    intro = INTRO.format(
        n=report["stages"][0]["rows_in"],
        documents=documents,
        command=f"qinglan {' '.join(command)}".replace(f"{DATA}/", "toyhom/"),
    )
    page = "\n".join([intro, *stages_table(report), "", *arms_table(report), "", *reading(report), ""])
    PAGE.write_text(page, encoding="utf-8")
    print(page)


def stages_table(report: dict[str, Any]) -> list[str]:
    """Counts by stage."""
    lines = ["| Stage | Rows in | Rows out | Fell, by reason | Seconds |", "| --- | ---: | ---: | --- | ---: |"]
    for stage in report["stages"]:
        fell = ", ".join(f"{reason} {n:,}" for reason, n in stage["dropped"].items()) or "–"
        lines.append(
            f"| {stage['name']} | {stage['rows_in']:,} | {stage['rows_out']:,} | {fell} | {stage['seconds']:.0f} |"
        )
    return lines


def arms_table(report: dict[str, Any]) -> list[str]:
    """Top-1 of the original question and of the teacher's rewrite."""
    lines = ["| Query | n | Gold top-1 [95% CI] | MRR@10 | Mean top-1 score |", "| --- | ---: | --- | ---: | ---: |"]
    for name, arm in report["arms"].items():
        low, high = arm["top1_ci95"]
        lines.append(
            f"| {name} | {arm['n']:,} | {arm['top1']:.3f} [{low:.3f}, {high:.3f}] | {arm['mrr10']:.3f} "
            f"| {arm['mean_top1_score']:.3f} |"
        )
    return lines


def reading(report: dict[str, Any]) -> list[str]:
    """What the comparison says."""
    found = next(c for c in report["comparisons"] if c["metric"] == "top1")
    low, high = found["ci95"]
    return [
        f"{found['a']} − {found['b']}, top-1, paired: {found['diff']:+.3f} [{low:+.3f}, {high:+.3f}], "
        f"{found['wins']:,} wins, {found['ties']:,} ties, {found['losses']:,} losses."
    ]


if __name__ == "__main__":
    main()
