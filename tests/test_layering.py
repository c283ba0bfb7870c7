"""What a process loads: the orchestrator no training engine, the command line no Prefect."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGINES = ["torch", "transformers", "ray", "swift", "vllm", "verl", "peft", "trl"]
FLOWS = ", ".join(
    f"qinglan.flows.{path.stem}" for path in sorted((ROOT / "flows").glob("[a-z]*.py"))
)


def test_only_the_simulators_know_a_certain_recipe():
    sources = [
        p for folder in ("qinglan", "tasks", "flows") for p in sorted((ROOT / folder).rglob("*.py"))
    ]
    knowing = [
        p
        for p in sources
        if re.search(r"qinglan\.recipes\b.*\bquery_rewrite\b", p.read_text(encoding="utf-8"))
    ]
    assert {p.relative_to(ROOT).parts[1] for p in knowing} == {"simulators"}


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
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().splitlines()[-1] == "[]"
