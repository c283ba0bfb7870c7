"""The words that people read about the texts that a grader grades."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wording:
    """Words of workbooks, reports and messages that are others for rewrites than for answers."""

    text_zh: str
    """One of the texts in Chinese, as in the titles of a workbook's columns."""
    report_terms: str
    """Key of the report's terms for the texts in evaluation/texts.yaml."""
    too_few_rows_hint: str
    """The remedy where too few rows may teach."""
