"""Types of the fixtures in tests/conftest.py."""

from collections.abc import Callable

from fake_service import FakeService, Script

from qinglan.config import Profile

ProfileOf = Callable[..., Profile]
Qinglan = Callable[..., tuple[int, str, str]]
"""Takes a command's words; gives its status, stdout and stderr."""
Serve = Callable[[Script], FakeService]
