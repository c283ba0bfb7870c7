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

from .site import PROFILE, Seen, Site, Workplace

_ROUTER = Path(__file__).parents[1] / "router.py"
_IDLE, _FILES = 2_000, 128
_FORGED, _GENUINE_ON_DAYS, _MOST_TAKEN = 100_000, 3, 50
_ROWS_FORGOTTEN = 5
_SHORTEST = 6
"""Characters of a text that `qinglan forget` searches for, see docs/how-to/clean-up.md."""
_GRACE_S = 5.0
Trial = Callable[[Workplace, Random], Seen]


def _router_scenario(_work: Workplace, _rng: Random, *, name: str) -> Seen:
    """As the router's own benchmark has it, at a lower rate."""
    argv = [sys.executable, str(_ROUTER), "--scenario", name]
    env = os.environ | {"RATE": "20", "SECONDS": "20"}
    try:
        done = subprocess.run(
            argv, env=env, capture_output=True, text=True, timeout=180, check=True
        )
    except subprocess.TimeoutExpired:
        return Seen("hung", hangs=1, ended_well=False)
    found = json.loads(done.stdout.splitlines()[-1])
    what = f"{found['n']} requests, {found['lost']} lost, {found['late']} late, worst {found['worst_ms']:.0f} ms"
    return Seen(what, rows_lost=found["lost"], ended_well=found["ends_with_model"])


def _idle_sockets(work: Workplace, _rng: Random, *, most_files: int | None) -> Seen:
    """Clients that connect, send the beginning of a request, and then nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients_may_open = min(hard, 2 * _IDLE)
    with tempfile.TemporaryDirectory(dir=work.folder) as folder, ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        model = stack.enter_context(Stub())
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (most_files or clients_may_open, hard)
        )  # the router inherits it
        url, _ = stack.enter_context(routed(Path(folder), Routes(champion=model.backend("1"))))
        resource.setrlimit(resource.RLIMIT_NOFILE, (clients_may_open, hard))
        host, port = url.removeprefix("http://").split(":")
        healthy = _ask(url)
        with ExitStack() as clients:
            for _ in range(_IDLE if not most_files else 2 * most_files):
                with suppress(OSError):
                    client = clients.enter_context(
                        socket.create_connection((host, int(port)), timeout=5)
                    )
                    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
            time.sleep(1)
            meanwhile = [_ask(url) for _ in range(5)]
        time.sleep(1)
        after = [_ask(url) for _ in range(5)]
    lost = (meanwhile + after).count("")
    what = f"{meanwhile.count('model')} of 5 requests answered by the model meanwhile, {after.count('model')} afterwards"
    return Seen(what, rows_lost=lost, ended_well=[healthy, *after] == ["model"] * 6)


def _ask(url: str) -> str:
    """Whose answer came; empty where none did within the deadline and some seconds."""
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
    "2,000 idle sockets": ("others are answered", partial(_idle_sockets, most_files=None)),
    "file descriptors used up": ("others are answered", partial(_idle_sockets, most_files=_FILES)),
}
"""By fault, what is expected and the trial."""


def forged_questions(work: Workplace, rng: Random) -> Seen:
    """Somebody asks the router 100,000 things in a night, and the run reads its log, which has
    genuine ones too."""
    with work.site("data") as site:
        folder = site.folder / "requests"
        folder.mkdir()
        genuine, forged = (
            list(_genuine(site)),
            [{"问题": f"{rng.getrandbits(64):x} 能不能吃"} for _ in range(_FORGED)],
        )
        for day in range(1, 1 + _GENUINE_ON_DAYS):
            asked = genuine + forged * (day == 1)
            rng.shuffle(asked)
            lines = (json.dumps(each, ensure_ascii=False) for each in asked)
            (folder / f"2026-01-0{day}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        log = {"folder": str(folder), "consent": "all"}
        path = site.folder / "configs" / f"{PROFILE}.yaml"
        profile = yaml.safe_load(path.read_text(encoding="utf-8"))
        profile["data"] = {"workbook": str(folder), "max_new_rows": _MOST_TAKEN}
        # The trials' own batches of ten rows would be ten thousand of them here.
        profile |= {"serve": {"request_log": log}, "budget": {"per_run_usd": 5}, "distill": {}}
        path.write_text(yaml.safe_dump(profile, allow_unicode=True), encoding="utf-8")
        end = site.end_of(site.start())
        paid = work.paid()
        is_limited = (
            end == "done" and 0 < paid <= 2 * _MOST_TAKEN
        )  # teacher and judge, each once for each taken
        what, harmed = f"{end}; {paid:,} answers paid", int(site.is_harmed())
        repeats = work.repeats(0)
        return Seen(
            what, hangs=site.hangs, other_runs_harmed=harmed, ended_well=is_limited, **repeats
        )


def _genuine(site: Site) -> Iterator[dict[str, str]]:
    """The workbook's questions with their context, as the request log has them."""
    sheet = openpyxl.load_workbook(site.folder / f"{PROFILE}.xlsx", read_only=True).active
    header, *rows = sheet.iter_rows(values_only=True)
    for row in rows:
        cells = dict(zip(header, row, strict=True))
        yield {name: str(cells[name] or "") for name in ("问题", "用户画像", "历史摘要")}


def forget(work: Workplace, rng: Random) -> Seen:
    """Some rows of a finished run are forgotten; then every file of the site is searched for every
    text of theirs."""
    with work.site("data") as site:
        site.env["PREFECT_HOME"] = str(site.folder / "prefect")
        ends = [site.end_of(site.start())]
        site.finish(ends)
        rows = rng.sample(
            list(read_jsonl(site.run / "select" / "rows.jsonl", Row)), _ROWS_FORGOTTEN
        )
        texts = _texts_of_none_else(site, rows)
        blind = texts - set().union(*_found(site, texts).values())
        assert texts and not blind, f"the search does not find what is there: {blind}"
        named = [word for row in rows for word in ("--row", row.id)]
        argv = [
            sys.executable,
            "-m",
            "qinglan.cli",
            "forget",
            *named,
            "--profile",
            PROFILE,
            "--yes",
        ]
        env = os.environ | site.env
        done = subprocess.run(
            argv, cwd=site.folder, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        found = _found(site, texts)
        what = f"status {done.returncode}; {len(texts)} texts of {len(rows)} rows, found in {len(found)} files"
        what += "".join(f", {path}: {min(left)}" for path, left in list(found.items())[:5])
        harmed = int(site.is_harmed())
        return Seen(
            what,
            hangs=site.hangs,
            other_runs_harmed=harmed,
            ended_well=done.returncode == 0 and not found,
        )


def _texts_of_none_else(site: Site, rows: Sequence[Row]) -> set[str]:
    """What was asked and what the teacher wrote, as far as it is theirs: long, in no other row, in
    no document."""
    ids = {row.id for row in rows}
    files = (site.folder / "runs").glob("*/*/rows.jsonl")
    lines = {line for file in files for line in file.read_text(encoding="utf-8").splitlines()}
    others = "\n".join(
        [site.work.documents, *(line for line in lines if json.loads(line)["id"] not in ids)]
    )
    texts = {
        text for row in rows for text in (row.query, row.profile, row.history, row.answer) if text
    }
    return {text for text in texts if len(normalise(text)) >= _SHORTEST and text not in others}


def _found(site: Site, texts: Collection[str]) -> dict[Path, set[str]]:
    """By file of the site, those that it has; but where the questions come from, which is the
    user's."""
    sources = set(site.folder.glob("*.xlsx"))
    files = (path for path in site.folder.rglob("*") if path.is_file() and not path.is_symlink())
    held = {
        path.relative_to(site.folder): _held(path, texts) for path in files if path not in sources
    }
    return {path: left for path, left in held.items() if left}


def _held(path: Path, texts: Collection[str]) -> set[str]:
    """Those that a file has: as they are, within JSON's escapes, in a workbook, a Parquet file or a
    database."""
    contents = [path.read_bytes()]
    if path.suffix == ".xlsx":
        with zipfile.ZipFile(path) as book:
            contents += map(book.read, book.namelist())
    elif path.suffix == ".parquet":
        contents.append(json.dumps(parquet.read_table(path).to_pylist(), default=str).encode())
    elif contents[0].startswith(b"SQLite format 3"):
        with closing(sqlite3.connect(path)) as database, suppress(sqlite3.Error):
            contents.append("\n".join(database.iterdump()).encode())
    forms = {text: (text.encode(), json.dumps(text)[1:-1].encode()) for text in texts}
    return {
        text
        for text in texts
        if any(form in content for content in contents for form in forms[text])
    }
