"""A refresh of which no row may teach still reports what it found, and says which setting to
change."""

import re
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Serve
from pipeline_site import Site
from qinglan_process import run_qinglan

pytestmark = [pytest.mark.slow, pytest.mark.extended]

SMALL = {
    "embedded.sample_train_rows": 60,
    "embedded.sample_dev_rows": 20,
    "embedded.sample_test_rows": 20,
    "select.not_worse_than_original": False,
}


def low_scores(body: dict[str, Any]) -> tuple[int, Any]:
    """Of a reranker whose best is 0.5, below the default of select.min_top1_score."""
    text = body.get("rewritten_query") or body["query"]
    best = 0.2 + zlib.crc32(text.encode()) % 300 / 1000
    first = text.split()[0]  # of a rewrite the product, whose documents are named `PRODUCT-INTENT`
    names = [f"{first}-store", text, f"{text}2"]
    found = [
        {"id": id_, "content": id_, "reranker_score": best - n / 20} for n, id_ in enumerate(names)
    ]
    return 200, {"data": {"recall": found}}


def refresh(site: Site, *words: str) -> "subprocess.CompletedProcess[str]":
    command = ["refresh" if word == "pipeline" else word for word in site.command]
    return subprocess.run(
        [*command, *words], cwd=site.root, capture_output=True, text=True, timeout=300, check=False
    )


def test_it_reports_names_one_setting_and_with_that_one_pays_nothing(
    tmp_path: Path, serve: Serve
) -> None:
    site = Site(tmp_path, settings=SMALL | {"rag.url": serve(low_scores).url})
    done = refresh(site)
    assert done.returncode == 2, done.stderr
    assert site.found("runs/*/report.html"), done.stderr
    report = site.report()
    assert [stage["name"] for stage in report["stages"]] == [
        "ingest",
        "distill",
        "validate",
        "select",
    ]
    assert (
        list(report["arms"]) == ["original", "teacher"] and "top1_score" in report["distributions"]
    )
    assert len(report["examples"]) == 10
    assert len(report["findings"]) == 2
    assert f"Report: {site.run_directory / 'report.html'}" in done.stdout
    assert "would keep" in done.stdout and "below_threshold" in done.stdout
    last = done.stderr.strip().splitlines()[-1]
    (setting,) = re.findall(r"--set (select\.min_top1_score=[\d.]+)", last)
    assert last.startswith("error: ")
    shown = run_qinglan(site.root, "show", "latest", "--set", f"paths.runs={site.root / 'runs'}")
    assert shown.returncode == 2 and f"ended early: {last.removeprefix('error: ')}" in shown.stderr
    paid = site.paid("teacher"), site.paid("judge")
    again = refresh(site, "--set", setting)
    assert again.returncode == 0, again.stderr
    assert site.report()["stages"][-1]["name"] == "publish"
    assert (site.paid("teacher"), site.paid("judge")) == paid
