"""The whole profile, and how one is read."""

import difflib
import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import AfterValidator, ValidationError, model_validator

from qinglan.config import site
from qinglan.config.base import Section
from qinglan.config.data import Compare, Data, Dataset, Distill, Extract, Refresh, Select, Validate
from qinglan.config.rag import Rag
from qinglan.config.rehearsal import demo_of, rehearsal
from qinglan.config.release import Gate, Release, Serve, Targets
from qinglan.config.training import Evaluate, Reward, Rl, Sft, Student
from qinglan.errors import ConfigError
from qinglan.text import ARMS

_SECRET_NAME = re.compile(r'"[^"]*_env":"([^"]*)"')
"""In a profile as JSON."""
_CALLED_SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|AUTH_STRING)$", re.I)
CHANGEABLE: dict[str, set[str]] = {
    "budget": {"per_run_usd", "per_month_usd"},
    "reward": {"max_invalid_share", "max_outage_s"},
    "rl": {"keep_checkpoints"},
    "evaluate": {"retries"},
    "trainer": {"max_restarts", "dashboard_retry_s", "stalled_after_s"},
    "gate": set(Gate.model_fields),
    "targets": set(Targets.model_fields),
    "release": set(Release.model_fields),
    "serve": set(Serve.model_fields),
    "notify": set(site.Notify.model_fields),
    "automations": set(site.Automations.model_fields),
    "retention": set(site.Retention.model_fields),
    "tracking": {"rows", "traces_per_stage"},
}
"""Settings with which an interrupted run may go on changed: what it makes does not depend on
them."""


FlowName = Literal["pipeline", "refresh", "train", "evaluate", "release", "compare"]


def _absolute_file(value: str) -> str:
    """Make the path absolute: later readers have another working directory."""
    return str(Path(value).expanduser().resolve()) if value.endswith(".py") else value


class Profile(Section):
    """One profile: see configs/. `extends: NAME`, or a path from the file's folder, beside these
    keys takes another profile for whatever the file does not say: sections are laid over each other
    key by key, lists are replaced. `rehearses: NAME` in its place makes a rehearsal of that profile
    (docs/how-to/gpus.md)."""

    name: str = ""
    """The file's own name, if not given; never that of the profile it extends, as it identifies the
    runs."""
    recipe: Annotated[str, AfterValidator(_absolute_file)] = "query_rewrite"
    """A name in `qinglan/recipes`, or the path of a recipe's .py file."""
    tenant: site.Tenant = site.Tenant()
    data: Data = Data()
    teacher: site.Endpoint
    answerer: site.Endpoint | None = None
    """The weak model whose answers are judged, for a recipe that asks one."""
    judge: site.Judge
    rag: Rag = Rag()
    embedded: site.Embedded = site.Embedded()
    extract: Extract = Extract()
    distill: Distill = Distill()
    validation: Validate = Validate()
    select: Select = Select()
    dataset: Dataset = Dataset()
    refresh: Refresh = Refresh()
    compare: Compare = Compare()
    ledger: site.LedgerStore = site.LedgerStore()
    budget: site.Budget = site.Budget()
    student: Student = Student()
    sft: Sft = Sft()
    reward: Reward = Reward()
    rl: Rl = Rl()
    evaluate: Evaluate = Evaluate()
    gate: Gate = Gate()
    targets: Targets = Targets()
    release: Release = Release()
    serve: Serve = Serve()
    notify: site.Notify = site.Notify()
    automations: site.Automations = site.Automations()
    trainer: site.Trainer = site.Trainer()
    prices: dict[str, site.Price] = {}
    paths: site.Paths = site.Paths()
    tracking: site.Tracking = site.Tracking()
    retention: site.Retention = site.Retention()

    @model_validator(mode="after")
    def _price_every_paid_model(self) -> Self:
        rivals = (
            (f"compare.teachers.{name}", endpoint)
            for name, endpoint in self.compare.teachers.items()
        )
        for role, endpoint in (
            ("teacher", self.teacher),
            ("answerer", self.answerer),
            ("judge", self.judge),
            *rivals,
        ):
            if endpoint and endpoint.model not in self.prices:
                raise ValueError(f"prices has no entry for {role}.model {endpoint.model!r}")
        return self

    @model_validator(mode="after")
    def _know_the_arms(self) -> Self:
        if unknown := [
            name for name in self.evaluate.teachers if name not in self.compare.teachers
        ]:
            known = ", ".join(self.compare.teachers) or "none"
            raise ValueError(
                f"evaluate.teachers: {unknown[0]} is none of compare.teachers ({known})"
            )
        arms = [
            arm
            for arm in (*ARMS, *self.evaluate.teachers)
            if arm not in ("champion", self.gate.challenger)
        ]
        if unknown := [arm for arm in self.gate.rivals if arm not in arms]:
            raise ValueError(
                f"gate.rivals: {unknown[0]}: name some of {', '.join(arms)}; the champion always is one"
            )
        return self

    @model_validator(mode="after")
    def _fit_the_trainer(self) -> Self:
        rl, trainer = self.rl, self.trainer
        if trainer.device == "cuda" and self.rollout_engine == "cpu":
            raise ValueError("rl.rollout_engine: cpu needs trainer.device: cpu; leave it out")
        gpus = trainer.nodes * trainer.gpus_per_node
        rollouts = rl.ppo_mini_batch_size * rl.rollouts_per_prompt
        if rollouts % (gpus * rl.ppo_micro_batch_size_per_gpu) and not any(
            "dynamic_bsz" in key for key in rl.extra
        ):
            raise ValueError(
                f"rl.ppo_mini_batch_size × rollouts_per_prompt ({rollouts}) must be a multiple of "
                f"GPUs × rl.ppo_micro_batch_size_per_gpu ({gpus} × {rl.ppo_micro_batch_size_per_gpu})"
            )
        if (
            trainer.device == "cuda" and trainer.gpus_per_node % rl.tensor_model_parallel_size
        ):  # vLLM stays in a node
            raise ValueError(
                f"trainer.gpus_per_node ({trainer.gpus_per_node}) must be a multiple of "
                f"rl.tensor_model_parallel_size ({rl.tensor_model_parallel_size})"
            )
        stalled_s, outage_s = trainer.stalled_after_s, self.reward.max_outage_s
        if stalled_s <= outage_s:  # training waits for services
            raise ValueError(
                f"trainer.stalled_after_s ({stalled_s:g}) must be longer than reward.max_outage_s ({outage_s:g})"
            )
        return self

    @model_validator(mode="after")
    def _limit_what_others_spend(self) -> Self:
        is_limited = self.budget.per_run_usd is not None or self.budget.per_month_usd is not None
        why = "data.workbook is the router's request log" if self.reads_request_log else ""
        if self.serve.try_page == "with_teacher":
            why = "serve.try_page asks the teacher"
        if why and not is_limited:
            raise ValueError(
                f"budget: {why}, so whoever asks the router spends money; set budget.per_run_usd or per_month_usd"
            )
        return self

    def scheduled(self, sft_rows: int, rl_prompts: int) -> "Profile":
        """With the numbers of steps that so many rows make, in place of `auto`."""
        gpus = self.trainer.gpus_of["sft"]
        return self.model_copy(
            update={"sft": self.sft.scheduled(sft_rows, gpus), "rl": self.rl.scheduled(rl_prompts)}
        )

    @property
    def reads_request_log(self) -> bool:
        """Do the questions come from the folder in which the router keeps what it is asked?"""
        folder, workbook = self.serve.request_log.folder, Path(self.data.workbook).resolve()
        return (
            folder is not None
            and not self.data.sql
            and Path(folder).resolve() in (workbook, *workbook.parents)
        )

    @property
    def rollout_engine(self) -> Literal["cpu", "vllm"]:
        """What samples in RL."""
        return self.rl.rollout_engine or ("vllm" if self.trainer.device == "cuda" else "cpu")

    @property
    def answer_engine(self) -> Literal["transformers", "vllm"]:
        """What answers in evaluation and serving."""
        return self.serve.backend or ("vllm" if self.trainer.device == "cuda" else "transformers")

    @property
    def tracking_uri(self) -> str:
        return self.tracking.uri or f"sqlite:///{(self.paths.state / 'mlflow.db').resolve()}"

    @property
    def recipe_name(self) -> str:
        """The recipe's, also where `recipe` is a file."""
        return Path(self.recipe).stem if self.recipe.endswith(".py") else self.recipe

    @property
    def model_name(self) -> str:
        """Of the registered model, and of the model that the router serves."""
        return self.release.name or f"qinglan.{self.tenant.file_name}.{self.recipe_name}"


_YAML = (".yaml", ".yml")


def load_profile(name_or_path: str, overrides: Iterable[str] = ()) -> Profile:
    """Read a profile by name (``configs/NAME.yaml``) or path, apply ``dotted.key=value`` overrides,
    validate."""
    path = _find(name_or_path)
    profile = parse_profile(path, _text_of(path), overrides)
    if profile.name != path.stem and Path(name_or_path).suffix not in _YAML:
        raise ConfigError(
            f"profile {path}: `name`: is {profile.name}, and the file's is {path.stem}; leave it out"
        )
    return profile


def parse_profile(path: Path, text: str, overrides: Iterable[str] = ()) -> Profile:
    """The profile that a file at this path is with this text, whether or not it is there."""
    raw = _parse(path, text)
    raw.setdefault("name", path.stem)
    for override in overrides:
        _apply(raw, override)
    return _validated(path, raw)


def _validated(path: Path, raw: dict[str, Any]) -> Profile:
    try:
        return Profile.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"profile {path}: {_explain(error)}") from error


def _explain(error: ValidationError) -> str:
    """The first problem of a pydantic error in words, with the nearest right key for an unknown
    one."""
    problems = error.errors()
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"]) or "profile"
    if first["type"] == "extra_forbidden":
        known = _keys_beside(first["loc"])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.4)
        hint = (
            f"did you mean `{near[0]}`?"
            if near
            else f"known keys: {', '.join(sorted(known)) or 'none'}"
        )
        text = f"unknown key `{where}`; {hint}"
    elif first["type"] == "missing":
        text = f"`{where}` is missing; add it"
    elif first["type"] == "value_error":
        text = f"`{where}`: {first['msg'].removeprefix('Value error, ')}"
    else:
        given = repr(first["input"])
        text = f"`{where}`: {first['msg']}, got {given if len(given) <= 80 else given[:77] + '...'}"
    return text + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


def require_secret(env_name: str | None, used_by: str) -> str:
    """The value of a secret's environment variable; a placeholder where the service needs none."""
    if env_name is None:
        return "no-key"
    value = os.environ.get(env_name, "").strip()
    if not value:
        raise ConfigError(
            f"{used_by} needs the environment variable {env_name}; set it and run again"
        )
    if not (
        value.isascii() and value.isprintable()
    ):  # no HTTP header, and httpx2's error would show the secret
        raise ConfigError(
            f"{used_by}: the value of {env_name} has characters that no key has; set it again"
        )
    return value


def secret_names(profile: Profile | None) -> set[str]:
    """Environment variables that may hold a secret: those that the profile names, and all that are
    called so here."""
    named = _SECRET_NAME.findall(profile.model_dump_json()) if profile else ()
    return {*named, *filter(_CALLED_SECRET.search, os.environ)}


def withheld_secrets(profile: Profile | None, *needed: str | None) -> dict[str, str]:
    """The environment of a process that needs no secrets but these, such as `MLFLOW_*`: the others
    are empty there."""
    return {
        name: ""
        for name in secret_names(profile)
        if not any(fnmatchcase(name, each) for each in needed if each)
    }


def profile_names() -> list[str]:
    return sorted({path.stem for folder in _folders() for path in folder.glob("*.yaml")})


def _folders() -> tuple[Path, Path]:
    return Path.cwd() / "configs", Path(__file__).parents[1] / "configs"


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"profile {path}: can't be read: {error}") from error


def _parse(path: Path, text: str, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A profile's keys, laid over those of the profile that it extends or rehearses."""
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"profile {path}: not valid YAML: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(
            f"profile {path}: expected sections such as `teacher:`, found {type(raw).__name__}"
        )
    if raw.keys() >= {"extends", "rehearses"}:
        raise ConfigError(
            f"profile {path}: `extends` and `rehearses` exclude each other; give one of them"
        )
    for key in ("extends", "rehearses"):
        if (other := raw.pop(key, None)) is None:
            continue
        if path.resolve() in extended_by:
            raise ConfigError(f"profile {path}: {key} itself; name another profile")
        beside = path.parent / str(other)
        found = beside if beside.suffix in _YAML and beside.is_file() else _find(str(other))
        below = _parse(found, _text_of(found), (*extended_by, path.resolve()))
        if key == "rehearses":
            _validated(found, below)
            demo = _find(demo_of(below))
            below = rehearsal(below, _parse(demo, _text_of(demo)), below.get("name", found.stem))
        below.pop("name", None)
        return _laid_over(below, raw)
    return raw


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {key: (below[key], above[key]) for key in below.keys() & above.keys()}
    merged = {
        key: _laid_over(a, b)
        for key, (a, b) in both.items()
        if isinstance(a, dict) and isinstance(b, dict)
    }
    return below | above | merged


def _find(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.suffix in _YAML:
        if not path.is_file():
            raise ConfigError(f"profile {path}: no such file")
        return path
    for folder in _folders():
        if (candidate := folder / f"{name_or_path}.yaml").is_file():
            return candidate
    known = profile_names()
    near = difflib.get_close_matches(name_or_path, known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"known profiles: {', '.join(known) or 'none'}"
    raise ConfigError(f"profile `{name_or_path}`: there is no configs/{name_or_path}.yaml; {hint}")


def _apply(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override!r}: write it as dotted.key=value")
    try:
        value = yaml.safe_load(text) if text else text
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML") from error
    *parents, leaf = key.split(".")
    node = raw
    for parent in parents:
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: `{parent}` is a value, not a section")
        node = child
    node[leaf] = value


def _keys_beside(location: tuple[int | str, ...]) -> list[str]:
    model: Any = Profile
    for part in location[:-1]:
        if (
            get_origin(model) is dict
        ):  # `part` is a key that the user chose, such as a model's name in `prices`
            model = get_args(model)[1]
        else:
            field = getattr(model, "model_fields", {}).get(str(part))
            model = field.annotation if field else None
            if isinstance(model, UnionType):  # `X | None`
                model = get_args(model)[0]
    return list(getattr(model, "model_fields", ()))
