"""Numbers in the files that a later Qinglan reads, and how an older file becomes one of today's.

A file without a number is of version 1: that is what was written before there were numbers. A change that older code
would misread appends a migration to the file's kind, which raises its number; older code then refuses the file in one
line. A kind's number covers the data files that it describes as well: rows beside a manifest, the index beside
version.json.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from qinglan.errors import ArtifactError

KEY = "schema_version"
Values = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class FileKind:
    """Files of one format."""

    migrations: tuple[Callable[[Values], Values], ...] = ()
    """The n-th makes values of version n into values of version n + 1."""

    @property
    def version(self) -> int:
        """What is written now."""
        return 1 + len(self.migrations)

    def stamp(self, values: Values) -> Values:
        """The values as they are written."""
        return {KEY: self.version} | values

    def dump(self, record: BaseModel) -> Values:
        """A record as it is written."""
        return self.stamp(record.model_dump(mode="json"))

    def line(self, record: BaseModel) -> str:
        """A record as one line of JSON, without the line's end."""
        return json.dumps(self.dump(record), ensure_ascii=False)

    def current(self, values: Values, where: object) -> Values:
        """Values of any version up to today's as today's, without the number.

        Raises:
            ArtifactError: they are of a later version, or their number is none.
        """
        number = values.get(KEY, 1)
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ArtifactError(f"{where}: {KEY} is {number!r}, which is no version; restore it from a backup")
        if number > self.version:
            raise ArtifactError(
                f"{where}: written by a newer Qinglan (format {number}, this one reads up to {self.version}); "
                "upgrade this one (docs/upgrades.md)"
            )
        values = {name: value for name, value in values.items() if name != KEY}
        for migrate in self.migrations[number - 1 :]:
            values = migrate(values)
        return values

    def parse(self, model: type[Model], content: str | bytes, where: object) -> Model:
        """A line's or a file's content; raises what `read` does."""
        try:
            values = json.loads(content)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            return model.model_validate_json(content)  # which says what is wrong with it
        return model.model_validate(self.current(values, where))

    def read(self, model: type[Model], path: Path) -> Model:
        """A file's content.

        Raises:
            OSError: it can't be read.
            ArtifactError: it is of a later version.
            ValidationError: it holds no such record.
        """
        return self.parse(model, path.read_text(encoding="utf-8"), path)


RUN = FileKind()
"""`run.json`."""
STAGE = FileKind()
"""A stage's `manifest.json`, and the rows, evaluation and decision beside it."""
DATASET = FileKind()
"""A dataset version's `version.json`, and its rows, index, sketch and card."""
TRAINING = FileKind()
"""`trained.json` beside the dataset versions."""
REVIEW = FileKind()
"""A line of the people's verdicts."""
REPORT = FileKind()
"""`report.json`."""
RELEASE = FileKind()
"""A registered version's tags in MLflow, and its `release.json`."""
WAITING = FileKind()
"""`waiting.json`: a release that waits for a person."""
SHARE = FileKind()
"""`share.json`: what a person gave a canary."""
CANARY = FileKind()
"""`canary.json`: how a canary stands."""
VERDICT = FileKind()
"""`verdict.json`, and a line of `canaries.jsonl`."""
BACKUP = FileKind()
"""`backup.json`."""
