"""The further columns that a recipe asks of the workbook."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Input:
    """A further column of the workbook."""

    name: str
    """Key in `Row.inputs` and in `data.columns.inputs`."""
    column: str
    """The column's head, where the profile names no other."""
    required: bool = False
    """Without the column the workbook is refused; a row whose cell is empty fails
    (`empty_input`)."""
    identifies: bool = True
    """The column is part of what is asked, so of the row's id; False for labels and answers that
    the row brings."""
    distilled: bool = False
    """A row may lack it, as `distill` gets it; the student can't be asked without it."""

    @property
    def is_asked(self) -> bool:
        """True where the student can't be asked without it."""
        return self.identifies and (self.required or self.distilled)


def identifying(values: Mapping[str, str], inputs: Sequence[Input]) -> dict[str, str]:
    """The values of those inputs that are part of what is asked."""
    names = [each_input.name for each_input in inputs if each_input.identifies]
    return {name: values[name] for name in names if name in values}


def placeholders(inputs: Sequence[Input], text: str) -> dict[str, str]:
    """The inputs that a prompt needs, all with the same text.

    They are for a prompt without a real question.
    """
    return {each_input.name: text for each_input in inputs if each_input.is_asked}
