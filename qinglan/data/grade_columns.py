"""How workbooks show what a recipe's texts are worth: columns, cells, and kinds of rows to review.

Rewrites are shown by what they retrieve, answers by the parts of their score by rule. This is the
one place among workbooks that tells the two apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from qinglan.data.sheets import CellValue, Column
from qinglan.data.strata import ANSWER_STRATA, REWRITE_STRATA, Stratum
from qinglan.grading.grader import Grader
from qinglan.recipes import Recipe
from qinglan.rows import ArmRow, Retrieved, Row

NARROW = 12
"""Width of an approval's columns for figures and short words."""
WIDE = 36
"""Width of an approval's columns for texts."""


class ArmColumn(NamedTuple):
    """A column that shows something of an arm's text in the workbook for an approval."""

    title: str
    width: int
    value: Callable[[ArmRow, Row], CellValue]


@dataclass(frozen=True)
class GradeColumns:
    """The parts of workbooks that depend on how the recipe's texts are graded."""

    text_width: int
    """Width of the text's own column in the sheet of all rows."""
    of_rows: tuple[Column, ...]
    """Columns of a grade in the sheet of all rows."""
    of_review: tuple[Column, ...]
    """Columns of a grade in a review workbook."""
    correction: str
    """Demand on a reviewer's own text, for the review workbook's guide."""
    review_rules: tuple[tuple[str, str], ...]
    """Further lines of the guide: a title, and what is to be known."""
    strata: tuple[Stratum, ...]
    """Kinds of rows that a review is drawn from."""
    of_question: tuple[Column, ...]
    """Columns about a question in the workbook for an approval."""
    of_arm: tuple[ArmColumn, ...]
    """Columns of each arm in the workbook for an approval."""


def grade_columns(recipe: Recipe) -> GradeColumns:
    return _OF_REWRITES if recipe.grader.retrieves else _of_answers(recipe.grader)


# ---- rewrites: what they retrieve ----


def _of_retrieval(
    field: Literal["original_retrieved", "answer_retrieved"],
    value: Callable[[Retrieved, Row], CellValue],
) -> Callable[[Row], CellValue]:
    """A column's value from a retrieval; empty where there was none."""

    def column_value(row: Row) -> CellValue:
        retrieved: Retrieved | None = getattr(row, field)
        return None if retrieved is None else value(retrieved, row)

    return column_value


def _of_arms_retrieval(
    value: Callable[[Retrieved, Row], CellValue],
) -> Callable[[ArmRow, Row], CellValue]:
    """A column's value from what an arm's text retrieved; empty where nothing is known of it."""

    def column_value(entry: ArmRow, row: Row) -> CellValue:
        return None if entry.retrieved is None else value(entry.retrieved, row)

    return column_value


def _gold_rank(retrieved: Retrieved, row: Row) -> CellValue:
    """1-based rank of the gold document, 0 where it was missed, empty where the row names none."""
    return None if row.gold_id is None else retrieved.rank(row.gold_id)


def _top1_score(retrieved: Retrieved, _: Row) -> CellValue:
    return round(retrieved.top1_score, 4)


def _quality(retrieved: Retrieved, _: Row) -> CellValue:
    return round(retrieved.quality, 4)


def _first_title(retrieved: Retrieved, _: Row) -> CellValue:
    return retrieved.titles[0] if retrieved.titles else ""


def _titles(retrieved: Retrieved, _: Row) -> CellValue:
    """The best three passages, numbered, a line each."""
    lines = [f"{place}. {title}" for place, title in enumerate(retrieved.titles[:3], start=1)]
    return "\n".join(lines)


def _text(entry: ArmRow, _: Row) -> CellValue:
    """An arm's text, or the reason why there is none."""
    return entry.text or f"（{entry.reason}）"


_OF_REWRITES = GradeColumns(
    text_width=48,
    of_rows=(
        Column("原问题首条得分", 15, _of_retrieval("original_retrieved", _top1_score)),
        Column("改写首条得分", 13, _of_retrieval("answer_retrieved", _top1_score)),
        Column("原问题检索质量", 15, _of_retrieval("original_retrieved", _quality)),
        Column("改写检索质量", 13, _of_retrieval("answer_retrieved", _quality)),
        Column("原问题标准文档名次", 19, _of_retrieval("original_retrieved", _gold_rank)),
        Column("改写标准文档名次", 17, _of_retrieval("answer_retrieved", _gold_rank)),
        Column("改写首条内容", 40, _of_retrieval("answer_retrieved", _first_title)),
    ),
    of_review=(
        Column("原问题首条得分", 10, _of_retrieval("original_retrieved", _top1_score)),
        Column("改写首条得分", 10, _of_retrieval("answer_retrieved", _top1_score)),
        Column("原问题召回", 34, _of_retrieval("original_retrieved", _titles)),
        Column("改写召回", 34, _of_retrieval("answer_retrieved", _titles)),
        Column("标准文档", 16, lambda row: row.gold_id),
        Column("原问题标准文档名次", 10, _of_retrieval("original_retrieved", _gold_rank)),
        Column("改写标准文档名次", 10, _of_retrieval("answer_retrieved", _gold_rank)),
    ),
    correction="一行检索关键词，保留用户的意图，不添加问题里没有的内容",
    review_rules=(
        ("名次", "标准文档在召回结果中的名次，0 表示没有召回；空白表示没有标注标准文档。"),
    ),
    strata=REWRITE_STRATA,
    of_question=(Column("标准文档", NARROW, lambda row: row.gold_id),),
    of_arm=(
        ArmColumn("改写", WIDE, _text),
        ArmColumn("首条内容", WIDE, _of_arms_retrieval(_first_title)),
        ArmColumn("标准文档名次", NARROW, _of_arms_retrieval(_gold_rank)),
        ArmColumn("首条得分", NARROW, _of_arms_retrieval(_top1_score)),
        ArmColumn("裁判分", NARROW, lambda entry, _: entry.judge_score),
    ),
)


# ---- answers: the parts of their score by rule ----


def _of_answers(grader: Grader) -> GradeColumns:
    metric_columns: list[ArmColumn] = []
    for metric in grader.metrics:
        value = partial(_metric_value, grader, metric.name)
        metric_columns.append(ArmColumn(metric.zh, NARROW, value))
    return GradeColumns(
        text_width=64,
        of_rows=_part_columns(grader, 12),
        of_review=(Column("数据池", 10, lambda row: row.pool), *_part_columns(grader, 10)),
        correction="完整的回答，格式与原回答相同",
        review_rules=(),
        strata=ANSWER_STRATA,
        of_question=(),
        of_arm=(ArmColumn("回答", WIDE, _text), *metric_columns),
    )


def _part_columns(grader: Grader, width: int) -> tuple[Column, ...]:
    return tuple(Column(f"规则：{name}", width, _part(name)) for name in grader.rule_parts)


def _part(name: str) -> Callable[[Row], CellValue]:
    return lambda row: (row.parts or {}).get(name)


def _metric_value(grader: Grader, name: str, entry: ArmRow, row: Row) -> CellValue:
    return grader.values_of(entry, row).get(name)
