"""Each mistake of docs/start/first-day-mistakes.md is made, and ends in what the page shows."""

import os
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
from qinglan_process import run_qinglan

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "start" / "first-day-mistakes.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```text\n(.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE)
SLOW = (4, 5, 7, 8)
TEACHER = (
    "teacher.base_url=https://api.openai.com/v1",
    "teacher.model=gpt-5",
    "teacher.api_key_env=OPENAI_API_KEY",
)
REFUSED = {
    "message": "Unsupported parameter: 'temperature' is not supported with this model.",
    "param": "temperature",
}

Mistake = Callable[[], str]


def normalised(line: str) -> str:
    """The line without folders, ports, amounts and lines of the Makefile, which differ by site."""
    figures = r"[\d.,]+ [MGT]B|(?<=[: ])\d{4,}|(?<=Makefile:)\d+"
    return re.sub(figures, "0", re.sub(r"(?<![\w.:/])/(?:[\w.-]+/)+", "/", line))


@pytest.fixture
def mistakes(
    qinglan: Qinglan,
    serve: Serve,
    profile_of: ProfileOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> list[Mistake]:
    """The mistakes in the order of the page; each returns the output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    header = "问题\n鱼油一天吃几粒\n钙片什么时候吃\n益生菌怎么存放\n"
    Path("questions.csv").write_text(header, encoding="utf-8")
    Path("renamed.csv").write_text(header.replace("问题", "咨询内容,备注"), encoding="utf-8")

    def with_set(*settings: str) -> list[str]:
        words: list[str] = []
        for setting in settings:
            words += ["--set", setting]
        return words

    def run(*settings: str) -> str:
        words = with_set("data.workbook=questions.csv", *settings)
        status, out, error = qinglan("run", "refresh", "--dry-run", *words)
        assert (status, out) == (2, "")
        return error

    def rag_url(answer: Callable[[dict[str, Any]], str], score: float) -> str:
        service = serve(lambda body: (200, recall((answer(body), score))))
        return f"rag.url={service.url.replace('v1', 'search')}"

    def query_of(body: dict[str, Any]) -> str:
        return str(body.get("rewritten_query") or body["query"])

    def run_really(*settings: str, flow: str = "refresh") -> str:
        Path("acme.yaml").write_text(
            "extends: embedded\ndata: {workbook: questions.csv}\n", encoding="utf-8"
        )
        words = ["--profile", "acme.yaml", *with_set(*settings)]
        process = run_qinglan(tmp_path, "run", flow, *words)
        assert process.returncode == 2
        # The messages of the stages stand before the error.
        return process.stderr.splitlines()[-1]

    def no_gpu() -> str:
        # No nvidia-smi is in this folder.
        monkeypatch.setenv("PATH", str(tmp_path))
        return run_really("trainer.device=cuda", flow="pipeline")

    def port_taken() -> str:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
            words = with_set(f"paths.state={tmp_path / 'state'}")
            _, _, error = qinglan("up", "--prefect-port", port, *words)
            return error

    def served_port_taken() -> str:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
            words = with_set("rag.url=http://127.0.0.1:9/search")
            return run_qinglan(tmp_path, "serve", "--port", port, *words).stderr

    def old_python() -> str:
        for name in ("Makefile", "requirements.lock", "pyproject.toml"):
            shutil.copy(ROOT / name, tmp_path)
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\nexit 1\n")
        python.chmod(0o755)
        # Not those of the `make` that may run these tests.
        env = {
            name: value
            for name, value in os.environ.items()
            if name not in ("MAKEFLAGS", "MAKELEVEL")
        }
        argv = ["make", "setup", f"PYTHON={python}"]
        process = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        assert process.stdout == ""
        return process.stderr

    def refused_parameter() -> str:
        service = serve(lambda _: (400, {"error": REFUSED | {"code": "unsupported_parameter"}}))
        profile = profile_of(teacher={"model": "big", "base_url": service.url})
        status, out, _ = qinglan("doctor", "--paid-probe", "--flow", "refresh", profile=profile)
        assert status == 2
        return next(line for line in out.splitlines() if line.startswith("✗ teacher"))

    prices = "prices.gpt-5={input_per_million_usd: 1.25, output_per_million_usd: 10}"
    return [
        lambda: run(*TEACHER, prices),
        lambda: run("data.workbook=renamed.csv"),
        lambda: run(rag_url(lambda body: str(body["query"]), 0.9)),
        lambda: run(rag_url(query_of, 7.5)),
        lambda: run_really(rag_url(query_of, 0.9)),
        no_gpu,
        port_taken,
        served_port_taken,
        lambda: run_really("retention.min_free_mb=1000000000"),
        old_python,
        refused_parameter,
    ]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=[pytest.mark.slow] if number in SLOW else [])
        for number in range(11)
    ],
)
def test_a_mistake_ends_in_what_the_page_shows(mistakes: list[Mistake], number: int) -> None:
    assert len(SHOWN) == len(mistakes)
    assert normalised(mistakes[number]().removesuffix("\n")) == normalised(SHOWN[number])
