"""6,146 real patient questions through the data stages, two runs.

    make bench NAME=toyhom DATA=toyhom

The teacher is the simulated keyword extractor. Works in a temporary site. Prints the tables of
benchmarks/results/toyhom.md and writes them there. The data (MIT licence) is not part of this
repository.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import openpyxl
from commands import with_set

DATA = Path(os.environ.get("DATA", "toyhom"))
PAGE = Path(__file__).parent / "results" / "toyhom.md"
NEW = 60
EDITED = 5
ADDED_WORDS = "，平时饮食上要注意什么？"
EDITED_WORDS = "，麻烦说得详细些"
Report = dict[str, Any]

INTRO = """# Real questions through the data stages

The embedded default also takes real data. These are the {n:,} patient questions of the public
Toyhom dialogues (MIT licence; internal medicine) with their {documents:,} documents. The teacher is
the simulated one, which knows nothing of medicine and falls back to keyword extraction (jieba), so
this shows how the stages handle real text, not what a language model would achieve. Made by
`make bench NAME=toyhom`, which runs, in a temporary site:

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
    page = "\n".join(page_lines(first, second))
    PAGE.write_text(page, encoding="utf-8")
    print(page)
    calls = second["api"]["teacher"]["calls"]
    if calls != NEW + EDITED:
        sys.exit(f"error: the second night asked {calls} times, not {NEW + EDITED}")


def page_lines(first: Report, second: Report) -> list[str]:
    """The whole page."""
    with (DATA / "kb.jsonl").open(encoding="utf-8") as stream:
        documents = sum(1 for _ in stream)
    return [
        INTRO.format(n=first["stages"][0]["rows_in"], documents=documents, command=COMMAND),
        *stages_table(first),
        "",
        *arms_table(first),
        "",
        *comparison(first),
        "",
        *runs_table(first, second),
        "",
    ]


def refresh(site: Path, workbook: Path) -> Report:
    """One night's report."""
    settings = (
        f"data.workbook={workbook}",
        f"rag.knowledge_base={DATA / 'kb.jsonl'}",
        f"paths.runs={site / 'runs'}",
        f"paths.state={site / 'state'}",
    )
    argv = [sys.executable, "-m", "qinglan.cli", "run", "refresh", "--profile", "embedded"]
    subprocess.run([*argv, *with_set(settings)], check=True)
    path = site / "runs" / "latest" / "report.json"
    report: Report = json.loads(path.read_text(encoding="utf-8"))
    return report


def second_night(workbook: Path, target: Path) -> Path:
    """The workbook with some questions edited in their place, and some new ones at its end."""
    book = openpyxl.load_workbook(workbook)
    sheet = book.worksheets[0]
    column = next(cell.column for cell in sheet[1] if cell.value == "问题")
    questions = [sheet.cell(number, column) for number in range(2, sheet.max_row + 1)]
    # Spread over the whole workbook, as edits of users are.
    step = len(questions) // NEW
    for cell in questions[: EDITED * step : step]:
        cell.value = f"{cell.value}{EDITED_WORDS}"
    for number, cell in enumerate(questions[1 : 1 + NEW * step : step]):
        values = [neighbour.value for neighbour in sheet[cell.row]]
        values[column - 1] = f"{cell.value}{ADDED_WORDS}"
        for place, value in enumerate(values, 1):
            sheet.cell(len(questions) + 2 + number, place, value)
    book.save(target)
    return target


def runs_table(first: Report, second: Report) -> list[str]:
    """The calls of each run."""
    lines = [
        "## The second run",
        "",
        f"The same workbook again, with {EDITED} questions edited and {NEW} new ones (real "
        "questions, each with a clause added). The teacher gets only new and changed questions; "
        "retrieval runs for every question, as the knowledge base may have changed.",
        "",
        "| | Rows | Teacher calls | from the ledger | Judge calls | from the ledger | RAG calls "
        "| Seconds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, report in (("first run", first), ("second run", second)):
        api = report["api"]
        counts = (
            report["stages"][0]["rows_in"],
            api["teacher"]["calls"],
            api["teacher"]["cached"],
            api["judge"]["calls"],
            api["judge"]["cached"],
            api["rag"]["calls"],
        )
        cells = " | ".join(f"{count:,}" for count in counts)
        seconds = sum(stage["seconds"] for stage in report["stages"])
        lines.append(f"| {name} | {cells} | {seconds:.0f} |")
    return lines


def stages_table(report: Report) -> list[str]:
    """Counts by stage."""
    lines = [
        "| Stage | Rows in | Rows out | Dropped, by reason | Seconds |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    for stage in report["stages"]:
        reasons = [f"{reason} {count:,}" for reason, count in stage["dropped"].items()]
        dropped = ", ".join(reasons) or "–"
        counts = f"{stage['rows_in']:,} | {stage['rows_out']:,}"
        lines.append(f"| {stage['name']} | {counts} | {dropped} | {stage['seconds']:.0f} |")
    return lines


def arms_table(report: Report) -> list[str]:
    """Top-1 of the original question and of the teacher's rewrite."""
    lines = [
        "| Query | n | Gold top-1 [95% CI] | MRR@10 | Mean top-1 score |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    for name, arm in report["arms"].items():
        scores = arm["scores"]
        low, high = scores["top1"]["ci95"]
        top1 = f"{scores['top1']['mean']:.3f} [{low:.3f}, {high:.3f}]"
        other_means = f"{scores['mrr10']['mean']:.3f} | {scores['mean_top1_score']['mean']:.3f}"
        lines.append(f"| {name} | {arm['n']:,} | {top1} | {other_means} |")
    return lines


def comparison(report: Report) -> list[str]:
    """The paired difference between both queries in top-1."""
    pair = next(pair for pair in report["comparisons"] if pair["metric"] == "top1")
    low, high = pair["ci95"]
    difference = f"{pair['diff']:+.3f} [{low:+.3f}, {high:+.3f}]"
    return [
        f"{pair['a']} − {pair['b']}, top-1, paired: {difference}, "
        f"{pair['wins']:,} wins, {pair['ties']:,} ties, {pair['losses']:,} losses."
    ]


if __name__ == "__main__":
    main()
