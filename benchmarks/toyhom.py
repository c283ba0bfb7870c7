"""6,146 real patient questions through the data stages, two runs, with the simulated keyword
extractor as teacher.

    make bench NAME=toyhom DATA=toyhom

Works in a temporary site. Prints the tables of benchmarks/results/toyhom.md and writes them there.
The data (MIT licence) is not part of this repository.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import openpyxl

DATA = Path(os.environ.get("DATA", "toyhom"))
PAGE = Path(__file__).parent / "results" / "toyhom.md"
NEW, EDITED = 60, 5
ADDED_WORDS = "，平时饮食上要注意什么？"
EDITED_WORDS = "，麻烦说得详细些"

INTRO = """# Real questions through the data stages

The embedded default also takes real data. These are the {n:,} patient questions of the public Toyhom dialogues (MIT
licence; internal medicine) with their {documents:,} documents. The teacher is the simulated one, which knows nothing of
medicine and falls back to keyword extraction (jieba), so this shows how the stages handle real text, not what a
language model would achieve. Made by `make bench NAME=toyhom`, which runs, in a temporary site:

```
{command}
```
"""
COMMAND = (
    "qinglan run refresh --profile embedded --set data.workbook=toyhom/questions.xlsx "
    "--set rag.knowledge_base=toyhom/kb.jsonl"
)


def main() -> None:
    """Run the refresh flow twice, then write the page."""
    if not DATA.is_dir():
        sys.exit(
            f"error: {DATA} is not there; set DATA to the folder with questions.xlsx and kb.jsonl"
        )
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        first = refresh(site, DATA / "questions.xlsx")
        second = refresh(site, second_night(DATA / "questions.xlsx", site / "questions-2.xlsx"))
    documents = sum(1 for _ in (DATA / "kb.jsonl").open(encoding="utf-8"))
    intro = INTRO.format(n=first["stages"][0]["rows_in"], documents=documents, command=COMMAND)
    tables = [
        *stages_table(first),
        "",
        *arms_table(first),
        "",
        *reading(first),
        "",
        *runs_table(first, second),
        "",
    ]
    page = "\n".join([intro, *tables])
    PAGE.write_text(page, encoding="utf-8")
    print(page)
    if second["api"]["teacher"]["calls"] != NEW + EDITED:
        sys.exit(
            f"error: the second night asked {second['api']['teacher']['calls']} times, not {NEW + EDITED}"
        )


def refresh(site: Path, workbook: Path) -> dict[str, Any]:
    """One night's report."""
    settings = (
        f"data.workbook={workbook}",
        f"rag.knowledge_base={DATA / 'kb.jsonl'}",
        f"paths.runs={site / 'runs'}",
        f"paths.state={site / 'state'}",
    )
    command = [
        "run",
        "refresh",
        "--profile",
        "embedded",
        *(part for s in settings for part in ("--set", s)),
    ]
    subprocess.run([sys.executable, "-m", "qinglan.cli", *command], check=True)
    report: dict[str, Any] = json.loads(
        (site / "runs" / "latest" / "report.json").read_text(encoding="utf-8")
    )
    return report


def second_night(workbook: Path, target: Path) -> Path:
    """The workbook with some questions edited in their place, and some new ones at its end."""
    book = openpyxl.load_workbook(workbook)
    sheet = book.worksheets[0]
    column = next(cell.column for cell in sheet[1] if cell.value == "问题")
    questions = [sheet.cell(number, column) for number in range(2, sheet.max_row + 1)]
    step = len(questions) // NEW
    for cell in questions[: EDITED * step : step]:
        cell.value = f"{cell.value}{EDITED_WORDS}"
    for number, cell in enumerate(questions[1 : 1 + NEW * step : step]):
        row = [other.value for other in sheet[cell.row]]
        row[column - 1] = f"{cell.value}{ADDED_WORDS}"
        for place, value in enumerate(row, 1):
            sheet.cell(len(questions) + 2 + number, place, value)
    book.save(target)
    return target


def runs_table(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """The calls of each run."""
    lines = [
        "## The second run",
        "",
        f"The same workbook again, with {EDITED} questions edited and {NEW} new ones (real questions, each with a "
        "clause added). The teacher gets only new and changed questions; retrieval runs for every question, "
        "as the knowledge base may have changed.",
        "",
        "| | Rows | Teacher calls | from the ledger | Judge calls | from the ledger | RAG calls | Seconds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, report in (("first run", first), ("second run", second)):
        api, seconds = report["api"], sum(stage["seconds"] for stage in report["stages"])
        counts = [api[role][kind] for role in ("teacher", "judge") for kind in ("calls", "cached")]
        cells = " | ".join(
            f"{n:,}" for n in [report["stages"][0]["rows_in"], *counts, api["rag"]["calls"]]
        )
        lines.append(f"| {name} | {cells} | {seconds:.0f} |")
    return lines


def stages_table(report: dict[str, Any]) -> list[str]:
    """Counts by stage."""
    lines = [
        "| Stage | Rows in | Rows out | Dropped, by reason | Seconds |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    for stage in report["stages"]:
        dropped = ", ".join(f"{reason} {n:,}" for reason, n in stage["dropped"].items()) or "–"
        lines.append(
            f"| {stage['name']} | {stage['rows_in']:,} | {stage['rows_out']:,} | {dropped} | {stage['seconds']:.0f} |"
        )
    return lines


def arms_table(report: dict[str, Any]) -> list[str]:
    """Top-1 of the original question and of the teacher's rewrite."""
    lines = [
        "| Query | n | Gold top-1 [95% CI] | MRR@10 | Mean top-1 score |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    for name, arm in report["arms"].items():
        low, high = arm["scores"]["top1"]["ci95"]
        top1, mrr10, score = (
            arm["scores"][metric]["mean"] for metric in ("top1", "mrr10", "mean_top1_score")
        )
        lines.append(
            f"| {name} | {arm['n']:,} | {top1:.3f} [{low:.3f}, {high:.3f}] | {mrr10:.3f} | {score:.3f} |"
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
