"""Restarts an engine that died, unless a restart can't help.

Two deaths in a row, each soon after the start and without progress, are taken for a wrong setting. An engine that
stopped training by itself writes so into a file, and is not restarted.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path

from qinglan.errors import EngineError, StageError, first_line
from qinglan.runs.launcher import AttemptFailedError
from qinglan.training.engines.progress import read_stop

EARLY_S = 60.0


def run_attempts(
    attempt: Callable[[], None],
    *,
    name: str,
    folder: Path,
    progress: Callable[[], object] | None,
    max_restarts: int,
    say: Callable[[str], None],
) -> None:
    """Run attempt after attempt until one succeeds.

    Args:
        folder: where an engine that gives up writes `STOPPED_FILE`; its reason is then raised as a StageError.
        progress: something that changes as the engine gets on, such as its newest checkpoint; None where it can't
            resume, and then a failure is final.
    """
    early_deaths = 0
    for restarts in count():
        before = progress() if progress else None
        try:
            attempt()
        except AttemptFailedError as error:
            require_not_given_up(folder, name)
            if progress is None or not max_restarts:
                raise
            early_deaths = early_deaths + 1 if error.seconds < EARLY_S and progress() == before else 0
            if early_deaths == 2:
                raise EngineError(
                    f"{name} died twice in a row within {EARLY_S:.0f} s and without progress, so it is not started "
                    f"again; is a setting wrong? {error}"
                ) from error
            if restarts == max_restarts:
                raise EngineError(f"{error} (after {restarts} restarts, trainer.max_restarts)") from error
            say(
                f"{first_line(error)}; starting it again from its newest checkpoint, {restarts + 1} of {max_restarts} "
                "restarts"
            )
        else:
            require_not_given_up(folder, name)
            return


def require_not_given_up(folder: Path, name: str) -> None:
    if (stopped := read_stop(folder)) and stopped[1]:
        raise StageError(f"{name} gave up: {stopped[0]}")
