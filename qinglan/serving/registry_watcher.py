"""Reads the registry in the background: the site never waits for a database or for the digest of 60
GB of weights.

While the registry can't be read, the last state that was read stays in force.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from qinglan.errors import QinglanError
from qinglan.registry import Alias, Registry, Released

_CHECK_WEIGHTS_EVERY_S = 30.0


@dataclass(frozen=True)
class RegistrySnapshot:
    aliases: dict[Alias, str]
    models: dict[str, Released]
    fallback_version: str | None = None
    """The previous version, unless it was rolled back: it may answer where the champion can't
    start."""

    def of(self, alias: Alias) -> Released | None:
        return self.models.get(self.aliases.get(alias, ""))


@dataclass
class RegistryWatcher:
    """`run` polls until `stop`, in a thread of its own."""

    registry: Registry
    every_s: float
    say: Callable[[str], object]
    with_challenger: bool = True
    """Without it, the challenger is left to another site, which serves and judges it."""
    latest: RegistrySnapshot | None = None
    problem: str | None = None
    _models: dict[str, Released] = field(default_factory=dict)
    _checks: "dict[str, Future[Released]]" = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)
    _withdrawal: tuple[str, str, float] | None = None
    _withdrawn_at: float | None = None
    _previous: tuple[dict[Alias, str], str | None] | None = None
    _stopped: threading.Event = field(default_factory=threading.Event)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "weights"))

    def stop(self) -> None:
        """Poll no more; a request under way is not waited for."""
        self._stopped.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def withdraw(self, version: str, reason: str, at: float) -> None:
        """Take the challenger's alias from this version as soon as the registry can be reached,
        once per verdict."""
        if at != self._withdrawn_at:
            self._withdrawal = version, reason, at

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
        except Exception as error:  # noqa: BLE001 (a locked database, a server or network that is down: all the same)
            problem = (
                str(error)
                if isinstance(error, QinglanError)
                else f"{type(error).__name__}: {error}"
            )
            if self.problem is None:
                self.say(
                    f"registry: can't be read, the models in service stay ({problem.splitlines()[0]})"
                )
            self.problem = problem
            return
        self.latest = RegistrySnapshot(aliases, dict(self._models), fallback_version)
        if self.problem:
            self.problem = None
            self.say("registry: can be read again")

    def _withdrawn(self, aliases: dict[Alias, str]) -> dict[Alias, str]:
        if self._withdrawal is None:
            return aliases
        version, reason, at = self._withdrawal
        if aliases.get("challenger") == version:
            self.registry.withdraw_challenger(reason, version)
            aliases = self.registry.aliases()
        self._withdrawal, self._withdrawn_at = None, at
        return aliases

    def _fallback_version(self, aliases: dict[Alias, str]) -> str | None:
        # Read anew at every change: a rollback adds a tag to a version that was read long ago.
        if self._previous and self._previous[0] == aliases:
            return self._previous[1]
        version = aliases.get("previous")
        try:
            fallback = (
                version if version and not self.registry.version(version).rolled_back_to else None
            )
        except Exception:  # noqa: BLE001 (a version that was deleted, say, and `_check` says so)
            return None
        self._previous = aliases, fallback
        return fallback

    def _check(self, version: str) -> None:
        if version in self._models and not self._models[version].folder.is_dir():
            del self._models[version]
        if version not in self._checks:
            if version not in self._models and time.monotonic() >= self._not_before.get(
                version, 0.0
            ):
                self._checks[version] = self._pool.submit(self._locate, version)
            return
        if not self._checks[version].done():
            return
        try:
            self._models[version] = self._checks.pop(version).result()
        except Exception as error:  # noqa: BLE001 (reported, and retried)
            self._not_before[version] = time.monotonic() + _CHECK_WEIGHTS_EVERY_S
            self.say(
                f"version {version}: can't be served: {error}; next try in {_CHECK_WEIGHTS_EVERY_S:.0f} s"
            )

    def _locate(self, version: str) -> Released:
        released = self.registry.version(version)
        return released.model_copy(update={"folder": self.registry.folder(released, self.say)})
