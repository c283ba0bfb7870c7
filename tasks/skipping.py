"""A flow that is not needed ends as `Skipped`, which is no failure: nobody is woken up because of it."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, cast

from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed

from qinglan.errors import RunLockedError

P = ParamSpec("P")
SKIPPED = "Skipped"


def skip_if_running(work: Callable[P, Path]) -> Callable[P, Path]:
    """For a flow's function: where another run holds the lock, end the flow run with that in its state."""

    @wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> Path:
        try:
            return work(*args, **kwargs)
        except RunLockedError as error:
            get_run_logger().warning("%s", error)
            return cast(Path, Completed(name=SKIPPED, message=str(error)))

    return run


def unless_skipped(state: State[Any]) -> Path:
    """A flow's result, for a caller who can do nothing without it.

    Raises:
        RunLockedError: the flow was skipped.
        Exception: whatever the flow raised.
    """
    if state.name == SKIPPED:
        raise RunLockedError(state.message or SKIPPED)
    return cast(Path, state.result())
