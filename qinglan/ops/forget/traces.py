"""Recognises a file's record or text as one of the forgotten rows."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qinglan.ops.forget.records import (
    ID_KEYS,
    Context,
    cells_of,
    context_of,
    is_own_row,
    row_id_in,
    strings_in,
)
from qinglan.text import pattern_of

MARK = "[forgotten]"
"""What stands in the place of a text that was removed."""


@dataclass(frozen=True)
class Traces:
    """The rows' ids, what they ask, and the texts that no other row has."""

    ids: frozenset[str]
    contexts: frozenset[Context]
    texts: frozenset[str]
    columns: Mapping[str, str]
    """A workbook's column by field."""

    @cached_property
    def texts_pattern(self) -> re.Pattern[str]:
        """Finds the texts in whatever form."""
        return pattern_of(self.texts)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Finds ids and texts."""
        return re.compile("|".join([*self.ids, self.texts_pattern.pattern]))

    @cached_property
    def bytes_pattern(self) -> re.Pattern[bytes]:
        """The same in a file's bytes."""
        return re.compile(self.pattern.pattern.encode())

    def redact(self, text: str) -> tuple[str, int]:
        """The text with a mark in the place of the rows' texts, and the number of marks."""
        return self.texts_pattern.subn(MARK, text)

    def is_about(self, record: Any) -> bool:
        """Tell whether a record is one of the rows, about one, or holds one of their texts."""
        if self.names(record):
            return True
        return any(self.texts_pattern.search(text) for _, text in strings_in(record))

    def names(self, record: Any) -> bool:
        """Tell whether a record has a row's id, or asks what a row asks and has no id of its own.

        A row under another id asks the same in another context, as its near-duplicate.
        """
        for key, text in strings_in(record):
            if key in ID_KEYS and row_id_in(text) in self.ids:
                return True
        cells = cells_of(record, self.columns)
        if not cells or is_own_row(record):
            return False
        return context_of(cells) in self.contexts
