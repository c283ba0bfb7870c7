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
    """Without what differs from site to site: folders, ports, amounts, the Makefile's lines."""
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
    """In the order of the page; each returns what is printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    header = "问题\n鱼油一天吃几粒\n钙片什么时候吃\n益生菌怎么存放\n"
    Path("questions.csv").write_text(header, encoding="utf-8")
    Path("renamed.csv").write_text(header.replace("问题", "咨询内容,备注"), encoding="utf-8")

    def run(*settings: str) -> str:
        sets = [
            word
            for setting in ("data.workbook=questions.csv", *settings)
            for word in ("--set", setting)
        ]
        status, out, printed = qinglan("run", "refresh", "--dry-run", *sets)
        assert (status, out) == (2, "")
        return printed

    def rag_url(answer: Callable[[dict[str, Any]], str], score: float) -> str:
        service = serve(lambda body: (200, recall((answer(body), score))))
        return f"rag.url={service.url.replace('v1', 'search')}"

    def asked(body: dict[str, Any]) -> str:
        return str(body.get("rewritten_query") or body["query"])

    def run_really(*settings: str, flow: str = "refresh") -> str:
        Path("acme.yaml").write_text(
            "extends: embedded\ndata: {workbook: questions.csv}\n", encoding="utf-8"
        )
        sets = [word for setting in settings for word in ("--set", setting)]
        done = run_qinglan(tmp_path, "run", flow, "--profile", "acme.yaml", *sets)
        assert done.returncode == 2
        return done.stderr.splitlines()[-1]  # before it stands what the stages said

    def no_gpu() -> str:
        monkeypatch.setenv("PATH", str(tmp_path))  # where no nvidia-smi is
        return run_really("trainer.device=cuda", flow="pipeline")

    def port_taken() -> str:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            return qinglan(
                "up", "--prefect-port", str(port), "--set", f"paths.state={tmp_path / 'state'}"
            )[2]

    def served_port_taken() -> str:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            words = (
                "serve",
                "--port",
                str(taken.getsockname()[1]),
                "--set",
                "rag.url=http://127.0.0.1:9/search",
            )
            return run_qinglan(tmp_path, *words).stderr

    def old_python() -> str:
        for name in ("Makefile", "requirements.lock", "pyproject.toml"):
            shutil.copy(ROOT / name, tmp_path)
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\nexit 1\n")
        python.chmod(0o755)
        environment = {
            name: text
            for name, text in os.environ.items()
            if name not in ("MAKEFLAGS", "MAKELEVEL")
        }
        words = ["make", "setup", f"PYTHON={python}"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert done.stdout == ""
        return done.stderr

    def refused_parameter() -> str:
        service = serve(lambda _: (400, {"error": REFUSED | {"code": "unsupported_parameter"}}))
        profile = profile_of(teacher={"model": "big", "base_url": service.url})
        status, out, _ = qinglan("doctor", "--paid-probe", "--flow", "refresh", profile=profile)
        assert status == 2
        return next(line for line in out.splitlines() if line.startswith("✗ teacher"))

    return [
        lambda: run(
            *TEACHER, "prices.gpt-5={input_per_million_usd: 1.25, output_per_million_usd: 10}"
        ),
        lambda: run("data.workbook=renamed.csv"),
        lambda: run(rag_url(lambda body: str(body["query"]), 0.9)),
        lambda: run(rag_url(asked, 7.5)),
        lambda: run_really(rag_url(asked, 0.9)),
        *(no_gpu, port_taken, served_port_taken),
        lambda: run_really("retention.min_free_mb=1000000000"),
        *(old_python, refused_parameter),
    ]


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in range(11)]
)
def test_a_mistake_ends_in_what_the_page_shows(mistakes: list[Mistake], number: int) -> None:
    assert len(SHOWN) == len(mistakes)
    assert normalised(mistakes[number]().removesuffix("\n")) == normalised(SHOWN[number])
