"""Imports go one way, and the orchestrator's process never loads a training engine."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGINES = ["torch", "transformers", "ray", "swift", "vllm", "verl", "peft", "trl"]
TRAINER_SIDE = (
    "qinglan/training/verl_cpu",
    "qinglan/training/engines/ppo",
    "qinglan/simulators/pretrain.py",
    "qinglan/simulators/tokenizer.py",
)
"""Runs only in the trainer's processes."""


def imports(path: Path, *, at_top: bool = False) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if at_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def offenders(folder: str, *forbidden: str, at_top: bool = False, but: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.relative_to(ROOT).as_posix().startswith(but or ("-",))
        for name in imports(path, at_top=at_top)
        if name.partition(".")[0] in forbidden
    ]


def loaded(statement: str, *names: str) -> str:
    code = f"{statement}; import sys; print(sorted(set(sys.modules) & set({list(names)})))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def test_the_core_knows_no_prefect_and_nothing_above_it():
    assert offenders("qinglan", "prefect", but=("qinglan/ops/up.py", "qinglan/cli/__init__.py")) == []
    assert offenders("qinglan", "tasks", "flows", "deployments", but=("qinglan/cli/__init__.py",)) == []


def test_tasks_know_no_flows():
    assert offenders("tasks", "flows", "deployments") == []


def test_only_the_stand_ins_know_a_certain_recipe():
    sources = [p for folder in ("qinglan", "tasks", "flows") for p in sorted((ROOT / folder).rglob("*.py"))]
    knowing = [p for p in sources if re.search(r"qinglan\.recipes\b.*\bquery_rewrite\b", p.read_text(encoding="utf-8"))]
    assert {p.relative_to(ROOT).parts[1] for p in knowing} == {"simulators"}


@pytest.mark.parametrize("folder", ["tasks", "flows"])
def test_orchestration_imports_no_engine(folder: str):
    assert offenders(folder, *ENGINES) == []


def test_the_core_imports_engines_only_inside_functions():
    assert offenders("qinglan", *ENGINES, at_top=True, but=TRAINER_SIDE) == []


def test_the_orchestrators_process_loads_no_engine():
    flows = ", ".join(f"flows.{path.stem}" for path in sorted((ROOT / "flows").glob("[a-z]*.py")))
    assert loaded(f"import {flows}", *ENGINES) == "[]"


def test_the_command_line_loads_neither_engine_nor_prefect():
    assert (
        loaded("import qinglan.cli, qinglan.training.reward.function, qinglan.clients.roles", *ENGINES, "prefect")
        == "[]"
    )
