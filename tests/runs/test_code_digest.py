"""Digests of code: what changes a result changes them, and prose does not."""

import sys
from pathlib import Path

import pytest

from qinglan.runs.code_digest import code_digest


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `leaf` whose module `maker` imports `tool`."""
    folder = tmp_path / "leaf"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "maker.py").write_text(
        "from leaf.tool import sharpen\n\n\ndef make():\n    return sharpen(1)\n"
    )
    (folder / "tool.py").write_text("def sharpen(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def digest(*modules: str, within: str | None = None) -> str:
    for name in [name for name in sys.modules if name.partition(".")[0] == "leaf"]:
        del sys.modules[name]
    code_digest.cache_clear()
    return code_digest(*modules, within=within)


@pytest.mark.parametrize(("file", "count"), [("tool.yaml", 3), ("kept.yaml", 3), ("other.yaml", 1)])
def test_a_data_file_counts_with_the_module_of_its_name_and_its_reader(
    package: Path, file: str, count: int
):
    with (package / "tool.py").open("a") as tool:
        tool.write('KEPT = Path(__file__).with_name("kept.yaml")\n')
    before = digest("leaf.maker", within="leaf")
    (package / file).write_text("sharp: yes\n")
    with_data = digest("leaf.maker", within="leaf")
    (package / file).write_text("sharp: no\n")
    assert len({before, with_data, digest("leaf.maker", within="leaf")}) == count


def test_looking_up_a_module_imports_no_package(package: Path):
    (package / "__init__.py").write_text("raise RuntimeError('was imported')\n")
    assert len(digest("leaf.maker", within="leaf")) == 64


@pytest.mark.parametrize(
    ("changed", "same"),
    [("reward", True), ("_only_of_reward", True), ("answer", False), ("_both", False)],
)
def test_functions_that_are_left_out_do_not_count_nor_what_only_they_use(
    package: Path, changed: str, same: bool
):
    names = ("answer", "reward", "_only_of_reward", "_both")
    calls = {"answer": "_both()", "reward": "_both() + _only_of_reward()"}
    recipe = package / "recipe.py"
    recipe.write_text(
        "".join(f"def {name}():\n    return {calls.get(name, 1)}\n" for name in names)
    )
    before = digest("leaf.recipe"), code_digest("leaf.recipe", without=("reward",))
    recipe.write_text(
        recipe.read_text().replace(f"def {changed}():", f"def {changed}():\n    print()")
    )
    after = digest("leaf.recipe"), code_digest("leaf.recipe", without=("reward",))
    assert (before[0] == after[0], before[1] == after[1]) == (False, same)
