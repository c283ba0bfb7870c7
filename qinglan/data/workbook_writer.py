"""Writes rows to a workbook for users."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from qinglan.config import Columns
from qinglan.data.grade_columns import grade_columns
from qinglan.data.sheets import CellValue, Column, write_columns
from qinglan.errors import ConfigError
from qinglan.recipes import Input, Recipe
from qinglan.rows import Row
from qinglan.runs.artifacts import Artifact


def write_rows(path: Path, rows: Iterable[Row], recipe: Recipe) -> Artifact:
    """Write an .xlsx with every row and its result.

    The file's digest differs from write to write.
    """
    return write_columns(path, rows, columns_of(recipe))


def write_questions(path: Path, rows: Iterable[Row], recipe: Recipe) -> Artifact:
    """Write an .xlsx for the recipe's ingest.

    It has the questions, the recipe's inputs, and where the rows come from.
    """
    if path.exists() or path.suffix != ".xlsx":
        raise ConfigError(f"--out {path}: name an .xlsx file that is not there yet")
    question = Column(str(Columns.model_fields["query"].default), 48, lambda row: row.query)
    origin = Column("来源", 28, lambda row: row.source)
    inputs = input_columns(recipe, (question, origin), 40)
    return write_columns(path, rows, (question, *inputs, origin))


def input_titles(inputs: Iterable[Input], other_titles: Collection[str]) -> dict[str, str]:
    """A title for each input by name.

    It is that of the recipe, unless the sheet has another column of that title.
    """
    titles = {}
    for recipe_input in inputs:
        title = recipe_input.column
        if title in other_titles:
            title = f"{title}（输入）"
        titles[recipe_input.name] = title
    return titles


def input_columns(recipe: Recipe, other_columns: Iterable[Column], width: int) -> list[Column]:
    """A column for each input, titled so that it differs from the sheet's other columns."""
    titles = input_titles(recipe.INPUTS, [column.title for column in other_columns])
    return [Column(title, width, _input_text(name)) for name, title in titles.items()]


def _input_text(name: str) -> Callable[[Row], CellValue]:
    return lambda row: row.inputs.get(name, "")


def columns_of(recipe: Recipe) -> tuple[Column, ...]:
    """The columns of the sheet that shows every row and its result."""
    text_zh = recipe.grader.wording.text_zh
    graded = grade_columns(recipe)
    results = (
        Column(text_zh, graded.text_width, lambda row: row.answer),
        *_VERDICT,
        *graded.of_rows,
    )
    last = (
        Column("标准文档", 20, lambda row: row.gold_id),
        Column("意图", 12, lambda row: row.intent),
        Column(f"{text_zh}耗时（毫秒）", 17, lambda row: row.answer_latency_ms),
        Column(f"{text_zh}成本（美元）", 17, lambda row: row.answer_cost_usd),
        Column("来源", 28, lambda row: row.source),
        Column("行编号", 20, lambda row: row.id),
    )
    inputs = input_columns(recipe, (*_QUESTION, *results, *last), 40)
    return (*_QUESTION, *inputs, *results, *last)


_QUESTION = (
    Column("问题", 48, lambda row: row.query),
    Column("用户画像", 24, lambda row: row.profile),
    Column("历史摘要", 32, lambda row: row.history),
)
_VERDICT = (
    Column("状态", 8, lambda row: row.status),
    Column("原因", 22, lambda row: row.reason),
    Column("划分", 8, lambda row: row.split),
    Column("数据池", 10, lambda row: row.pool),
    Column("裁判分", 9, lambda row: row.judge_score),
)
