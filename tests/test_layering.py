"""Modules that processes load: the orchestrator no training engine, the command line no Prefect."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGINES = ["torch", "transformers", "ray", "swift", "vllm", "verl", "peft", "trl"]
FLOWS = ", ".join(
    f"qinglan.flows.{path.stem}" for path in sorted((ROOT / "qinglan" / "flows").glob("[a-z]*.py"))
)


def test_only_the_simulators_know_a_certain_recipe():
    packages: set[str] = set()
    for path in (ROOT / "qinglan").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if re.search(r"qinglan\.recipes\b.*\bquery_rewrite\b", source):
            packages.add(path.relative_to(ROOT).parts[1])
    assert packages == {"simulators"}


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        (f"import {FLOWS}", ENGINES),
        (
            "import qinglan.cli, qinglan.training.reward_service.function, qinglan.clients.roles",
            [*ENGINES, "prefect"],
        ),
        ("import qinglan.serving.router", [*ENGINES, "prefect", "mlflow"]),
        (
            "import qinglan.training.reward_service.function",
            ["openai", "sqlalchemy", "httpx2", "aiohttp", "ray"],
        ),
        ("import qinglan.training.reward_service.scorer", ["qinglan.evaluation"]),
        (
            "from qinglan.simulators.domains import simulated_models; simulated_models()",
            ["jieba", "bm25s", "fastapi", "torch", "transformers", "prefect", "mlflow"],
        ),
    ],
    ids=[
        "orchestrator",
        "command line",
        "router",
        "trainer's reward",
        "its scorer",
        "names of simulated models",
    ],
)
def test_a_process_loads_nothing_that_it_lacks_or_does_not_need(statement: str, absent: list[str]):
    code = f"{statement}; import sys; print(sorted(set(sys.modules) & set({absent})))"
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip().splitlines()[-1] == "[]"
