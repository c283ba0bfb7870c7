"""Each mistake of docs/start/first-day-mistakes.md is made, and ends in the one line that the page shows."""

import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_service import recall
from fixture_types import ProfileOf, Qinglan, Serve
from question_rows import random_rows

from qinglan.data.dataset import build
from qinglan.errors import StageError
from qinglan.ops.doctor.services import check_answer
from qinglan.rows import Retrieved
from qinglan.runs import disk_space
from qinglan.runs.artifacts import write_jsonl

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "start" / "first-day-mistakes.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^## \d+\. .*?^```text\n(.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE)
TEACHER = ("teacher.base_url=https://api.openai.com/v1", "teacher.model=gpt-5", "teacher.api_key_env=OPENAI_API_KEY")
REFUSED = {"message": "Unsupported parameter: 'temperature' is not supported with this model.", "param": "temperature"}

Mistake = Callable[[], str]


def normalised(line: str) -> str:
    """Without what differs from site to site: folders, ports, amounts."""
    return re.sub(r"(?<=:)\d{4,}|[\d.]+(?= [MGT]B)", "0", re.sub(r"(?<![\w.:/])/(?:[\w.-]+/)+", "/", line))


@pytest.fixture
def mistakes(
    qinglan: Qinglan, serve: Serve, profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Mistake]:
    """In the order of the page; each returns what is printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    header = "问题\n鱼油一天吃几粒\n钙片什么时候吃\n益生菌怎么存放\n"
    Path("questions.csv").write_text(header, encoding="utf-8")
    Path("renamed.csv").write_text(header.replace("问题", "咨询内容,备注"), encoding="utf-8")

    def run(*settings: str, flow: str = "refresh") -> str:
        sets = [word for setting in ("data.workbook=questions.csv", *settings) for word in ("--set", setting)]
        status, out, printed = qinglan("run", flow, "--dry-run", *sets)
        assert (status, out) == (2, "")
        return printed

    def rag(answer: Callable[[dict[str, Any]], str], score: float) -> Mistake:
        service = serve(lambda body: (200, recall((answer(body), score))))
        return lambda: run(f"rag.url={service.url.replace('v1', 'search')}")

    def too_few_rows() -> str:
        found = Retrieved(ids=("a",), scores=(0.9,), titles=("",))
        answered = {"answer": "改写", "answer_retrieved": found}
        write_jsonl(Path("rows.jsonl"), [row.model_copy(update=answered) for row in random_rows(5, 1)])
        with pytest.raises(StageError) as caught:
            build(Path("rows.jsonl"), Path("out"), profile_of())
        return f"error: {caught.value}\n"

    def no_gpu() -> str:
        monkeypatch.setattr(shutil, "which", lambda _: None)
        return run("trainer.device=cuda", flow="pipeline")

    def port_taken() -> str:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            return qinglan("up", "--prefect-port", str(port), "--set", f"paths.state={tmp_path / 'state'}")[2]

    def disk_full() -> str:
        monkeypatch.setattr(
            shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 3 * 10**6, 3 * 10**6)
        )
        with pytest.raises(StageError) as caught:
            disk_space.require_disk_space("ingest", profile_of(name="acme"), tmp_path / "runs" / "ingest", 0)
        return f"error: {caught.value}\n"

    def old_python() -> str:
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\nexit 1\n")
        python.chmod(0o755)
        words = ["make", "--silent", "setup", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout

    def refused_parameter() -> str:
        service = serve(lambda _: (400, {"error": REFUSED | {"code": "unsupported_parameter"}}))
        profile = profile_of(teacher={"model": "big", "base_url": service.url})
        return f"✗ {check_answer(profile, 'teacher', profile.teacher).problem}\n"

    return [
        lambda: run(*TEACHER, "prices.gpt-5={input_per_million_usd: 1.25, output_per_million_usd: 10}"),
        lambda: run("data.workbook=renamed.csv"),
        rag(lambda body: str(body["query"]), 0.9),
        rag(lambda body: str(body.get("rewritten_query") or body["query"]), 7.5),
        *(too_few_rows, no_gpu, port_taken, disk_full, old_python, refused_parameter),
    ]


@pytest.mark.parametrize("number", range(10))
def test_a_mistake_ends_in_the_line_that_the_page_shows(mistakes: list[Mistake], number: int) -> None:
    assert len(SHOWN) == len(mistakes)
    printed = mistakes[number]()
    assert printed.count("\n") == 1
    assert normalised(printed.rstrip("\n")) == normalised(SHOWN[number])
