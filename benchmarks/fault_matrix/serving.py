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
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from random import Random

import httpx2
import pyarrow.parquet as parquet
import yaml
from router import DEADLINE_MS, Stub, routed

from qinglan.rows import Row
from qinglan.runs.artifacts import read_jsonl
from qinglan.serving.routes import Routes

from .site import PROFILE, Seen, Workplace

_ROUTER = Path(__file__).parents[1] / "router.py"
_IDLE, _FILES = 2_000, 128
_FORGED, _MOST_TAKEN = 100_000, 50
_GRACE_S = 5.0
Trial = Callable[[Workplace, Random], Seen]


def _router_scenario(_work: Workplace, _rng: Random, *, name: str) -> Seen:
    """As the router's own benchmark has it, at a lower rate."""
    argv = [sys.executable, str(_ROUTER), "--scenario", name]
    env = os.environ | {"RATE": "20", "SECONDS": "20"}
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=180, check=True)
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
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files or clients_may_open, hard))  # the router inherits it
        url, _ = stack.enter_context(routed(Path(folder), Routes(champion=model.backend("1"))))
        resource.setrlimit(resource.RLIMIT_NOFILE, (clients_may_open, hard))
        host, port = url.removeprefix("http://").split(":")
        healthy = _ask(url)
        with ExitStack() as clients:
            for _ in range(_IDLE if not most_files else 2 * most_files):
                with suppress(OSError):
                    client = clients.enter_context(socket.create_connection((host, int(port)), timeout=5))
                    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
            time.sleep(1)
            meanwhile = [_ask(url) for _ in range(5)]
        time.sleep(1)
        after = [_ask(url) for _ in range(5)]
    lost = (meanwhile + after).count("")
    what = (
        f"{meanwhile.count('model')} of 5 requests answered by the model meanwhile, {after.count('model')} afterwards"
    )
    return Seen(what, rows_lost=lost, ended_well=[healthy, *after] == ["model"] * 6)


def _ask(url: str) -> str:
    """Whose answer came; empty where none did within the deadline and some seconds."""
    body = {"model": "champion", "messages": [{"role": "user", "content": "请问菌粉睡前吃行不行呀"}]}
    within_s = DEADLINE_MS / 1000 + _GRACE_S
    try:
        answer = httpx2.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=within_s)
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
    """Somebody asks the router 100,000 things, and the nightly run reads its log."""
    with work.site("data") as site:
        folder = site.folder / "requests"
        folder.mkdir()
        lines = (json.dumps({"问题": f"{rng.getrandbits(64):x} 能不能吃"}, ensure_ascii=False) for _ in range(_FORGED))
        (folder / "2026-01-01.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        log = {"folder": str(folder), "consent": "all"}
        path = site.folder / "configs" / f"{PROFILE}.yaml"
        profile = yaml.safe_load(path.read_text(encoding="utf-8"))
        profile["data"] = {"workbook": str(folder), "max_new_rows": _MOST_TAKEN}
        # The trials' own batches of ten rows would be ten thousand of them here.
        profile |= {"serve": {"request_log": log}, "budget": {"per_run_usd": 5}, "distill": {}}
        path.write_text(yaml.safe_dump(profile, allow_unicode=True), encoding="utf-8")
        end = site.end_of(site.start())
        asked = work.paid()
        # Teacher and judge, each once for each question taken.
        is_limited = end.startswith(("done", "error: ")) and asked <= 2 * _MOST_TAKEN  # no passage may fit any of them
        what, harmed = f"{end}; {asked:,} answers paid", int(site.is_harmed())
        return Seen(what, hangs=site.hangs, other_runs_harmed=harmed, ended_well=is_limited)


def forget(work: Workplace, rng: Random) -> Seen:
    """One row of a finished run is forgotten; then every file of the site is searched for its words."""
    with work.site("data") as site:
        ends = [site.end_of(site.start())]
        site.finish(ends)
        row = rng.choice(list(read_jsonl(site.run / "select" / "rows.jsonl", Row)))
        argv = [sys.executable, "-m", "qinglan.cli", "forget", "--row", row.id, "--profile", PROFILE, "--yes"]
        done = subprocess.run(argv, cwd=site.folder, capture_output=True, text=True, timeout=300, check=False)
        kept = [site.folder / "runs", site.folder / "state"]
        found = [path.relative_to(site.folder) for root in kept for path in root.rglob("*") if _holds(path, row.query)]
        what = f"status {done.returncode}; found in {len(found)} files" + "".join(f", {path}" for path in found[:5])
        harmed = int(site.is_harmed())
        return Seen(what, hangs=site.hangs, other_runs_harmed=harmed, ended_well=done.returncode == 0 and not found)


def _holds(path: Path, text: str) -> bool:
    """Whether a file has the text: as it is, within JSON's escapes, in a workbook, a Parquet file or a database."""
    if not path.is_file() or path.is_symlink():
        return False
    wanted = (text.encode(), json.dumps(text)[1:-1].encode())
    contents = [path.read_bytes()]
    if path.suffix == ".xlsx":
        with zipfile.ZipFile(path) as book:
            contents += map(book.read, book.namelist())
    elif path.suffix == ".parquet":
        contents.append(json.dumps(parquet.read_table(path).to_pylist(), default=str).encode())
    elif path.suffix == ".db":
        with closing(sqlite3.connect(path)) as database, suppress(sqlite3.Error):
            contents.append("\n".join(database.iterdump()).encode())
    return any(each in content for content in contents for each in wanted)
