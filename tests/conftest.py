"""Fixtures that tests share: profiles, services and a tiny model."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_ray import FakeRay
from fake_service import PRICE, FakeService, Script

from qinglan.clients import rag as retrieval
from qinglan.config import Profile
from qinglan.runs.back_off import BackOff
from qinglan.runs.processes import free_port

# A shell has SIGINT ignored in background jobs, processes inherit that, and Prefect's make a SIGINT
# of a SIGTERM: with `make test &`, tests would wait for ever for what they have asked to end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, and of these the ones that train."""
    items.sort(key=lambda item: item.path, reverse=True)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log without lines of Prefect's threads about events that earlier tests left."""
    thread_loggers = ("prefect._internal", "EventsWorker", "APILogWorker")
    caplog.handler.addFilter(lambda record: not record.name.startswith(thread_loggers))
    return caplog


@pytest.fixture
def serve() -> Iterator[Callable[[Script], FakeService]]:
    """Start services that end with the test."""
    with ExitStack() as services:
        yield lambda script: services.enter_context(closing(FakeService(script)))


@pytest.fixture
def profile_of(tmp_path: Path) -> Callable[..., Profile]:
    """Profiles that keep everything below the test's own folder."""

    def make(**sections: Any) -> Profile:
        values = {
            "name": "test",
            "teacher": {"model": "big"},
            "judge": {"model": "small"},
            "prices": {"big": PRICE, "small": PRICE},
            "paths": {"runs": str(tmp_path / "runs"), "state": str(tmp_path / "state")},
        }
        return Profile.model_validate(values | sections)

    return make


@pytest.fixture
def profile(profile_of: Callable[..., Profile]) -> Profile:
    return profile_of()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny model, which no test may change."""
    from toy_rl import make_model

    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a module's database for MLflow, shared because its tables take seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture(scope="module")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Prefect server for flows that run in this process."""
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect_process import prefect_process

    from qinglan.ops.up.site import Site
    from qinglan.tasks.session import send_what_is_queued

    folder = tmp_path_factory.mktemp("prefect")
    site = Site(folder, "", prefect_port=free_port())
    site.prepare()
    with (
        prefect_process(site, folder / "logs"),
        temporary_settings({PREFECT_API_URL: site.api_url}),
    ):
        yield
        # Without a server, what is still queued would fail in the log of some later test.
        send_what_is_queued()


@pytest.fixture
def qinglan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process, with this profile: status, stdout, stderr."""

    def call(*words: str, profile: Profile | None = None) -> tuple[int, str, str]:
        from qinglan import cli

        argv = ["qinglan", *words]
        if profile:
            path = tmp_path / f"{profile.name}.yaml"
            path.write_text(yaml.safe_dump(profile.model_dump(mode="json")))
            argv += ["--profile", str(path)]
        monkeypatch.setattr("sys.argv", argv)
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        return int(exit_info.value.code or 0), *capsys.readouterr()

    return call


@pytest.fixture
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away the user's own proxies and Prefect server."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    for name in (
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "no_proxy",
        "prefect_api_url",
        "prefect_profile",
    ):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(autouse=True)
def no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without waiting, unless a service asks for it."""
    monkeypatch.setattr(retrieval, "_BACK_OFF", BackOff(0.0, 0.0))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    """A cluster's dashboard, asked without pauses."""
    for name, value in {
        "POLL_S": 0.01,
        "_BACK_OFF": BackOff(0.01, 30.0),
        "FORWARD_EVERY_S": 0.0,
    }.items():
        monkeypatch.setattr(f"qinglan.training.engines.ray_jobs.{name}", value)
    fake = FakeRay()
    yield fake
    fake.close()
