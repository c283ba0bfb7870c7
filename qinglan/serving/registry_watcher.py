"""Reads the registry in the background.

The site never waits for a database, or for the digest of 60 GB of weights. While the registry can't
be read, the last state that was read stays in force.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from qinglan.errors import QinglanError
from qinglan.registry import Alias, Registry, Released

_CHECK_WEIGHTS_EVERY_S = 30.0


@dataclass(frozen=True)
class RegistrySnapshot:
    """The registry as it was read last."""

    aliases: dict[Alias, str]
    models: dict[str, Released]
    """The versions whose weights can be loaded."""
    fallback_version: str | None = None
    """The previous version, unless it was rolled back.

    It may answer where the champion can't start.
    """

    def of(self, alias: Alias) -> Released | None:
        return self.models.get(self.aliases.get(alias, ""))


class _Withdrawal(NamedTuple):
    """An order to take the challenger's alias from a version."""

    version: str
    reason: str
    at: float
    """Time of the verdict, which tells it from any other."""


class _Fallback(NamedTuple):
    version: str | None
    aliases: dict[Alias, str]
    """The aliases at the time when the version was looked up."""


@dataclass
class RegistryWatcher:
    """Polls the registry until it is stopped; `run` takes a thread of its own."""

    registry: Registry
    every_s: float
    say: Callable[[str], object]
    with_challenger: bool = True
    """False where the challenger is left to another site, which serves and judges it."""
    latest: RegistrySnapshot | None = None
    problem: str | None = None
    _models: dict[str, Released] = field(default_factory=dict)
    _checks: "dict[str, Future[Released]]" = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)
    _withdrawal: _Withdrawal | None = None
    _withdrawn_at: float | None = None
    """Time of the verdict that was acted upon last."""
    _fallback: _Fallback | None = None
    _stopped: threading.Event = field(default_factory=threading.Event)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "weights"))

    def stop(self) -> None:
        """Poll no more; a request under way is not waited for."""
        self._stopped.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def withdraw(self, version: str, reason: str, at: float) -> None:
        """Take the challenger's alias from a version as soon as the registry can be reached.

        It is done once per verdict, whose time is `at`.
        """
        if at != self._withdrawn_at:
            self._withdrawal = _Withdrawal(version, reason, at)

    def run(self) -> None:
        while not self._stopped.is_set():
            self.poll()
            self._stopped.wait(self.every_s)

    def poll(self) -> None:
        """Read the registry once. Where that fails, the models in service stay."""
        try:
            aliases = self._withdrawn(self.registry.aliases())
            if not self.with_challenger:
                aliases.pop("challenger", None)
            for version in set(aliases.values()):
                self._check(version)
            fallback_version = self._fallback_version(aliases)
        except Exception as error:  # noqa: BLE001 (a locked database, a server that is down)
            self._report(error)
            return
        self.latest = RegistrySnapshot(aliases, dict(self._models), fallback_version)
        if self.problem:
            self.problem = None
            self.say("registry: can be read again")

    def _report(self, error: Exception) -> None:
        if isinstance(error, QinglanError):
            problem = str(error)
        else:
            problem = f"{type(error).__name__}: {error}"
        if self.problem is None:
            first_line = problem.splitlines()[0]
            self.say(f"registry: can't be read, the models in service stay ({first_line})")
        self.problem = problem

    def _withdrawn(self, aliases: dict[Alias, str]) -> dict[Alias, str]:
        """The aliases after an order to withdraw the challenger was carried out."""
        if self._withdrawal is None:
            return aliases
        withdrawal = self._withdrawal
        if aliases.get("challenger") == withdrawal.version:
            self.registry.withdraw_challenger(withdrawal.reason, withdrawal.version)
            aliases = self.registry.aliases()
        self._withdrawal = None
        self._withdrawn_at = withdrawal.at
        return aliases

    def _fallback_version(self, aliases: dict[Alias, str]) -> str | None:
        # The version is read anew at every change of an alias: a rollback adds a tag to a version
        # that was read long ago.
        if self._fallback and self._fallback.aliases == aliases:
            return self._fallback.version
        version = aliases.get("previous")
        try:
            if version and self.registry.version(version).rolled_back_to:
                version = None
        except Exception:  # noqa: BLE001 (a version that was deleted, say, and `_check` says so)
            return None
        self._fallback = _Fallback(version or None, aliases)
        return self._fallback.version

    def _check(self, version: str) -> None:
        """Have a version's weights looked for; take them up once they are found."""
        model = self._models.get(version)
        if model and not model.folder.is_dir():
            del self._models[version]
        check = self._checks.get(version)
        if check is None:
            is_due = time.monotonic() >= self._not_before.get(version, 0.0)
            if version not in self._models and is_due:
                self._checks[version] = self._pool.submit(self._locate, version)
            return
        if not check.done():
            return
        del self._checks[version]
        try:
            self._models[version] = check.result()
        except Exception as error:  # noqa: BLE001 (reported, and retried)
            self._not_before[version] = time.monotonic() + _CHECK_WEIGHTS_EVERY_S
            self.say(
                f"version {version}: can't be served: {error}; "
                f"next try in {_CHECK_WEIGHTS_EVERY_S:.0f} s"
            )

    def _locate(self, version: str) -> Released:
        released = self.registry.version(version)
        return released.with_folder(self.registry.folder(released, self.say))
