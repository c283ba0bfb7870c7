"""The site without processes: what is started, routed, kept and ended, and what it says."""

import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doubles import Clock, raising
from fake_registry import FakeRegistry
from fixture_types import ProfileOf
from waiting import wait_until

from qinglan.config import Profile, load_profile
from qinglan.errors import EngineError
from qinglan.runs.launcher import Command
from qinglan.runs.processes import Processes
from qinglan.runs.schema_version import read_record
from qinglan.serving.canary import Judgement
from qinglan.serving.canary_observer import VERDICT_FILE, CanaryVerdict, read_verdict
from qinglan.serving.fleet import Fleet
from qinglan.serving.registry_watcher import RegistryWatcher
from qinglan.serving.router_launch import router_command
from qinglan.serving.routes import ROUTES_FILE, Backend, Routes
from qinglan.serving.server_process import (
    CPU_BATCH,
    PROBES_MISSED,
    PortTakenError,
    RouterProcess,
    ServerProcess,
    chat_probe,
    places_of,
    serve_command,
)
from qinglan.serving.site import HISTORY_FILE, CanaryShare, ServingSite


class FakeProcess:
    def __init__(self, name: str) -> None:
        self.name = name
        self.exit_status: int | None = None

    def ask_to_end(self) -> None:
        self.exit_status = 0

    def status(self) -> int | None:
        return self.exit_status

    def failure(self) -> EngineError:
        return EngineError(f"{self.name} ended with status {self.exit_status}", "no memory")

    def address(self, within_s: float) -> str:
        return "http://127.0.0.1:81"


class FakeProcesses:
    def __init__(self) -> None:
        self.running: dict[str, FakeProcess] = {}
        self.started: list[str] = []
        self.limited = 0
        self.commands: dict[str, Command] = {}

    def start(
        self, name: str, command: Command, *, announces: bool = False, append_log: bool = False
    ) -> None:
        self.running[name] = FakeProcess(name)
        self.commands[name] = command
        self.started.append(name)

    def stop(self, *names: str) -> None:
        for name in names:
            del self.running[name]

    def limit_logs(self) -> None:
        self.limited += 1

    def __getitem__(self, name: str) -> FakeProcess:
        return self.running[name]


class Bench:
    """A site whose servers answer as `sick` says."""

    def __init__(
        self, profile: Profile, folder: Path, places: list[list[str]] | None = None, **aliases: str
    ) -> None:
        self.said: list[str] = []
        self.sick: dict[str, str | Exception] = {}
        self.clock = Clock()
        self.folder = folder
        self.processes = FakeProcesses()
        self.registry = FakeRegistry(folder / "weights", **aliases)

        def command_of(folder: Path, _backend: Backend, _port: int, gpus: list[str]) -> Command:
            return Command([str(folder)], {"GPUS": ",".join(gpus)})

        self.fleet = Fleet(
            self.processes,
            command_of,
            self._probe,
            places,
            self.said.append,
            drain_s=3.0,
            clock=self.clock,
        )
        self.watcher = RegistryWatcher(self.registry, 1.0, self.said.append)  # type: ignore[arg-type]
        router: Any = SimpleNamespace(url="http://127.0.0.1:1", step=lambda: None)
        self.site = ServingSite(profile, folder, self.fleet, self.watcher, router, self.said.append)

    def _probe(self, backend: Backend) -> str | None:
        problem = self.sick.get(backend.version)
        return raising(problem)() if isinstance(problem, Exception) else problem

    def end(self, version: str, status: int = 137) -> None:
        self.processes[f"model_{version}"].exit_status = status

    def run(self, seconds: float = 2.0) -> Routes:
        """Let the time pass in steps of half a second.

        In each, all that works in the background is done.
        """
        for _ in range(int(seconds * 2)):
            self.clock.now += 0.5
            self.watcher.poll()
            for check in list(self.watcher._checks.values()):
                check.exception(timeout=5)
            self.watcher.poll()
            self.site.step()
            _settle(server.process for server in self.fleet._servers.values())
        return self.site.routes

    def heard(self, text: str) -> int:
        return sum(text in line for line in self.said)


def _settle(servers: Iterable[ServerProcess]) -> None:
    for server in servers:
        if server._probing:
            server._probing.exception(timeout=5)


@pytest.fixture
def bench(profile_of: ProfileOf, tmp_path: Path) -> Any:
    benches: list[Bench] = []

    def make(
        places: list[list[str]] | None = None, serve: dict[str, Any] | None = None, **aliases: str
    ) -> Bench:
        bench = Bench(profile_of(serve=serve or {}), tmp_path, places, **aliases)
        benches.append(bench)
        return bench

    yield make
    for bench in benches:
        bench.fleet.pool.shutdown(wait=False, cancel_futures=True)
        bench.watcher.stop()


def test_without_a_champion_it_says_once_what_to_run_and_keeps_its_logs_small(bench):
    site = bench()
    assert site.run(5) == Routes()
    assert site.processes.limited == 10
    command = "run `qinglan run pipeline --profile test`"
    assert site.heard(f"no champion yet, so every answer is the question itself: {command}") == 1


def test_the_champion_is_routed_only_once_it_has_answered_and_before_the_challenger(bench):
    site = bench(champion="1", challenger="2")
    site.sick["1"] = "ConnectError: refused"
    assert site.run(4) == Routes()
    del site.registry.named["challenger"]
    del site.sick["1"]
    routes = site.run()
    assert routes.champion
    assert routes.champion.version == "1"
    assert Routes.read(site.folder / ROUTES_FILE) == routes
    assert site.heard("version 1: ready after") == 1


def test_a_new_champion_comes_up_before_the_old_one_goes(bench):
    site = bench(champion="1", serve={"keep_previous_warm": False})
    site.run()
    site.registry.named["champion"] = "2"
    site.sick["2"] = "loading"
    assert site.run().champion.version == "1"
    del site.sick["2"]
    assert site.run(2).champion.version == "2"
    assert site.processes["model_1"].exit_status is None, "it drains"
    site.run(5)
    assert list(site.processes.running) == ["model_2"]


def test_the_previous_one_stays_warm_and_takes_over_at_once(bench):
    site = bench(champion="2", previous="1")
    site.run(4)
    assert site.processes.started == ["model_2", "model_1"], "the champion first, alone"
    site.registry.named = {"champion": "1", "previous": "2"}
    assert site.run(0.5).champion.version == "1"
    assert site.processes.started == ["model_2", "model_1"]


def test_a_challenger_gets_its_share_once_it_answers(bench):
    site = bench(champion="1", challenger="2", serve={"canary": {"share": 0.3}})
    routes = site.run(4)
    assert (routes.champion.version, routes.challenger.version, routes.share) == ("1", "2", 0.3)
    # A share by hand is for its version alone.
    for version, share in (("3", 0.3), ("2", 0.5)):
        CanaryShare(version=version, share=0.5).write(site.folder)
        assert site.run(0.5).share == share


def test_a_champion_that_can_t_start_leaves_the_former_one_serving(bench):
    site = bench(champion="1")
    site.run()
    site.registry.named = {"champion": "2", "previous": "1"}
    site.sick["2"] = "loading"
    site.run(0.5)
    site.end("2", 1)
    assert site.run(1).champion.version == "1"
    assert site.heard("version 2: model_2 ended with status 1") == 1
    assert site.heard("no memory") == 1
    assert site.heard("version 1 goes on serving until version 2 answers") == 1


def test_a_server_that_dies_is_started_again_ever_more_slowly(bench):
    site = bench(champion="1")
    site.run()
    for wait in (1, 2, 4):
        site.end("1")
        assert site.run(0.5).champion is None, "the router answers with the question itself"
        assert site.heard(f"next try in {wait} s") == 1
        assert site.run(wait + 1).champion


@pytest.mark.parametrize(
    ("problem", "after_s", "message"),
    [
        ("ReadTimeout: ", 8 * PROBES_MISSED, "version 1: model_1 no longer answers: ReadTimeout: "),
        (PortTakenError("another server is at http://127.0.0.1:1/v1"), 6, "another server is at"),
    ],
)
def test_a_server_that_no_longer_answers_is_started_again(
    bench, problem: Any, after_s: int, message: str
):
    site = bench(champion="1")
    site.run()
    site.sick["1"] = problem
    site.run(after_s)
    assert site.heard(message) == 1
    del site.sick["1"]
    site.run(5)
    assert site.site.routes.champion
    assert site.processes.started == ["model_1"] * 2


JUDGEMENT = Judgement(outcome="roll_back", reason="it fails")
VERDICT = CanaryVerdict(challenger="2", champion="1", judgement=JUDGEMENT, at=1.0, requests=30)


def test_a_verdict_withdraws_the_challenger_once_the_registry_can_be_reached_and_is_put_away(bench):
    site = bench(champion="1", challenger="2")
    site.run(4)
    (site.folder / VERDICT_FILE).write_text(VERDICT.model_dump_json())
    site.registry.problem = OSError("database is locked")
    routes = site.run(5)
    assert routes.champion.version == "1"
    assert routes.challenger is None
    assert read_verdict(site.folder) == VERDICT
    assert not site.registry.withdrawn
    problem = "registry: can't be read, the models in service stay (OSError: database is locked)"
    assert site.heard(problem) == 1
    site.registry.problem = None
    site.run(8)
    assert site.heard("registry: can be read again") == 1
    assert site.registry.withdrawn == ["canary roll_back: it fails"]
    assert list(site.processes.running) == ["model_1"]
    assert read_verdict(site.folder) is None
    assert read_record(CanaryVerdict, site.folder / HISTORY_FILE) == VERDICT
    assert site.heard("canary of version 2: roll_back: it fails") == 1


def test_a_verdict_that_falls_in_the_midst_of_a_step_is_acted_upon(
    bench, monkeypatch: pytest.MonkeyPatch
):
    site = bench(champion="1", challenger="2")
    site.run(4)
    file = site.folder / VERDICT_FILE
    with monkeypatch.context() as during:
        during.setattr(site.fleet, "step", lambda *_: file.write_text(VERDICT.model_dump_json()))
        site.run(0.5)
    assert not (site.folder / HISTORY_FILE).exists()
    site.run(4)
    assert site.registry.withdrawn == ["canary roll_back: it fails"]
    assert read_record(CanaryVerdict, site.folder / HISTORY_FILE) == VERDICT


def test_a_challenger_whose_server_dies_again_and_again_is_withdrawn(bench):
    site = bench(champion="1", challenger="2")
    for wait in (3, 3, 4):
        site.run(wait)
        assert site.site.routes.challenger
        site.end("2")
    site.run(3)
    assert len(site.registry.withdrawn) == 1
    assert "its server failed 3 times; model_2 ended with status 137" in site.registry.withdrawn[0]
    assert site.site.routes.champion
    assert site.processes.started.count("model_2") == 3


def test_a_part_that_fails_is_said_once_and_stops_nothing_else_for_good(
    bench, monkeypatch: pytest.MonkeyPatch
):
    site = bench(champion="1", previous="2")
    site.site.router.step = raising(ValueError("a mistake"))
    assert site.run(4).champion.version == "1"
    # It is a problem of our own, so no missed probe.
    site.sick["1"] = OSError("too many open files")
    site.run(30)
    site.sick.clear()
    monkeypatch.setattr(Routes, "write", raising(OSError("no space left on device")))
    site.registry.named = {"champion": "2", "previous": "1"}
    assert site.run(2).champion.version == "1"
    for problem in ("ValueError('a mistake')", "too many open files", "no space left on device"):
        assert site.heard(f"not everything could be done: {problem}") == 1
    monkeypatch.undo()
    assert site.run(10).champion.version == "2"


def test_a_former_champion_is_started_again_while_the_new_one_can_t_come_up(bench):
    site = bench(champion="1", serve={"keep_previous_warm": False})
    site.run()
    site.registry.named = {"champion": "2", "previous": "1"}
    site.sick["2"] = "loading"
    site.run(1)
    site.end("1")
    assert site.run(0.5).champion is None
    assert site.run(4).champion.version == "1"
    assert site.fleet.ready("2") is None
    del site.sick["2"]
    assert site.run(2).champion.version == "2"


def test_what_was_rolled_back_does_not_step_in(bench):
    site = bench(champion="2", previous="1")
    site.run(4)
    site.registry.rolled_back["2"] = "1"
    site.registry.named = {"champion": "1", "previous": "2"}
    site.end("1")
    site.sick["1"] = "loading"
    site.run(1)
    site.end("2")
    assert site.run(5).champion is None


def test_one_version_that_is_gone_blocks_no_other(bench):
    site = bench(champion="1", previous="0")
    site.registry.deleted.add("0")
    assert site.run(3).champion.version == "1"
    assert site.heard("version 0: can't be served: there is no such version") == 1
    assert site.watcher.problem is None


def test_deaths_are_forgotten_after_a_minute_in_good_health(bench):
    site = bench(champion="1", challenger="2")
    site.run(3)
    site.end("2")
    site.run(30)
    assert site.fleet.failures_of("2").failures == 1
    site.sick["2"] = "ReadTimeout: "
    site.run(5)
    del site.sick["2"]
    site.run(50)
    assert site.fleet.failures_of("2").failures == 1
    site.run(25)
    assert site.fleet.failures_of("2").failures == 0


def test_without_canary_the_challenger_is_left_to_another_site(bench):
    site = bench(champion="1", challenger="2")
    site.watcher.with_challenger = False
    assert site.run(4).challenger is None
    assert site.processes.started == ["model_1"]


def test_a_withdrawal_is_for_one_version_once(bench):
    site = bench(champion="1", challenger="2")
    site.run(1)
    site.watcher.withdraw("2", "it fails", at=1.0)
    site.watcher.poll()
    # It is started anew.
    site.registry.named["challenger"] = "2"
    site.watcher.withdraw("2", "it fails", at=1.0)
    site.watcher.poll()
    assert site.registry.withdrawn == ["it fails"]


class RouterBench:
    """A router that has been started; `problem` is what its health check finds."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.processes = FakeProcesses()
        self.said: list[str] = []
        self.problem: str | None = None
        self.router = RouterProcess(
            self.processes,  # type: ignore[arg-type]
            Command(["--port=0"]),
            self.said.append,
            self.clock,
            lambda _: self.problem,
        )
        self.router.start()

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.now += 1
            self.router.step()
            _settle([self.router._server] if self.router._server else [])


@pytest.fixture
def router() -> Iterator[RouterBench]:
    bench = RouterBench()
    yield bench
    bench.router._pool.shutdown()


def test_a_router_that_hangs_is_started_again_on_its_port(router: RouterBench):
    router.run(10)
    router.problem = "ReadTimeout"
    router.run(20)
    assert router.said == ["router no longer answers: ReadTimeout\nrouter: starting it again"]
    assert router.processes.started == ["router"] * 2
    assert router.processes.commands["router"].argv[-2:] == ["--port=81", "--restarted"]


def test_a_router_that_can_t_be_started_is_tried_again(
    router: RouterBench, monkeypatch: pytest.MonkeyPatch
):
    router.run(10)
    router.processes["router"].exit_status = 137
    router.run(1)
    with monkeypatch.context() as full:
        full.setattr(router.processes, "start", raising(OSError("no space left")))
        for _ in range(3):
            with pytest.raises(OSError, match="no space left"):
                router.run(2)
    # The next one takes a minute to start.
    router.problem = "refused"
    router.run(60)
    assert router.processes.started == ["router"] * 2


def test_the_router_is_given_the_profile_as_it_is_and_its_own_keys(
    profile_of: ProfileOf, tmp_path: Path
):
    judge = {"model": "small", "base_url": "http://judge/v1", "api_key_env": "KEY_OF_JUDGE"}
    profile = profile_of(judge=judge, serve={"deadline_ms": 1234, "api_key_env": "KEY_OF_CLIENT"})
    command = router_command(profile, tmp_path, None, watched=False)
    assert load_profile(command.argv[3].removeprefix("--profile=")) == profile
    assert command.env["KEY_OF_JUDGE"] == ""
    assert "KEY_OF_CLIENT" not in command.env


def test_models_get_gpus_of_their_own_and_a_challenger_those_of_the_previous_one(bench):
    site = bench(places=[["0"], ["1"]], champion="2", previous="1")
    site.run(4)
    gpus = {name: command.env["GPUS"] for name, command in site.processes.commands.items()}
    assert gpus == {"model_2": "0", "model_1": "1"}
    site.registry.named["challenger"] = "3"
    site.run(5)
    assert sorted(site.processes.running) == ["model_2", "model_3"]
    assert site.site.routes.challenger


def test_no_free_gpu_is_said_and_the_champion_stays(bench):
    site = bench(places=[["0"]], champion="1")
    site.run()
    site.registry.named = {"champion": "2", "previous": "1"}
    assert site.run(5).champion.version == "1"
    assert site.heard("version 2: no GPU is free for it beside 1; raise serve.models_per_gpu") == 1


def test_a_probe_asks_for_the_name_and_a_real_answer(serve):
    models = (200, {"data": [{"id": "version-1"}]})
    answer = (200, {"choices": [{"message": {"content": "鱼油 用量"}}]})

    def server_with(answer: tuple[int, object]) -> Any:
        """A server of version 1, which answers a question so; the list of models has no body."""
        return serve(lambda body: answer if body else models)

    service = server_with(answer)
    probe = chat_probe([{"role": "user", "content": "q"}])
    assert probe(Backend(url=service.url, model="version-1", version="1")) is None
    assert service.bodies[-1]["model"] == "version-1"
    with pytest.raises(PortTakenError, match="another server is at"):
        probe(Backend(url=service.url, model="version-2", version="2"))
    broken = server_with((500, {}))
    problem = probe(Backend(url=broken.url, model="version-1", version="1"))
    assert problem
    assert "500" in problem


GPUS = {"device": "cuda", "gpus_per_node": 8}


def command_with_options(
    profile: Profile, folder: Path, gpus: tuple[str, ...] = ()
) -> tuple[Command, dict[str, str]]:
    """The command, and its options by name."""
    backend = Backend(url="http://127.0.0.1:8123/v1", model="version-7", version="7")
    command = serve_command(profile, folder, backend, 8123, gpus)
    words = command.argv[3:]
    options = zip(words[::2], words[1::2], strict=True)
    return command, {name.removeprefix("--"): value for name, value in options}


def test_on_the_cpu_the_model_is_served_as_it_was_trained(profile_of: ProfileOf, tmp_path: Path):
    judge = {"model": "small", "base_url": "http://judge/v1", "api_key_env": "KEY_OF_JUDGE"}
    profile = profile_of(student={"max_new_tokens": 24}, judge=judge)
    command, options = command_with_options(profile, tmp_path)
    assert command.argv[:3] == [sys.executable, "-m", "swift.cli.deploy"]
    assert Path(options.pop("model")).is_absolute()
    expected = {
        "infer_backend": "transformers",
        "device_map": "cpu",
        "max_batch_size": str(CPU_BATCH),
        "host": "127.0.0.1",
        "port": "8123",
        "served_model_name": "version-7",
        "template": "qwen3_nothinking",
        "max_new_tokens": "24",
    }
    assert expected.items() <= options.items()
    assert command.env["KEY_OF_JUDGE"] == ""


def test_on_gpus_vllm_takes_its_share_of_them(profile_of: ProfileOf, tmp_path: Path):
    serve = {"models_per_gpu": 2, "extra": {"vllm_max_model_len": 1024}}
    profile = profile_of(trainer=GPUS, rl={"tensor_model_parallel_size": 4}, serve=serve)
    command, options = command_with_options(profile, tmp_path, ("4", "5", "6", "7"))
    assert options["infer_backend"] == "vllm"
    assert options["vllm_tensor_parallel_size"] == "4"
    assert options["vllm_gpu_memory_utilization"] == "0.45"
    assert options["vllm_max_model_len"] == "1024"
    assert command.env["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert "device_map" not in options
    assert "max_batch_size" not in options


@pytest.mark.parametrize(
    ("per_gpu", "visible", "places"),
    [
        (1, {}, [["0", "1", "2", "3"], ["4", "5", "6", "7"]]),
        (2, {"CUDA_VISIBLE_DEVICES": "2,3,6,7"}, [["2", "3", "6", "7"]] * 2),
        (1, {"CUDA_VISIBLE_DEVICES": "2,3"}, []),
    ],
)
def test_models_get_groups_of_gpus(
    profile_of: ProfileOf, per_gpu: int, visible: dict[str, str], places: list[list[str]]
):
    profile = profile_of(
        trainer=GPUS, rl={"tensor_model_parallel_size": 4}, serve={"models_per_gpu": per_gpu}
    )
    assert places_of(profile, visible) == places
    assert places_of(profile_of(), visible) is None, "the CPU takes any number of models"


def test_the_log_that_a_crash_names_is_there_after_the_restart(tmp_path: Path) -> None:
    crash = Command([sys.executable, "-c", "raise SystemExit('no memory left')"])
    with Processes(tmp_path, lambda _: None) as processes, ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            server = ServerProcess(processes, "model_1", crash, lambda: "starting", pool, 60.0)
            wait_until("its end", lambda of=processes["model_1"]: of.status() is not None)
            assert f"full log: {processes.log('model_1')}" in (server.step() or "")
    assert processes.log("model_1").read_text().count("no memory left") == 2
