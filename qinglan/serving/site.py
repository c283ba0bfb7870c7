"""`qinglan serve`: the router and the servers of the models that the registry names, until Ctrl-C.

A new model's server is started before the old one's end, and routed only when it has answered. A
step that fails leaves the router with what it has. If this process ends, router and servers end
with it.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from pydantic import BaseModel

from qinglan.config import EMBEDDED, Profile, load_profile, withheld_secrets
from qinglan.errors import ConfigError
from qinglan.recipes import get_recipe, placeholders
from qinglan.registry import Registry, Released, registry_of
from qinglan.rows import Row
from qinglan.runs.artifacts import write_json, written_whole
from qinglan.runs.launcher import Command
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
from qinglan.serving.routes import Routes
from qinglan.serving.server_process import (
    ROUTER,
    RouterProcess,
    chat_probe,
    places_of,
    serve_command,
)
from qinglan.simulators.domains import embedded_knowledge_base
from qinglan.simulators.services import embedded_services, rag_service

ROUTES_FILE, SHARE_FILE, HISTORY_FILE = "routes.json", "share.json", "canaries.jsonl"
WARM_UP_QUESTION = "这个怎么吃"
STEP_S = 0.1
MOST_FAILURES = 3
"""Of a challenger's server, before its canary ends."""
_DRAIN_MARGIN_S = 2.0


class CanaryShare(BaseModel, frozen=True, extra="forbid"):
    version: str
    share: float

    def write(self, folder: Path) -> None:
        write_json(folder / SHARE_FILE, dump_record(self))


def serving_folder(profile: Profile) -> Path:
    return (
        profile.paths.state.resolve()
        / "serving"
        / f"{profile.tenant.file_name}.{profile.recipe_name}"
    )


def share_of(profile: Profile, folder: Path, version: str) -> float:
    given = find_record(CanaryShare, folder / SHARE_FILE)
    return given.share if given and given.version == version else profile.serve.canary.share


def archive_verdict(folder: Path) -> None:
    if verdict := read_verdict(folder):
        history = folder / HISTORY_FILE
        known = history.read_bytes() if history.exists() else b""
        with written_whole(history) as partial:
            partial.write_bytes(known + record_line(verdict).encode())
        (folder / VERDICT_FILE).unlink(missing_ok=True)


def last_verdict(folder: Path) -> CanaryVerdict | None:
    if pending := read_verdict(folder):  # the site has not archived it yet
        return pending
    history = folder / HISTORY_FILE
    lines = (
        history.read_text(encoding="utf-8", errors="replace").splitlines()
        if history.exists()
        else []
    )
    for line in reversed(lines):
        with suppress(ValueError):  # a full disk may have cut one
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
    _reported: set[str] = field(default_factory=set)

    def step(self) -> None:
        """One step, without waiting. A part that fails is reported and retried; the others are done
        all the same."""
        # What keeps the service up comes before what is only written to files.
        self._try(self.router.step)
        self._try(self.fleet.processes.limit_logs)
        if named := self.watcher.latest:
            self._try(lambda: self._follow(named))

    def _follow(self, named: RegistrySnapshot) -> None:
        verdict = self._verdict(named)
        challenger = None if verdict else named.of("challenger")
        routed = [
            backend.version for backend in (self.routes.champion, self.routes.challenger) if backend
        ]
        self._try(lambda: self.fleet.step(self._wanted(named, challenger), routed))
        self._try(lambda: self._route(self._routes(named, challenger), named))
        self._try(lambda: self._act_on(verdict) if verdict else self._archive(named))
        self._try(lambda: self._report(named))

    def _try(self, part: Callable[[], object]) -> None:
        try:
            part()
        except Exception as error:  # noqa: BLE001 (a full disk, a mistake: the router must go on)
            self._once(
                f"not everything could be done: {error if isinstance(error, OSError) else repr(error)}"
            )

    def _wanted(self, named: RegistrySnapshot, challenger: Released | None) -> list[Released]:
        """The most important first: until the champion is ready, all depends on the one that
        answers instead."""
        fallback = self._fallback(named)
        in_service = fallback if fallback and fallback.version == self._serving else None
        previous = named.of("previous") if self.profile.serve.keep_previous_warm else None
        if self.fleet.failures_of(named.aliases.get("champion", "")).failures:
            previous = previous or fallback
        models = (in_service, named.of("champion"), challenger, previous)
        return list({model.version: model for model in models if model}.values())

    def _fallback(self, named: RegistrySnapshot) -> Released | None:
        """The model that answers until the champion is ready; a champion that was ready is only
        restarted."""
        if named.fallback_version is None or named.aliases.get("champion") == self._serving:
            return None
        return named.models.get(named.fallback_version)

    def _routes(self, named: RegistrySnapshot, challenger: Released | None) -> Routes:
        wanted, former, fallback = (
            named.aliases.get("champion"),
            self.routes.champion,
            self._fallback(named),
        )
        if wanted is None:
            return Routes()
        candidates = (
            wanted,
            former.version if former else "",
            fallback.version if fallback else "",
        )
        first = next(
            (backend for version in candidates if (backend := self.fleet.ready(version))), None
        )
        second = self.fleet.ready(challenger.version) if challenger else None
        if first is None or second is None or first.version != wanted:
            return Routes(champion=first)
        return Routes(
            champion=first,
            challenger=second,
            share=share_of(self.profile, self.folder, second.version),
        )

    def _route(self, routes: Routes, named: RegistrySnapshot) -> None:
        if routes != self.routes or not (self.folder / ROUTES_FILE).exists():
            routes.write(self.folder / ROUTES_FILE)
        changed, self.routes = routes != self.routes, routes
        if routes.champion and routes.champion.version in (
            named.aliases.get("champion"),
            named.fallback_version,
        ):
            self._serving = routes.champion.version
        if changed:
            self.say(f"serving: {routes.summary}")

    def _verdict(self, named: RegistrySnapshot) -> CanaryVerdict | None:
        for verdict in (read_verdict(self.folder), self._own_verdict):
            if verdict and verdict.challenger == named.aliases.get("challenger"):
                return verdict
        self._own_verdict = None
        challenger, champion = named.of("challenger"), self.routes.champion
        # The site's own verdict on a challenger whose server fails again and again, which the
        # router can't see.
        if (
            challenger
            and (failed := self.fleet.failures_of(challenger.version)).failures >= MOST_FAILURES
        ):
            why = f"its server failed {MOST_FAILURES} times; {failed.reason.splitlines()[0]}"
            arms = {
                "challenger": challenger.version,
                "champion": champion.version if champion else "",
            }
            judgement = Judgement(outcome="roll_back", reason=why)
            self._own_verdict = CanaryVerdict(
                **arms, judgement=judgement, at=time.time(), requests=0
            )
        return self._own_verdict

    def _act_on(self, verdict: CanaryVerdict) -> None:
        """Have the alias removed; the verdict stays on file until that is done, also for the next
        `qinglan serve`."""
        self.watcher.withdraw(verdict.challenger, f"canary {verdict.summary}", verdict.at)
        self._once(f"canary of version {verdict.challenger}: {verdict.summary}")
        if verdict is self._own_verdict and read_verdict(self.folder) != verdict:
            write_json(self.folder / VERDICT_FILE, dump_record(verdict))

    def _archive(self, named: RegistrySnapshot) -> None:
        """Clean up after a canary that is over; a verdict that was written during this step is for
        the next step."""
        verdict = read_verdict(self.folder)
        if verdict and verdict.challenger != named.aliases.get("challenger"):
            archive_verdict(self.folder)
            self._reported.clear()
        if "challenger" not in named.aliases and self.routes.challenger is None:
            (self.folder / STATE_FILE).unlink(missing_ok=True)

    def _report(self, named: RegistrySnapshot) -> None:
        wanted, serving = named.aliases.get("champion"), self.routes.champion
        if wanted is None:
            hint = f"run `qinglan run pipeline --profile {self.profile.name}`, or `qinglan release promote VERSION`"
            self._once(f"no champion yet, so every answer is the question itself: {hint}")
        elif serving and serving.version != wanted and self.fleet.failures_of(wanted).failures:
            self._once(f"version {serving.version} goes on serving until version {wanted} answers")

    def _once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self.say(text)


def serve_site(
    profile_name: str, overrides: Sequence[str], say: Say, port: int | None = None
) -> None:
    """Serve until Ctrl-C or SIGTERM; raises `ConfigError` where another site serves this tenant
    from this folder."""
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
        announced = False
        while True:
            site.step()
            if not announced and site.routes.champion and site.router.url:
                announced = True
                site.say(_announcement(profile, site.router.url))
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
        command_of: starts a model's server; ms-swift's if not given.
    """
    # A tracking server that is away must not hold a rollback up for minutes.
    say = partial(_say_if_possible, say)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    folder.mkdir(parents=True, exist_ok=True)
    for read in (
        read_state,
        read_verdict,
    ):  # a newer Qinglan's are refused here, not in the midst of serving
        read(folder)
    (folder / ROUTES_FILE).unlink(missing_ok=True)  # of servers that have ended
    name = f"serve_{profile.tenant.file_name}.{profile.recipe_name}"
    logs = profile.paths.state.resolve() / "logs" / name if watched else folder / "logs"
    with ExitStack() as stack:
        served = stack.enter_context(_with_addresses(profile)) if watched else profile
        processes = stack.enter_context(Processes(logs, say, end_first=(ROUTER,)))
        router = RouterProcess(
            processes, router_command(served, folder, port, watched=watched), say
        )
        command_of = command_of or partial(serve_command, profile)
        drain_s = profile.serve.deadline_ms / 1000 + _DRAIN_MARGIN_S
        probe, places = chat_probe(_warm_up(profile)), places_of(profile, os.environ)
        fleet = Fleet(processes, command_of, probe, places, say, drain_s)
        stack.callback(fleet.pool.shutdown, wait=False, cancel_futures=True)
        registry = registry or registry_of(profile)
        watcher = RegistryWatcher(
            registry, profile.serve.poll_every_s, say, with_challenger=watched
        )
        stack.callback(watcher.stop)
        threading.Thread(target=watcher.run, name="registry", daemon=True).start()
        router.start()
        yield ServingSite(profile, folder, fleet, watcher, router, say)


@contextmanager
def _with_addresses(profile: Profile) -> Iterator[Profile]:
    """The profile with the addresses of simulators in place of `embedded`, as far as the router
    asks them."""
    knowledge_base = embedded_knowledge_base(profile)
    with ExitStack() as stack:
        rag_url = stack.enter_context(rag_service(profile, knowledge_base)) or EMBEDDED
        asked: dict[str, Any] = {"rag": profile.rag.model_copy(update={"url": rag_url})}
        if profile.serve.try_page == "with_teacher":
            urls = stack.enter_context(embedded_services(profile, None))()
            asked["teacher"] = profile.teacher.model_copy(update={"base_url": urls.teacher_url})
            if profile.answerer:
                asked["answerer"] = profile.answerer.model_copy(
                    update={"base_url": urls.answerer_url}
                )
        yield profile.model_copy(update=asked)


def router_command(profile: Profile, folder: Path, port: int | None, *, watched: bool) -> Command:
    """The router's, with the keys of its clients, of the RAG, and of what its page asks."""
    # With the profile as it is now, overrides included: a router that is started again must not
    # read another one.
    path = folder / "profile.yaml"
    path.write_text(
        yaml.safe_dump(profile.model_dump(mode="json"), allow_unicode=True), encoding="utf-8"
    )
    further = [f"--port={port}"] * (port is not None) + [f"--watch={folder}"] * watched
    argv = [
        sys.executable,
        "-m",
        "qinglan.serving.router",
        f"--profile={path}",
        f"--routes={folder / ROUTES_FILE}",
    ]
    asked = (
        profile.rag,
        *([profile.teacher, profile.answerer] if profile.serve.try_page == "with_teacher" else ()),
    )
    keys = [each.api_key_env for each in asked if each] + [
        each.key_env for each in profile.serve.clients.values()
    ]
    return Command([*argv, *further], withheld_secrets(profile, profile.ledger.url_env, *keys))


def _warm_up(profile: Profile) -> list[dict[str, str]]:
    recipe = get_recipe(profile.recipe)
    inputs = placeholders(recipe.INPUTS, WARM_UP_QUESTION)
    row = Row(
        id="", tenant=profile.tenant.id, query=WARM_UP_QUESTION, inputs=inputs, source="serve"
    )
    return recipe.student_messages(row, profile.tenant)


def _announcement(profile: Profile, url: str) -> str:
    keys = (
        f" -H 'Authorization: Bearer '\"${key.key_env}\"" for key in profile.serve.clients.values()
    )
    asked: dict[str, Any] = {
        "model": profile.model_name,
        "messages": [{"role": "user", "content": WARM_UP_QUESTION}],
    }
    if inputs := placeholders(get_recipe(profile.recipe).INPUTS, "…"):
        asked["inputs"] = inputs
    command = f"curl {url}/v1/chat/completions{next(keys, '')} -d '{json.dumps(asked, ensure_ascii=False)}'"
    page = "" if profile.serve.try_page == "none" else f"Try it   {url}/\n"
    return f"\nRouter   {url}/v1\n{page}\n{command}\n\nCtrl-C stops all of it."


def _say_if_possible(say: Say, text: str) -> None:
    # A terminal that was closed, or a log on a full disk: the service depends on neither.
    with suppress(Exception, SystemExit):  # rich ends the program when its reader has gone
        say(text)
