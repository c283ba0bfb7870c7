"""A refresh of which no row may teach still writes its report, and says which setting to change."""

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
    """The answer of a reranker whose best is 0.5, below the default of select.min_top1_score."""
    text = body.get("rewritten_query") or body["query"]
    best = 0.2 + zlib.crc32(text.encode()) % 300 / 1000
    # A rewrite begins with the product, whose documents are named `PRODUCT-INTENT`.
    product = text.split()[0]
    hits = [
        {"id": name, "content": name, "reranker_score": best - place / 20}
        for place, name in enumerate([f"{product}-store", text, f"{text}2"])
    ]
    return 200, {"data": {"recall": hits}}


def refresh(site: Site, *words: str) -> "subprocess.CompletedProcess[str]":
    command = ["refresh" if word == "pipeline" else word for word in site.command]
    return subprocess.run(
        [*command, *words], cwd=site.root, capture_output=True, text=True, timeout=300, check=False
    )


def test_it_reports_names_one_setting_and_with_that_one_pays_nothing(
    tmp_path: Path, serve: Serve
) -> None:
    site = Site(tmp_path, settings=SMALL | {"rag.url": serve(low_scores).url})
    first = refresh(site)
    assert first.returncode == 2, first.stderr
    assert site.found("runs/*/report.html"), first.stderr
    report = site.report()
    stages = [stage["name"] for stage in report["stages"]]
    assert stages == ["ingest", "distill", "validate", "select"]
    assert list(report["arms"]) == ["original", "teacher"]
    assert "top1_score" in report["distributions"]
    assert len(report["examples"]) == 10
    assert len(report["findings"]) == 2
    assert f"Report: {site.run_directory / 'report.html'}" in first.stdout
    assert "would keep" in first.stdout
    assert "below_threshold" in first.stdout
    last_line = first.stderr.strip().splitlines()[-1]
    (setting,) = re.findall(r"--set (select\.min_top1_score=[\d.]+)", last_line)
    assert last_line.startswith("error: ")
    show = run_qinglan(site.root, "show", "latest", "--set", f"paths.runs={site.root / 'runs'}")
    assert show.returncode == 2
    assert f"ended early: {last_line.removeprefix('error: ')}" in show.stderr
    paid = (site.paid("teacher"), site.paid("judge"))
    again = refresh(site, "--set", setting)
    assert again.returncode == 0, again.stderr
    assert site.report()["stages"][-1]["name"] == "publish"
    assert (site.paid("teacher"), site.paid("judge")) == paid
