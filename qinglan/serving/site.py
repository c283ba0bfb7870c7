"""`qinglan serve`: the router and the servers of the models that the registry names, until Ctrl-C.

A new model's server is started before the old one's end, and routed only when it has answered. A
step that fails leaves the router with what it has. If this process ends, router and servers end
with it.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel

from qinglan.config import Profile, load_profile
from qinglan.errors import ConfigError
from qinglan.registry import Registry, Released, registry_of
from qinglan.runs.artifacts import write_json, written_whole
from qinglan.runs.locks import PROBED_FOR_S
from qinglan.runs.processes import Processes, Say, stop_signals
from qinglan.runs.schema_version import dump_record, find_record, parse_record, record_line
from qinglan.serving.canary import Judgement
from qinglan.serving.canary_observer import (
    STATE_FILE,
    VERDICT_FILE,
    CanaryVerdict,
    read_state,
    read_verdict,
)
from qinglan.serving.fleet import CommandOf, Fleet
from qinglan.serving.registry_watcher import RegistrySnapshot, RegistryWatcher
from qinglan.serving.router_launch import (
    announcement,
    router_command,
    warm_up_messages,
    with_addresses,
)
from qinglan.serving.routes import ROUTES_FILE, Backend, Routes
from qinglan.serving.server_process import (
    ROUTER,
    RouterProcess,
    chat_probe,
    places_of,
    serve_command,
)

SHARE_FILE = "share.json"
HISTORY_FILE = "canaries.jsonl"
STEP_S = 0.1
MOST_FAILURES = 3
"""Failures of a challenger's server before its canary ends."""
_DRAIN_MARGIN_S = 2.0


class CanaryShare(BaseModel, frozen=True, extra="forbid"):
    """A challenger's share of the requests, where somebody has set it by hand."""

    version: str
    share: float

    def write(self, folder: Path) -> None:
        write_json(folder / SHARE_FILE, dump_record(self))


def serving_folder(profile: Profile) -> Path:
    name = f"{profile.tenant.file_name}.{profile.recipe_name}"
    return profile.paths.state.resolve() / "serving" / name


def share_of(profile: Profile, folder: Path, version: str) -> float:
    by_hand = find_record(CanaryShare, folder / SHARE_FILE)
    if by_hand and by_hand.version == version:
        return by_hand.share
    return profile.serve.canary.share


def archive_verdict(folder: Path) -> None:
    """Move the verdict of a canary that is over to the history."""
    verdict = read_verdict(folder)
    if verdict is None:
        return
    history = folder / HISTORY_FILE
    earlier_lines = history.read_bytes() if history.exists() else b""
    with written_whole(history) as partial_file:
        partial_file.write_bytes(earlier_lines + record_line(verdict).encode())
    (folder / VERDICT_FILE).unlink(missing_ok=True)


def last_verdict(folder: Path) -> CanaryVerdict | None:
    pending_verdict = read_verdict(folder)
    if pending_verdict:
        # The site has not archived it yet.
        return pending_verdict
    history = folder / HISTORY_FILE
    if not history.exists():
        return None
    lines = history.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in reversed(lines):
        # A full disk may have cut a line.
        with suppress(ValueError):
            return parse_record(CanaryVerdict, line, history)
    return None


@dataclass
class ServingSite:
    """One tenant's endpoint; `step` brings it closer to what the registry names."""

    profile: Profile
    folder: Path
    fleet: Fleet
    watcher: RegistryWatcher
    router: RouterProcess
    say: Say
    routes: Routes = field(default_factory=Routes)
    _serving: str = ""
    """The version that answered last; it keeps its claim while its server is started again."""
    _own_verdict: CanaryVerdict | None = None
    """The site's own verdict on the challenger."""
    _reported: set[str] = field(default_factory=set)

    def step(self) -> None:
        """Make one step, without waiting.

        A part that fails is reported and retried; the others are done all the same.
        """
        # What keeps the service up comes before what is only written to files.
        self._try(self.router.step)
        self._try(self.fleet.processes.limit_logs)
        snapshot = self.watcher.latest
        if snapshot:
            self._try(partial(self._follow, snapshot))

    def _follow(self, snapshot: RegistrySnapshot) -> None:
        verdict = self._verdict(snapshot)
        challenger = None if verdict else snapshot.of("challenger")
        routed_versions = self.routes.versions
        self._try(lambda: self.fleet.step(self._wanted(snapshot, challenger), routed_versions))
        self._try(lambda: self._route(self._routes(snapshot, challenger), snapshot))
        if verdict:
            self._try(partial(self._act_on, verdict))
        else:
            self._try(partial(self._archive, snapshot))
        self._try(partial(self._report, snapshot))

    def _try(self, part: Callable[[], object]) -> None:
        try:
            part()
        except Exception as error:  # noqa: BLE001 (a full disk, a mistake: the router must go on)
            problem = str(error) if isinstance(error, OSError) else repr(error)
            self._say_once(f"not everything could be done: {problem}")

    def _wanted(self, snapshot: RegistrySnapshot, challenger: Released | None) -> list[Released]:
        """The models that should run, the most important first.

        Until the champion is ready, all depends on the one that answers instead.
        """
        fallback = self._fallback(snapshot)
        in_service = None
        if fallback and fallback.version == self._serving:
            in_service = fallback
        previous = None
        if self.profile.serve.keep_previous_warm:
            previous = snapshot.of("previous")
        champion_version = snapshot.aliases.get("champion", "")
        if previous is None and self.fleet.failures_of(champion_version).failures:
            previous = fallback
        models_by_version: dict[str, Released] = {}
        for model in (in_service, snapshot.of("champion"), challenger, previous):
            if model:
                models_by_version[model.version] = model
        return list(models_by_version.values())

    def _fallback(self, snapshot: RegistrySnapshot) -> Released | None:
        """The model that answers until the champion is ready.

        There is none where the champion has been ready, as it is only restarted then.
        """
        champion_version = snapshot.aliases.get("champion")
        if snapshot.fallback_version is None or champion_version == self._serving:
            return None
        return snapshot.models.get(snapshot.fallback_version)

    def _routes(self, snapshot: RegistrySnapshot, challenger: Released | None) -> Routes:
        champion_version = snapshot.aliases.get("champion")
        if champion_version is None:
            return Routes()
        first = self._first_ready(snapshot, champion_version)
        second = self.fleet.ready(challenger.version) if challenger else None
        # A canary compares with the champion, so there is none while another model answers.
        if first is None or second is None or first.version != champion_version:
            return Routes(champion=first)
        share = share_of(self.profile, self.folder, second.version)
        return Routes(champion=first, challenger=second, share=share)

    def _first_ready(self, snapshot: RegistrySnapshot, champion_version: str) -> Backend | None:
        """The server of the champion, or of a model that answers in its place."""
        versions = [champion_version]
        if self.routes.champion:
            versions.append(self.routes.champion.version)
        fallback = self._fallback(snapshot)
        if fallback:
            versions.append(fallback.version)
        for version in versions:
            backend = self.fleet.ready(version)
            if backend:
                return backend
        return None

    def _route(self, routes: Routes, snapshot: RegistrySnapshot) -> None:
        is_changed = routes != self.routes
        if is_changed or not (self.folder / ROUTES_FILE).exists():
            routes.write(self.folder / ROUTES_FILE)
        self.routes = routes
        rightful_versions = (snapshot.aliases.get("champion"), snapshot.fallback_version)
        if routes.champion and routes.champion.version in rightful_versions:
            self._serving = routes.champion.version
        if is_changed:
            self.say(f"serving: {routes.summary}")

    def _verdict(self, snapshot: RegistrySnapshot) -> CanaryVerdict | None:
        """The verdict on the challenger, the router's or the site's own."""
        for verdict in (read_verdict(self.folder), self._own_verdict):
            if verdict and verdict.challenger == snapshot.aliases.get("challenger"):
                return verdict
        self._own_verdict = self._judge_server(snapshot)
        return self._own_verdict

    def _judge_server(self, snapshot: RegistrySnapshot) -> CanaryVerdict | None:
        """A verdict on a challenger whose server fails again and again.

        The router can't see that.
        """
        challenger = snapshot.of("challenger")
        if challenger is None:
            return None
        backoff = self.fleet.failures_of(challenger.version)
        if backoff.failures < MOST_FAILURES:
            return None
        first_line = backoff.reason.splitlines()[0]
        reason = f"its server failed {MOST_FAILURES} times; {first_line}"
        champion = self.routes.champion
        return CanaryVerdict(
            challenger=challenger.version,
            champion=champion.version if champion else "",
            judgement=Judgement(outcome="roll_back", reason=reason),
            at=time.time(),
            requests=0,
        )

    def _act_on(self, verdict: CanaryVerdict) -> None:
        """Have the alias removed.

        The verdict stays on file until that is done, also for the next `qinglan serve`.
        """
        self.watcher.withdraw(verdict.challenger, f"canary {verdict.summary}", verdict.at)
        self._say_once(f"canary of version {verdict.challenger}: {verdict.summary}")
        if verdict is self._own_verdict and read_verdict(self.folder) != verdict:
            write_json(self.folder / VERDICT_FILE, dump_record(verdict))

    def _archive(self, snapshot: RegistrySnapshot) -> None:
        """Clean up after a canary that is over.

        A verdict that was written during this step is for the next step.
        """
        verdict = read_verdict(self.folder)
        if verdict and verdict.challenger != snapshot.aliases.get("challenger"):
            archive_verdict(self.folder)
            self._reported.clear()
        if "challenger" not in snapshot.aliases and self.routes.challenger is None:
            (self.folder / STATE_FILE).unlink(missing_ok=True)

    def _report(self, snapshot: RegistrySnapshot) -> None:
        champion_version = snapshot.aliases.get("champion")
        serving = self.routes.champion
        if champion_version is None:
            run = f"run `qinglan run pipeline --profile {self.profile.name}`"
            self._say_once(
                "no champion yet, so every answer is the question itself: "
                f"{run}, or `qinglan release promote VERSION`"
            )
            return
        has_failed = self.fleet.failures_of(champion_version).failures > 0
        if has_failed and serving and serving.version != champion_version:
            self._say_once(
                f"version {serving.version} goes on serving "
                f"until version {champion_version} answers"
            )

    def _say_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self.say(text)


def serve_site(
    profile_name: str, overrides: Sequence[str], say: Say, port: int | None = None
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Raises:
        ConfigError: another site serves this tenant from this folder.
    """
    profile = load_profile(profile_name, overrides)
    folder = serving_folder(profile)
    with stop_signals(), suppress(KeyboardInterrupt), ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            stack.enter_context(FileLock(folder / ".lock", timeout=PROBED_FOR_S))
        except Timeout:
            hint = "stop that `qinglan serve`, or give this one another paths.state"
            raise ConfigError(
                f"{profile.model_name} is served from {folder} already; {hint}"
            ) from None
        site = stack.enter_context(open_site(profile, folder, say, port=port))
        is_announced = False
        while True:
            site.step()
            if not is_announced and site.routes.champion and site.router.url:
                is_announced = True
                site.say(announcement(profile, site.router.url))
            time.sleep(STEP_S)


@contextmanager
def open_site(
    profile: Profile,
    folder: Path,
    say: Say,
    *,
    port: int | None = None,
    watched: bool = True,
    registry: Registry | None = None,
    command_of: CommandOf | None = None,
) -> Iterator[ServingSite]:
    """A site whose router runs; it ends with the `with`.

    Args:
        port: 0 takes a free one; the profile's if not given.
        watched: canaries are served and watched, which takes the RAG.
        registry: the profile's if not given.
        command_of: starts a model's server; ms-swift's if not given.
    """
    say = partial(_say_if_possible, say)
    # A tracking server that is away must not hold a rollback up for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    folder.mkdir(parents=True, exist_ok=True)
    # Files of a newer Qinglan are refused here, not in the midst of serving.
    read_state(folder)
    read_verdict(folder)
    # These routes lead to servers that have ended.
    (folder / ROUTES_FILE).unlink(missing_ok=True)
    logs = folder / "logs"
    if watched:
        name = f"serve_{profile.tenant.file_name}.{profile.recipe_name}"
        logs = profile.paths.state.resolve() / "logs" / name
    with ExitStack() as stack:
        router_profile = stack.enter_context(with_addresses(profile)) if watched else profile
        processes = stack.enter_context(Processes(logs, say, end_first=(ROUTER,)))
        command = router_command(router_profile, folder, port, watched=watched)
        router = RouterProcess(processes, command, say)
        fleet = Fleet(
            processes=processes,
            command_of=command_of or partial(serve_command, profile),
            probe=chat_probe(warm_up_messages(profile)),
            places=places_of(profile, os.environ),
            say=say,
            drain_s=profile.serve.deadline_ms / 1000 + _DRAIN_MARGIN_S,
        )
        stack.callback(fleet.pool.shutdown, wait=False, cancel_futures=True)
        watcher = RegistryWatcher(
            registry or registry_of(profile),
            profile.serve.poll_every_s,
            say,
            with_challenger=watched,
        )
        stack.callback(watcher.stop)
        threading.Thread(target=watcher.run, name="registry", daemon=True).start()
        router.start()
        yield ServingSite(profile, folder, fleet, watcher, router, say)


def _say_if_possible(say: Say, text: str) -> None:
    # A terminal that was closed, or a log on a full disk: the service depends on neither. rich ends
    # the program when its reader has gone.
    with suppress(Exception, SystemExit):
        say(text)
