"""Starts an engine again where it died, unless that can't help.

A killed worker or a lost node ends an engine that would go on from its newest checkpoint. A wrong setting ends it as
well, and would end it again: two deaths in a row, each soon after the start and without progress, are taken for that.
An engine that gave up by itself says so in a file, and that is final.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path

from qinglan.errors import EngineError, StageError, first_line
from qinglan.runs.launcher import AttemptFailedError
from qinglan.training.engines.progress import read_stop
from qinglan.training.engines.trainer_settings import STOPPED_FILE

SOON_S = 60.0


def run_attempts(
    attempt: Callable[[], None],
    *,
    name: str,
    folder: Path,
    progress: Callable[[], object] | None,
    max_restarts: int,
    say: Callable[[str], None],
) -> None:
    """Run attempt after attempt until one ends well.

    Args:
        folder: where an engine that gives up writes `STOPPED_FILE`.
        progress: something that changes as the engine gets on, such as its newest checkpoint; None where it can't
            resume, and then a failure is final.

    Raises:
        StageError: the engine gave up by itself, with its reason.
        EngineError: it failed and was not, or not again, started anew.
    """
    deaths_in_vain = 0
    for restarts in count():
        before = progress() if progress else None
        try:
            attempt()
        except AttemptFailedError as error:
            raise_if_final(folder, name)
            if progress is None or not max_restarts:
                raise
            in_vain = error.seconds < SOON_S and progress() == before
            deaths_in_vain = deaths_in_vain + 1 if in_vain else 0
            if deaths_in_vain == 2:
                raise EngineError(
                    f"{name} died twice in a row within {SOON_S:.0f} s and without progress, so it is not started "
                    f"again; is a setting wrong? {error}"
                ) from error
            if restarts == max_restarts:
                raise EngineError(f"{error} (after {restarts} restarts, trainer.max_restarts)") from error
            first = first_line(error)
            say(f"{first}; starting it again from its newest checkpoint, {restarts + 1} of {max_restarts} restarts")
        else:
            raise_if_final(folder, name)
            return


def clear_final(folder: Path) -> None:
    """Forget how an earlier attempt ended."""
    (folder / STOPPED_FILE).unlink(missing_ok=True)


def raise_if_final(folder: Path, name: str) -> None:
    """Raise what the engine itself declared.

    Raises:
        StageError: it gave up.
    """
    if (stopped := read_stop(folder)) and stopped[1]:
        raise StageError(f"{name} gave up: {stopped[0]}")
