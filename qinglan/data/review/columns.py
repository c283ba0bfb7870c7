"""The review workbook's columns: their meaning, their titles in a recipe's sheet, and their values.

Each line proves by itself which row it is about: the row's id is a hash of question, profile,
history and the recipe's inputs, and the fingerprint one of the answer. So no other file is needed,
and the workbook may be sorted, split among several reviewers, or filled in on another machine.
"""

from collections.abc import Mapping

from qinglan.data.grade_columns import grade_columns
from qinglan.data.review import fingerprint
from qinglan.data.sheets import Column
from qinglan.data.sources.records import input_field
from qinglan.data.workbook_writer import input_columns, input_titles
from qinglan.recipes import Recipe, identifying
from qinglan.rows import ReviewVerdict, Row, row_id

SHEET = "审核"
VERDICTS: dict[str, ReviewVerdict] = {"通过": "accept", "拒绝": "reject", "修改": "correct"}

SAMPLED_FOR = "抽样原因"
QUERY = "问题"
PROFILE = "用户画像"
HISTORY = "历史摘要"
ANSWER = "回答"
VERDICT = "结论"
CORRECTED = "修改后的回答"
COMMENT = "备注"
REVIEWER = "审核人"
ROW_ID = "行编号"
FINGERPRINT = "回答指纹"
_READ_COLUMNS = (
    SAMPLED_FOR,
    QUERY,
    PROFILE,
    HISTORY,
    ANSWER,
    VERDICT,
    CORRECTED,
    COMMENT,
    REVIEWER,
    ROW_ID,
    FINGERPRINT,
)
"""Columns by their meaning; `titles_of` gives their titles in a recipe's sheet."""

BETWEEN_STRATA = "；"


def titles_of(recipe: Recipe) -> dict[str, str]:
    """The titles of the columns that an import reads; those of inputs by `input_field`."""
    text_zh = recipe.grader.wording.text_zh
    titles = {column: column.replace(ANSWER, text_zh) for column in _READ_COLUMNS}
    identifying_inputs = [field for field in recipe.INPUTS if field.identifies]
    other_titles = [column.title for column in _columns_beside_inputs(recipe, {}, {})]
    for name, title in input_titles(identifying_inputs, other_titles).items():
        titles[input_field(name)] = title
    return titles


def columns_of(
    recipe: Recipe, reasons: Mapping[str, str], explanations: Mapping[str, str]
) -> tuple[Column, ...]:
    """All columns of a recipe's sheet, in their order.

    Args:
        reasons: by row id, why it was drawn.
        explanations: by row id, why the judge gave its score.
    """
    columns = _columns_beside_inputs(recipe, reasons, explanations)
    after_history = [column.title for column in columns].index(HISTORY) + 1
    inputs = input_columns(recipe, columns, 36)
    return (*columns[:after_history], *inputs, *columns[after_history:])


def _columns_beside_inputs(
    recipe: Recipe, reasons: Mapping[str, str], explanations: Mapping[str, str]
) -> tuple[Column, ...]:
    """All columns but those of the recipe's inputs."""
    text_zh = recipe.grader.wording.text_zh
    return (
        Column(SAMPLED_FOR, 16, lambda row: reasons[row.id]),
        Column(QUERY, 40, lambda row: row.query),
        Column(PROFILE, 18, lambda row: row.profile),
        Column(HISTORY, 28, lambda row: row.history),
        Column(text_zh, 36, lambda row: row.answer),
        Column("状态", 8, lambda row: row.status),
        Column("原因", 20, lambda row: row.reason),
        Column("裁判分", 8, lambda row: row.judge_score),
        Column("裁判理由", 28, lambda row: explanations.get(row.id)),
        *grade_columns(recipe).of_review,
        Column(VERDICT, 9, fill_in=True),
        Column(f"修改后的{text_zh}", 36, fill_in=True),
        Column(COMMENT, 24, fill_in=True),
        Column(REVIEWER, 10, fill_in=True),
        Column(ROW_ID, 19, lambda row: row_id_cell(row, recipe), machine=True),
        Column(f"{text_zh}指纹", 19, lambda row: fingerprint(row.answer), machine=True),
    )


def row_id_cell(row: Row, recipe: Recipe) -> str:
    """The text that identifies the row: its id, and where they differ also that of its cells."""
    identifying_inputs = identifying(row.inputs, recipe.INPUTS)
    # Where profile or history were extracted, the id is a hash of the dialogue, which the sheet
    # does not have. An import checks the id of what it does have.
    shown_id = row_id(row.tenant, row.query, row.profile, row.history, identifying_inputs)
    return row.id if shown_id == row.id else f"{row.id}-{shown_id}"
