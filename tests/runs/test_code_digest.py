"""Digests of code: what changes a result changes them, and prose does not."""

import sys
from pathlib import Path

import pytest

from qinglan.runs.code_digest import code_imported_by, digests_of_modules, import_closure


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


def digests(module: str) -> dict[str, str]:
    """The digests of the module's import closure within the package."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "leaf"]:
        del sys.modules[name]
    closure = import_closure([module], lambda name: name.startswith("leaf."))
    return digests_of_modules(closure)


@pytest.mark.parametrize(("file", "count"), [("tool.yaml", 3), ("kept.yaml", 3), ("other.yaml", 1)])
def test_a_data_file_counts_with_the_module_of_its_name_and_its_reader(
    package: Path, file: str, count: int
):
    with (package / "tool.py").open("a") as tool:
        tool.write('KEPT = Path(__file__).with_name("kept.yaml")\n')
    without_data = digests("leaf.maker")
    (package / file).write_text("sharp: yes\n")
    with_data = digests("leaf.maker")
    (package / file).write_text("sharp: no\n")
    changed_data = digests("leaf.maker")
    distinct = {tuple(found.items()) for found in (without_data, with_data, changed_data)}
    assert len(distinct) == count


def test_looking_up_a_module_imports_no_package(package: Path):
    (package / "__init__.py").write_text("raise RuntimeError('was imported')\n")
    assert len(digests("leaf.maker")["leaf.maker"]) == 64


def test_what_a_module_imports_counts_and_nothing_else(package: Path):
    (package / "unused.py").write_text("def other(x):\n    return x\n")
    assert digests("leaf.maker").keys() == {"leaf.maker", "leaf.tool"}


def test_a_file_outside_of_the_package_depends_on_what_it_runs_with(tmp_path: Path):
    recipe = tmp_path / "own.py"
    recipe.write_text(
        '"""Like qinglan.recipes.medical."""\n'
        "from typing import TYPE_CHECKING\n\n"
        "from qinglan.recipes.keywords import distinctive_words\n\n"
        "if TYPE_CHECKING:\n    from qinglan.recipes.answer_judge import Verdict\n"
    )
    modules = code_imported_by(recipe).keys()
    assert "qinglan.recipes.keywords" in modules
    assert "qinglan.recipes.medical" not in modules
    assert "qinglan.recipes.answer_judge" not in modules


def test_imports_for_annotations_do_not_count(package: Path):
    (package / "maker.py").write_text(
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from leaf.tool import sharpen\n"
    )
    assert digests("leaf.maker").keys() == {"leaf.maker"}


def test_docstrings_comments_and_layout_do_not_count(package: Path):
    before = digests("leaf.maker")
    (package / "tool.py").write_text('"""Tools."""\n# A comment.\ndef sharpen(x): return x\n')
    assert digests("leaf.maker") == before
    (package / "tool.py").write_text("def sharpen(x):\n    return x + 1\n")
    after = digests("leaf.maker")
    assert after["leaf.tool"] != before["leaf.tool"]
    assert after["leaf.maker"] == before["leaf.maker"]
