"""What can be known before money or time is spent: files, secrets, services, devices, packages.

`inspect_profile` gives every check's outcome for `qinglan doctor`; `require` raises the first problem before a run.
"""

import difflib
import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import httpx

from qinglan.capabilities import capability_of
from qinglan.clients import ChatRole, endpoint_of
from qinglan.config import EMBEDDED, Compare, Data, Endpoint, Profile, require_secret, uses_proxy
from qinglan.contract import probe_rag
from qinglan.distillation import require_teacher_alone
from qinglan.embedded.retriever import load_documents
from qinglan.embedded.worlds import speaking_world, world_for
from qinglan.engines.ray_jobs import RayJobs
from qinglan.errors import ConfigError, QinglanError, WorkbookError
from qinglan.grading import grading_of
from qinglan.ledger import ledger_url, open_ledger
from qinglan.recipes import Recipe, get_recipe
from qinglan.redteam import cases_of
from qinglan.sources.database import check_database
from qinglan.sources.files import list_files
from qinglan.tally import Tally
from qinglan.workbook import read_rows

FlowName = Literal["pipeline", "refresh", "train", "evaluate", "release", "compare"]
_CHECKED_ROWS = 1000
_PROBED_ROWS = 200
_TIMEOUT_S = 10.0
_SQLITE = "sqlite:///"
_TRAINER_PACKAGES = ("torch", "swift", "verl", "ray")
_FIND_PACKAGES = """
import importlib.util, sys
print("missing:", *(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
"""
_RUN_WITHIN_S = 60.0
_SHOWN_MODELS = 8

Look = Callable[[], str | None]
"""One look, which raises a problem or returns a note."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `problem` is None where it is fine, or can't be told: `note` then says more."""

    name: str
    detail: str
    problem: str | None = None
    note: str | None = None


def inspect_profile(profile: Profile, flow: FlowName = "pipeline") -> Iterator[Check]:
    """Check after check, so that a slow one does not hide the others."""
    data, trains = flow in ("pipeline", "refresh", "compare"), flow in ("pipeline", "train")
    yield (known := _check("recipe", profile.recipe, lambda: _recipe(profile)))
    if known.problem:  # all that follows goes by it
        return
    graders = get_recipe(profile.recipe).graders
    if data:
        yield _check("workbook", _where(profile.data), lambda: _workbook(profile))
    yield from _chats(profile, flow, data=data)
    if trains and (local := profile.judge.local):
        yield _check("local judge", local.model, lambda: _local_judge(profile))
    if flow == "compare":
        yield from _rivals(profile.compare, get_recipe(profile.recipe))
    if flow in ("pipeline", "train", "evaluate"):
        yield from _teachers(profile.compare, profile.evaluate.teachers)
        yield _check("red team", profile.evaluate.red_team or "built-in cases", lambda: _red_team(profile))
        yield _check("champion", profile.model_name, lambda: _champion(profile))
    if flow != "release" and "rag" in graders:  # release only looks at what was evaluated
        yield _rag(profile)
    yield _check("ledger", _where_ledger(profile), lambda: _ledger(profile, trains=trains))
    if trains:
        yield _check("base model", profile.student.base_model, lambda: _base_model(profile))
    if trains and (critic := profile.rl.critic_model):
        yield _check("critic model", critic, lambda: _model("rl.critic_model", critic))
    if flow not in ("refresh", "release", "compare"):
        yield _check("device", profile.trainer.device, lambda: _device(profile))
        if profile.trainer.ray_dashboard_url:
            yield _check("ray", profile.trainer.ray_dashboard_url, lambda: _cluster(profile))
        else:
            yield _check("trainer packages", profile.trainer.python or "this environment", lambda: _packages(profile))


def require(profile: Profile, flow: FlowName) -> None:
    """Raise the first problem.

    Raises:
        ConfigError: with what to do about it.
    """
    for check in inspect_profile(profile, flow):
        if check.problem:
            raise ConfigError(check.problem)


def _check(name: str, detail: str, look: Look) -> Check:
    try:
        return Check(name, detail, note=look())
    except QinglanError as error:
        return Check(name, detail, str(error))


def _recipe(profile: Profile) -> None:
    recipe = get_recipe(profile.recipe)
    known = {each.name for each in recipe.INPUTS}
    if unknown := [name for name in profile.data.columns.inputs if name not in known]:
        raise ConfigError(
            f"data.columns.inputs: recipe `{recipe.NAME}` has no input `{unknown[0]}`; "
            f"it has {', '.join(sorted(known)) or 'none'}"
        )
    grading_of(recipe).check(profile)
    require_teacher_alone(profile)
    if profile.evaluate.teachers:
        _let_teachers_answer(recipe, "evaluate.teachers")


def _let_teachers_answer(recipe: Recipe, setting: str) -> None:
    if recipe.brings_answers:
        raise ConfigError(
            f"{setting}: recipe `{recipe.NAME}` takes the answers that its rows bring, so teachers would be compared "
            "on answers that none of them gave"
        )


def _chats(profile: Profile, flow: FlowName, *, data: bool) -> Iterator[Check]:
    recipe = get_recipe(profile.recipe)
    judges = flow != "release" and (flow not in ("refresh", "compare") or profile.validation.judge_baseline)
    asked = set(recipe.DISTILL_ROLES) if data else set()
    asked |= {"judge"} if judges and "judge" in recipe.graders else set()
    for role in (role for role in get_args(ChatRole) if role in asked):
        try:
            endpoint = endpoint_of(profile, role)
        except ConfigError as error:
            yield Check(role, "none", str(error))
            continue
        yield _check(role, f"{endpoint.model} at {endpoint.base_url}", _chat_checker(role, endpoint))


def _where(data: Data) -> str:
    return f"the database that {data.sql.url_env} names" if data.sql else data.workbook


def _workbook(profile: Profile) -> str | None:
    """Header and first rows: the run itself reads the rest, before anything is spent."""
    data, path, inputs = profile.data, Path(profile.data.workbook), get_recipe(profile.recipe).INPUTS
    if data.sql:
        check_database(data, inputs)
        return None
    if data.workbook == EMBEDDED:
        world_for(profile, "data.workbook")
        return None
    tally = Tally()
    for _ in tally.pass_through(read_rows(path, data, profile.tenant, inputs=inputs)):
        if tally.total >= _CHECKED_ROWS and tally.ok:
            break
    if not tally.ok:
        raise WorkbookError(f"{data.workbook}: no row can be used; reasons: {', '.join(sorted(tally.reasons))}")
    skipped = [file.name for file in list_files(path).skipped]
    return f"skipped, by their suffix: {', '.join(skipped)}" if skipped else None


def _chat_checker(role: str, endpoint: Endpoint) -> Look:
    def look() -> str | None:
        if endpoint.reasoning_effort and capability_of(endpoint.model).reasoning_effort is False:
            raise ConfigError(f"{role}.reasoning_effort: {endpoint.model} takes none and would refuse; remove it")
        if endpoint.base_url == EMBEDDED:
            _stand_in(role, endpoint.model)
            return None
        key = require_secret(endpoint.api_key_env, f"{role} {endpoint.model}")
        url = f"{endpoint.base_url.rstrip('/')}/models"  # free of charge, unlike a completion
        headers = {"authorization": f"Bearer {key}"}
        response = _reach(role, "base_url", endpoint.base_url, lambda http: http.get(url, headers=headers))
        if response.status_code in (401, 403):
            variable = endpoint.api_key_env or f"{role}.api_key_env (not set)"
            raise ConfigError(
                f"{role} {endpoint.base_url}: refuses the key (HTTP {response.status_code}); check {variable}"
            )
        if response.status_code >= 500:
            raise ConfigError(f"{role} {endpoint.base_url}: answers HTTP {response.status_code}; is the service up?")
        if response.status_code != 200:
            return f"the model is not checked: GET /models answers HTTP {response.status_code}"
        return _model_note(endpoint.model, response.content)

    return look


def _stand_in(role: str, model: str) -> None:
    try:
        speaking_world(model)
    except ConfigError as error:
        raise ConfigError(f"{role}.model: {error}") from error


def _rivals(compare: Compare, recipe: Recipe) -> Iterator[Check]:
    def look() -> None:
        _let_teachers_answer(recipe, "compare")
        if not compare.teachers:
            raise ConfigError(
                "compare.teachers: names no teacher to compare with; add one: {name: {base_url: …, model: …}}"
            )

    yield _check("compare", ", ".join(compare.teachers) or "no teacher", look)
    yield from _teachers(compare, compare.teachers)


def _teachers(compare: Compare, names: Iterable[str]) -> Iterator[Check]:
    for name in names:
        role, endpoint = f"compare.teachers.{name}", compare.teachers[name]
        yield _check(role, f"{endpoint.model} at {endpoint.base_url}", _chat_checker(role, endpoint))


def _model_note(model: str, content: bytes) -> str | None:
    """Only a note: aliases and deployments are served by some under names that they don't list."""
    try:
        listed = [str(entry["id"]) for entry in json.loads(content)["data"]]
    except (ValueError, TypeError, KeyError):
        listed = []
    if not listed:
        return "the model is not checked: the service lists none"
    if model in listed:
        return None
    near = difflib.get_close_matches(model, listed, n=_SHOWN_MODELS, cutoff=0.4) or listed[:_SHOWN_MODELS]
    return f"the service does not list this model; it has {', '.join(near)}{', …' if len(near) < len(listed) else ''}"


def _red_team(profile: Profile) -> None:
    cases_of(profile)


def _champion(profile: Profile) -> str | None:
    """It is evaluated too, after hours of training: are its weights there?"""
    uri = profile.tracking_uri
    if uri.startswith(_SQLITE) and not Path(uri.removeprefix(_SQLITE)).is_file():
        return None  # MLflow would make the database
    if uri.startswith("http"):
        _reach("tracking", "uri", uri, lambda http: http.get(f"{uri.rstrip('/')}/health"))  # MLflow retries for minutes
    from qinglan.registry import registry_of  # it needs MLflow, a second

    registry_of(profile).look_at_champion()
    return None


def _local_judge(profile: Profile) -> str | None:
    from qinglan.local_judge import appointed  # it needs MLflow, a second

    judge = appointed(profile)
    return f"version {judge.released.version}" if judge else None


def _rag(profile: Profile) -> Check:
    rag = profile.rag
    if rag.url == EMBEDDED:
        return _check("rag", rag.url, lambda: _knowledge_base(profile))
    try:
        about_rewrite, *others = findings = probe_rag(rag, profile.tenant.id, _questions(profile))
    except QinglanError as error:
        return Check("rag", rag.url, str(error))
    problems = [finding.text for finding in findings if finding.is_problem]
    if problems:
        return Check("rag", rag.url, f"rag {rag.url}: {'; '.join(problems)}")
    if about_rewrite.kind != "honoured":
        return Check("rag", rag.url, note="; ".join(finding.text for finding in findings))
    notes = "; ".join(finding.text for finding in others)
    return Check("rag", f"{rag.url} ({about_rewrite.text})", note=notes or None)


def _knowledge_base(profile: Profile) -> None:
    rag = profile.rag
    if rag.knowledge_base == EMBEDDED:
        world_for(profile, "rag.knowledge_base")
        return
    if not Path(rag.knowledge_base).is_file():
        raise ConfigError(f"rag.knowledge_base: {rag.knowledge_base}: no such file; give a JSONL file")
    load_documents(Path(rag.knowledge_base))


def _questions(profile: Profile) -> list[str]:
    """Questions to probe the RAG with; none where the workbook is a stand-in or unreadable, which its check says."""
    data = profile.data
    if data.workbook == EMBEDDED or data.sql is not None:
        return []
    try:
        few, inputs = data.model_copy(update={"limit": _PROBED_ROWS}), get_recipe(profile.recipe).INPUTS
        rows = read_rows(Path(data.workbook), few, profile.tenant, inputs=inputs)
        return [row.query for row in rows if row.status == "ok"]
    except WorkbookError:
        return []


def _reach(role: str, key: str, url: str, send: Callable[[httpx.Client], httpx.Response]) -> httpx.Response:
    try:
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=uses_proxy(url)) as http:
            return send(http)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"{role}.{key} can't be reached: {str(error) or type(error).__name__}; is it up, is the address right?"
        ) from error


def _where_ledger(profile: Profile) -> str:
    name = profile.ledger.url_env
    return f"the database that {name} names" if name else str(profile.paths.state / "ledger.db")


def _ledger(profile: Profile, *, trains: bool) -> None:
    cluster = profile.trainer.ray_dashboard_url
    if trains and cluster and uses_proxy(cluster) and profile.ledger.url_env is None:
        raise ConfigError(
            f"ledger.url_env: is not given, and the nodes of {cluster} can't share a SQLite file with this machine; "
            "name the variable that holds a PostgreSQL database's address"
        )
    try:
        with open_ledger(ledger_url(profile.ledger, profile.paths.state)):
            return
    except OSError as error:
        raise ConfigError(f"paths.state: {error}; the ledger is kept there") from error


def _base_model(profile: Profile) -> None:
    if profile.student.base_model == EMBEDDED:
        world_for(profile, "student.base_model")
    else:
        _model("student.base_model", profile.student.base_model)


def _model(key: str, name: str) -> None:
    """A hub id has one slash at most, so what has more is a path."""
    folder = Path(name)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or folder.is_dir()
    if looks_local and not (folder / "config.json").is_file():
        raise ConfigError(f"{key}: {name} is no model folder (no config.json in it)")


def _device(profile: Profile) -> None:
    if profile.trainer.device == "cuda" and profile.trainer.ray_dashboard_url is None:
        _gpus(profile.trainer.gpus_per_node)
    if profile.trainer.device == "cpu" and profile.rl.rollout_engine != "cpu":
        raise ConfigError("rl.rollout_engine: vllm needs trainer.device: cuda; on the CPU set it to cpu")


def _gpus(wanted: int) -> None:
    if shutil.which("nvidia-smi") is None:
        raise ConfigError(
            "trainer.device: the profile asks for GPUs and this machine has none (no nvidia-smi); "
            "run it on a GPU machine, or try the road with --profile embedded"
        )
    listed = _output_of(["nvidia-smi", "-L"], "nvidia-smi")
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    if count < wanted:
        raise ConfigError(
            f"trainer.gpus_per_node: the profile asks for {wanted} and this machine has {count} (nvidia-smi -L)"
        )


def _cluster(profile: Profile) -> str | None:
    trainer = profile.trainer
    with RayJobs(trainer) as jobs:
        jobs.ray_version()
        gpus = jobs.gpus_of_nodes()
    if uses_proxy(jobs.url) and EMBEDDED in (profile.rag.url, profile.judge.base_url):
        raise ConfigError(
            "trainer.ray_dashboard_url: the stand-ins for RAG and judge answer on this machine only, which the "
            "cluster's nodes can't reach; give rag.url and judge.base_url, or train here"
        )
    if trainer.device == "cpu":
        return None
    if gpus is None:
        return "its GPUs are not counted: the dashboard does not list the nodes"
    fitting = [count for count in gpus if count >= trainer.gpus_per_node]
    if len(fitting) < trainer.nodes:
        raise ConfigError(
            f"trainer.nodes: the profile asks for {trainer.nodes} × {trainer.gpus_per_node} GPUs (gpus_per_node) and "
            f"the nodes of {jobs.url} have {', '.join(map(str, gpus)) or 'none'}"
        )
    return None


def _packages(profile: Profile) -> None:
    python, needed = profile.trainer.python, list(_TRAINER_PACKAGES)
    if profile.trainer.device == "cuda":
        needed.append("vllm")
    if python is None:
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(f"the trainer's packages are not installed ({', '.join(missing)}); run `make setup`")
        return
    if shutil.which(python) is None:
        raise ConfigError(f"trainer.python: {python}: no such interpreter")
    found = _output_of([python, "-c", _FIND_PACKAGES, *needed], f"trainer.python: {python}")
    missing = found.rpartition("missing:")[2].split()
    if missing:
        raise ConfigError(f"trainer.python: {python} lacks {', '.join(missing)}; see docker/trainer.Dockerfile")


def _output_of(argv: list[str], what: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_RUN_WITHIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{what}: can't be run: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [""]
        raise ConfigError(f"{what}: exits with {done.returncode}: {said[-1]}")
    return done.stdout
