"""Whoever begins to work looks for lost runs, and goes on whatever that comes to."""

import logging
from collections.abc import Callable

import httpx2
import pytest

from qinglan.config import Profile
from qinglan.errors import ConfigError, first_line
from qinglan.tasks import lost

ProfileOf = Callable[..., Profile]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (httpx2.ReadTimeout(""), "ReadTimeout"),
        (httpx2.InvalidURL("no port\nin it"), "no port"),
        (ConfigError("profiles.toml: can't be read"), "profiles.toml: can't be read"),
        (ValueError("no JSON"), "no JSON"),
        (KeyError("status"), "'status'"),
    ],
)
def test_what_goes_wrong_is_a_warning(
    profile_of: ProfileOf,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    said: str,
):
    def fails(_: object) -> None:
        raise error

    monkeypatch.setattr(lost, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(lost, "find_server", fails)
    lost.resume_lost_runs(profile_of())
    assert caplog.messages == [f"could not look for lost runs: {said}"]


def test_an_error_has_a_first_line():
    assert [first_line(ValueError(text)) for text in ("", "\nb", "a\nb")] == ["ValueError", "ValueError", "a"]
