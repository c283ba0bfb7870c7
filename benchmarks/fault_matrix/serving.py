"""Faults of what serves and of what is kept: the router, its request log, and `qinglan forget`."""

import json
import os
import resource
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from random import Random

import httpx2
import openpyxl
import pyarrow.parquet as parquet
import yaml
from router import DEADLINE_MS, Stub, routed

from qinglan.rows import Row, normalise
from qinglan.runs.artifacts import read_jsonl
from qinglan.serving.routes import Routes

from .site import PROFILE, Site, TrialResult, Workplace

_ROUTER = Path(__file__).parents[1] / "router.py"
_IDLE_CLIENTS = 2_000
_FEW_FILES = 128
_FORGED = 100_000
_GENUINE_ON_DAYS = 3
_MAX_NEW_ROWS = 50
_ROWS_FORGOTTEN = 5
_SHORTEST = 6
"""Characters of a text that `qinglan forget` searches for, see docs/how-to/clean-up.md."""
_GRACE_S = 5.0
_MODEL = "model"
"""The router's name for the source of an answer that the model gave."""
Trial = Callable[[Workplace, Random], TrialResult]


def _router_scenario(_work: Workplace, _rng: Random, *, name: str) -> TrialResult:
    """A scenario of the router's own benchmark, at a lower rate."""
    argv = [sys.executable, str(_ROUTER), "--scenario", name]
    env = os.environ | {"RATE": "20", "SECONDS": "20"}
    try:
        process = subprocess.run(
            argv, env=env, capture_output=True, text=True, timeout=180, check=True
        )
    except subprocess.TimeoutExpired:
        return TrialResult("hung", hangs=1, ended_well=False)
    load = json.loads(process.stdout.splitlines()[-1])
    counts = f"{load['n']} requests, {load['lost']} lost, {load['late']} late"
    return TrialResult(
        f"{counts}, worst {load['worst_ms']:.0f} ms",
        rows_lost=load["lost"],
        ended_well=load["ends_with_model"],
    )


def _idle_sockets(work: Workplace, _rng: Random, *, max_files: int | None) -> TrialResult:
    """Clients that connect, send the beginning of a request, and then nothing.

    Args:
        max_files: file descriptors that the router may have; None for as many as the clients have.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients_may_open = min(hard, 2 * _IDLE_CLIENTS)
    idle_clients = 2 * max_files if max_files else _IDLE_CLIENTS
    with tempfile.TemporaryDirectory(dir=work.folder) as folder, ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        model = stack.enter_context(Stub())
        # The router inherits the limit of this process.
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files or clients_may_open, hard))
        url, _ = stack.enter_context(routed(Path(folder), Routes(champion=model.backend("1"))))
        resource.setrlimit(resource.RLIMIT_NOFILE, (clients_may_open, hard))
        healthy = _ask(url)
        with ExitStack() as clients:
            for _ in range(idle_clients):
                with suppress(OSError):
                    _connect_and_idle(url, clients)
            time.sleep(1)
            # The idle clients stay connected while others ask.
            meanwhile = [_ask(url) for _ in range(5)]
        time.sleep(1)
        after = [_ask(url) for _ in range(5)]
    return TrialResult(
        f"{meanwhile.count(_MODEL)} of 5 requests answered by the model meanwhile, "
        f"{after.count(_MODEL)} afterwards",
        rows_lost=(meanwhile + after).count(""),
        ended_well=[healthy, *after] == [_MODEL] * 6,
    )


def _connect_and_idle(url: str, clients: ExitStack) -> None:
    host, port = url.removeprefix("http://").split(":")
    client = clients.enter_context(socket.create_connection((host, int(port)), timeout=5))
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")


def _ask(url: str) -> str:
    """The source of an answer; empty where none came within the deadline and some seconds."""
    body = {
        "model": "champion",
        "messages": [{"role": "user", "content": "请问菌粉睡前吃行不行呀"}],
    }
    within_s = DEADLINE_MS / 1000 + _GRACE_S
    try:
        answer = httpx2.post(
            f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=within_s
        )
    except httpx2.HTTPError:
        return ""
    return answer.headers.get("x-qinglan-source", "") if answer.status_code == 200 else ""


ROUTER: dict[str, tuple[str, Trial]] = {
    "model killed": ("no request is lost", partial(_router_scenario, name="model killed")),
    "model hanging": ("no request is lost", partial(_router_scenario, name="model hangs")),
    "2,000 idle sockets": ("others are answered", partial(_idle_sockets, max_files=None)),
    "file descriptors used up": (
        "others are answered",
        partial(_idle_sockets, max_files=_FEW_FILES),
    ),
}
"""The expected end and the trial of each fault."""


def forged_questions(work: Workplace, rng: Random) -> TrialResult:
    """Somebody asks the router 100,000 things in a night, and a run reads its log.

    The log has genuine questions too.
    """
    with work.site("data") as site:
        folder = site.folder / "requests"
        _write_request_log(folder, list(_genuine(site)), rng)
        path = site.folder / "configs" / f"{PROFILE}.yaml"
        profile = yaml.safe_load(path.read_text(encoding="utf-8"))
        profile["data"] = {"workbook": str(folder), "max_new_rows": _MAX_NEW_ROWS}
        profile["serve"] = {"request_log": {"folder": str(folder), "consent": "all"}}
        profile["budget"] = {"per_run_usd": 5}
        # The trials' own batches of ten rows would be ten thousand of them here.
        profile["distill"] = {}
        path.write_text(yaml.safe_dump(profile, allow_unicode=True), encoding="utf-8")
        end = site.end_of(site.start())
        paid = work.paid()
        # Teacher and judge are each asked once for each new row.
        is_limited = 0 < paid <= 2 * _MAX_NEW_ROWS
        return TrialResult(
            f"{end}; {paid:,} answers paid",
            hangs=site.hangs,
            other_runs_harmed=int(site.is_harmed()),
            ended_well=end == "done" and is_limited,
            **work.repeats(0),
        )


def _write_request_log(folder: Path, genuine: list[dict[str, str]], rng: Random) -> None:
    """Write some days of requests: genuine ones every day, and all the forged ones on the first."""
    folder.mkdir()
    forged = [{"问题": f"{rng.getrandbits(64):x} 能不能吃"} for _ in range(_FORGED)]
    for day in range(1, 1 + _GENUINE_ON_DAYS):
        requests = genuine + forged if day == 1 else list(genuine)
        rng.shuffle(requests)
        lines = [json.dumps(request, ensure_ascii=False) for request in requests]
        (folder / f"2026-01-0{day}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _genuine(site: Site) -> Iterator[dict[str, str]]:
    """The workbook's questions with their context, in the form of the request log."""
    sheet = openpyxl.load_workbook(site.folder / f"{PROFILE}.xlsx", read_only=True).active
    header, *rows = sheet.iter_rows(values_only=True)
    for row in rows:
        cells = dict(zip(header, row, strict=True))
        yield {name: str(cells[name] or "") for name in ("问题", "用户画像", "历史摘要")}


def forget(work: Workplace, rng: Random) -> TrialResult:
    """Some rows of a finished run are forgotten; then all files are searched for their texts."""
    with work.site("data") as site:
        site.env["PREFECT_HOME"] = str(site.folder / "prefect")
        ends = [site.end_of(site.start())]
        site.finish(ends)
        all_rows = list(read_jsonl(site.run / "select" / "rows.jsonl", Row))
        rows = rng.sample(all_rows, _ROWS_FORGOTTEN)
        texts = _texts_of_no_other_row(site, rows)
        # A search that finds nothing afterwards means something only if it found all before.
        unfindable = texts - set().union(*_files_with(site, texts).values())
        assert texts and not unfindable, f"the search does not find what is there: {unfindable}"
        process = _run_forget(site, rows)
        files = _files_with(site, texts)
        message = f"status {process.returncode}; {len(texts)} texts of {len(rows)} rows"
        message += f", found in {len(files)} files"
        for path, texts_there in list(files.items())[:5]:
            message += f", {path}: {min(texts_there)}"
        return TrialResult(
            message,
            hangs=site.hangs,
            other_runs_harmed=int(site.is_harmed()),
            ended_well=process.returncode == 0 and not files,
        )


def _run_forget(site: Site, rows: Sequence[Row]) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "qinglan.cli", "forget"]
    for row in rows:
        argv += ["--row", row.id]
    argv += ["--profile", PROFILE, "--yes"]
    env = os.environ | site.env
    return subprocess.run(
        argv, cwd=site.folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def _texts_of_no_other_row(site: Site, rows: Sequence[Row]) -> set[str]:
    """Long texts of these rows that are in no other row and in no document.

    They are what the user asked and what the teacher wrote.
    """
    ids = {row.id for row in rows}
    other_lines: set[str] = set()
    for file in (site.folder / "runs").glob("*/*/rows.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if json.loads(line)["id"] not in ids:
                other_lines.add(line)
    other_texts = "\n".join([site.work.documents, *other_lines])
    texts: set[str] = set()
    for row in rows:
        for text in (row.query, row.profile, row.history, row.answer):
            if text and len(normalise(text)) >= _SHORTEST and text not in other_texts:
                texts.add(text)
    return texts


def _files_with(site: Site, texts: Collection[str]) -> dict[Path, set[str]]:
    """The texts that each file of the site has.

    The workbooks that the questions come from are the user's and don't count.
    """
    workbooks = set(site.folder.glob("*.xlsx"))
    files: dict[Path, set[str]] = {}
    for path in site.folder.rglob("*"):
        if not path.is_file() or path.is_symlink() or path in workbooks:
            continue
        texts_there = _texts_in(path, texts)
        if texts_there:
            files[path.relative_to(site.folder)] = texts_there
    return files


def _texts_in(path: Path, texts: Collection[str]) -> set[str]:
    """The texts that a file has.

    They may be there as they are, within JSON's escapes, in a workbook, a Parquet file or a
    database.
    """
    contents = [path.read_bytes()]
    if path.suffix == ".xlsx":
        with zipfile.ZipFile(path) as book:
            contents += map(book.read, book.namelist())
    elif path.suffix == ".parquet":
        contents.append(json.dumps(parquet.read_table(path).to_pylist(), default=str).encode())
    elif contents[0].startswith(b"SQLite format 3"):
        with closing(sqlite3.connect(path)) as database, suppress(sqlite3.Error):
            contents.append("\n".join(database.iterdump()).encode())
    texts_there: set[str] = set()
    for text in texts:
        # Databases and logs hold JSON with escapes, which hides Chinese from a plain search.
        plain = text.encode()
        escaped = json.dumps(text)[1:-1].encode()
        if any(plain in content or escaped in content for content in contents):
            texts_there.add(text)
    return texts_there
