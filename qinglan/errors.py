"""Every error that a user can cause or resolve derives from `QinglanError` and reads as one line.

The command line prints ``str(error)`` and exits with 2; only a bug shows a traceback.
"""

from pathlib import Path


def first_line(error: BaseException) -> str:
    """The first line of the error's message; the name of its class where that is empty."""
    lines = str(error).splitlines()
    if lines and lines[0]:
        return lines[0]
    return type(error).__name__


class QinglanError(Exception):
    """An error that a user can cause or resolve.

    Its message says in one line what went wrong, where, and what to do about it. It goes into logs,
    pages and notifications, and so quotes no row.

    `said` is in the words of a service, model or engine, which may quote a row: it is only for
    files of rows and for the terminal.
    """

    def __init__(self, message: str = "", said: str = "") -> None:
        super().__init__(message)
        self.said = said

    @property
    def in_terminal(self) -> str:
        """The message on one line, with the last line that a process said."""
        last_line = self.said.strip().rpartition("\n")[2].strip()
        reason = last_line.removeprefix("error: ")
        if not reason:
            return first_line(self)
        return f"{first_line(self)}; its last line: {reason}"


class UnexpectedError(QinglanError):
    """Stands for its cause, an exception that is none of ours and whose text may quote a row."""


class ConfigError(QinglanError):
    """A profile, an override or an environment variable is wrong."""


class WorkbookError(QinglanError):
    """An input file can't be used as it is."""


class CallError(QinglanError):
    """A call about one row failed.

    `reason` is what the row keeps. `transient` says whether a later attempt may succeed.
    `retry_after_s` is the time after which the service takes the same request again, 0 where it
    names none; None where the client must not repeat the request by itself.
    """

    def __init__(
        self,
        message: str,
        reason: str,
        *,
        said: str = "",
        transient: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, said)
        self.reason = reason
        self.transient = transient
        self.retry_after_s = retry_after_s


class TeacherError(CallError):
    """The teacher or judge did not give a usable answer."""


class RetrievalError(CallError):
    """The RAG service did not give a usable answer."""


class ModelError(CallError):
    """A served student did not give a usable rewrite."""


class LedgerError(QinglanError):
    """The ledger can't be used; `unreachable` where its server can't be reached now."""

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


class BudgetError(QinglanError):
    """Another call would cost more than the budget allows."""


class EngineError(QinglanError):
    """An engine's or a server's process failed; `said` is the end of its log."""


class ArtifactError(QinglanError):
    """A file that a run relies on is missing or not what its manifest says."""


class RunLockedError(QinglanError):
    """Another run holds the lock; this one is not needed, or has to start again later."""


class StageError(QinglanError):
    """A stage ended with nothing that the next one could use."""

    report: Path | None = None
    """The report of what was found until then, where one was written."""
