"""The whole profile, and how one is read."""

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
from qinglan.text import ARMS, did_you_mean

_SECRET_NAME = re.compile(r'"[^"]*_env":"([^"]*)"')
"""Finds the names of secrets in a profile as JSON."""
_CALLED_SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|AUTH_STRING)$", re.I)
# A setting that a stage's result depends on must not be listed: a run would mix results of two
# settings.
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
"""Settings that may change while a run is interrupted: what it makes does not depend on them."""


FlowName = Literal["pipeline", "refresh", "train", "evaluate", "release", "compare"]
TRAINING_FLOWS: tuple[FlowName, ...] = ("pipeline", "train")
ENGINE_FLOWS: tuple[FlowName, ...] = ("pipeline", "train", "evaluate")
"""Flows that start an engine: they train, or generate with a trained model."""


def _absolute_file(value: str) -> str:
    """Make the path absolute: later readers have another working directory."""
    return str(Path(value).expanduser().resolve()) if value.endswith(".py") else value


class Profile(Section):
    """One profile: see configs/.

    `extends: NAME`, or a path from the file's folder, beside these keys takes another profile for
    whatever the file does not say: sections are laid over each other key by key, lists are
    replaced. `rehearses: NAME` in its place makes a rehearsal of that profile
    (docs/how-to/gpus.md).
    """

    name: str = ""
    """Name that identifies the runs; the file's own name if not given, never that of the profile it
    extends."""
    recipe: Annotated[str, AfterValidator(_absolute_file)] = "query_rewrite"
    """Name of a recipe in `qinglan/recipes`, or the path of a recipe's .py file."""
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
        endpoints = {"teacher": self.teacher, "answerer": self.answerer, "judge": self.judge}
        for name, endpoint in self.compare.teachers.items():
            endpoints[f"compare.teachers.{name}"] = endpoint
        for role, paid_endpoint in endpoints.items():
            if paid_endpoint and paid_endpoint.model not in self.prices:
                raise ValueError(f"prices has no entry for {role}.model {paid_endpoint.model!r}")
        return self

    @model_validator(mode="after")
    def _know_the_arms(self) -> Self:
        for name in self.evaluate.teachers:
            if name not in self.compare.teachers:
                names = ", ".join(self.compare.teachers) or "none"
                raise ValueError(f"evaluate.teachers: {name} is none of compare.teachers ({names})")
        # The champion is a rival wherever there is one, and no arm is a rival of itself.
        arms = [
            arm
            for arm in (*ARMS, *self.evaluate.teachers)
            if arm not in ("champion", self.gate.challenger)
        ]
        for rival in self.gate.rivals:
            if rival not in arms:
                raise ValueError(
                    f"gate.rivals: {rival}: name some of {', '.join(arms)}; "
                    "the champion always is one"
                )
        return self

    @model_validator(mode="after")
    def _fit_the_gpus(self) -> Self:
        rl = self.rl
        trainer = self.trainer
        if trainer.device == "cuda" and self.rollout_engine == "cpu":
            raise ValueError("rl.rollout_engine: cpu needs trainer.device: cpu; leave it out")
        gpus = trainer.nodes * trainer.gpus_per_node
        rollouts = rl.ppo_mini_batch_size * rl.rollouts_per_prompt
        # verl then fills micro-batches by their tokens, so that rollouts need not divide evenly.
        has_dynamic_batches = any("dynamic_bsz" in key for key in rl.extra)
        if rollouts % (gpus * rl.ppo_micro_batch_size_per_gpu) and not has_dynamic_batches:
            raise ValueError(
                f"rl.ppo_mini_batch_size × rollouts_per_prompt ({rollouts}) must be a multiple of "
                f"GPUs × rl.ppo_micro_batch_size_per_gpu "
                f"({gpus} × {rl.ppo_micro_batch_size_per_gpu})"
            )
        # vLLM stays in a node.
        if trainer.device == "cuda" and trainer.gpus_per_node % rl.tensor_model_parallel_size:
            raise ValueError(
                f"trainer.gpus_per_node ({trainer.gpus_per_node}) must be a multiple of "
                f"rl.tensor_model_parallel_size ({rl.tensor_model_parallel_size})"
            )
        return self

    @model_validator(mode="after")
    def _wait_for_services_longer(self) -> Self:
        # Training waits for services, and must not count as stalled meanwhile.
        stalled_s = self.trainer.stalled_after_s
        outage_s = self.reward.max_outage_s
        if stalled_s <= outage_s:
            raise ValueError(
                f"trainer.stalled_after_s ({stalled_s:g}) must be longer than "
                f"reward.max_outage_s ({outage_s:g})"
            )
        return self

    @model_validator(mode="after")
    def _limit_what_others_spend(self) -> Self:
        reason = ""
        if self.serve.try_page == "with_teacher":
            reason = "serve.try_page asks the teacher"
        elif self.reads_request_log:
            reason = "data.workbook is the router's request log"
        is_limited = self.budget.per_run_usd is not None or self.budget.per_month_usd is not None
        if reason and not is_limited:
            raise ValueError(
                f"budget: {reason}, so whoever asks the router spends money; "
                "set budget.per_run_usd or per_month_usd"
            )
        return self

    def scheduled(self, sft_rows: int, rl_prompts: int) -> "Profile":
        """The profile with the numbers of steps that so many rows make, in place of `auto`."""
        sft = self.sft.scheduled(sft_rows, self.trainer.gpus_of["sft"])
        rl = self.rl.scheduled(rl_prompts)
        return self.model_copy(update={"sft": sft, "rl": rl})

    @property
    def reads_request_log(self) -> bool:
        """Do the questions come from the folder in which the router keeps what it is asked?"""
        folder = self.serve.request_log.folder
        if folder is None or self.data.sql:
            return False
        workbook = Path(self.data.workbook).resolve()
        return Path(folder).resolve() in (workbook, *workbook.parents)

    @property
    def rollout_engine(self) -> Literal["cpu", "vllm"]:
        """The engine that samples in RL."""
        return self.rl.rollout_engine or ("vllm" if self.trainer.device == "cuda" else "cpu")

    @property
    def answer_engine(self) -> Literal["transformers", "vllm"]:
        """The engine that answers in evaluation and serving."""
        return self.serve.backend or ("vllm" if self.trainer.device == "cuda" else "transformers")

    @property
    def tracking_uri(self) -> str:
        return self.tracking.uri or f"sqlite:///{(self.paths.state / 'mlflow.db').resolve()}"

    @property
    def recipe_name(self) -> str:
        """The recipe's name, also where `recipe` is a file."""
        return Path(self.recipe).stem if self.recipe.endswith(".py") else self.recipe

    @property
    def model_name(self) -> str:
        """Name of the registered model, which is also the one that the router serves."""
        return self.release.name or f"qinglan.{self.tenant.file_name}.{self.recipe_name}"


_YAML = (".yaml", ".yml")
_SHOWN_VALUE_CHARS = 80


def load_profile(name_or_path: str, overrides: Iterable[str] = ()) -> Profile:
    """Read a profile by name (``configs/NAME.yaml``) or path, apply ``dotted.key=value`` overrides,
    validate."""
    path = _find(name_or_path)
    profile = parse_profile(path, _text_of(path), overrides)
    # Runs are found by the profile's name, so a file must be found by it too.
    is_by_name = Path(name_or_path).suffix not in _YAML
    if is_by_name and profile.name != path.stem:
        raise ConfigError(
            f"profile {path}: `name`: is {profile.name}, and the file's is {path.stem}; "
            "leave it out"
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
    # A message is one line; the others are only counted.
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"]) or "profile"
    if first["type"] == "extra_forbidden":
        text = f"unknown key `{where}`; {_hint_for_key(first['loc'])}"
    elif first["type"] == "missing":
        text = f"`{where}` is missing; add it"
    elif first["type"] == "value_error":
        text = f"`{where}`: {first['msg'].removeprefix('Value error, ')}"
    else:
        # Pydantic's own words, which lack the value.
        value = repr(first["input"])
        if len(value) > _SHOWN_VALUE_CHARS:
            value = value[: _SHOWN_VALUE_CHARS - 3] + "..."
        text = f"`{where}`: {first['msg']}, got {value}"
    if len(problems) > 1:
        text += f" (and {len(problems) - 1} more)"
    return text


def _hint_for_key(location: tuple[int | str, ...]) -> str:
    keys = _keys_beside(location)
    known_keys = f"known keys: {', '.join(sorted(keys)) or 'none'}"
    return did_you_mean(str(location[-1]), keys, known_keys, cutoff=0.4)


def _keys_beside(location: tuple[int | str, ...]) -> list[str]:
    """The keys that the section has in which the last part of a location stands."""
    model: Any = Profile
    for part in location[:-1]:
        if get_origin(model) is dict:
            # `part` is a key that the user chose, such as a model's name in `prices`.
            model = get_args(model)[1]
            continue
        field = getattr(model, "model_fields", {}).get(str(part))
        model = field.annotation if field else None
        if isinstance(model, UnionType):
            # `X | None`
            model = get_args(model)[0]
    return list(getattr(model, "model_fields", ()))


def require_secret(env_name: str | None, used_by: str) -> str:
    """The value of a secret's environment variable; a placeholder where the service needs none."""
    if env_name is None:
        return "no-key"
    value = os.environ.get(env_name, "").strip()
    if not value:
        raise ConfigError(
            f"{used_by} needs the environment variable {env_name}; set it and run again"
        )
    # No HTTP header could hold it, and httpx2's error would show the secret.
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(
            f"{used_by}: the value of {env_name} has characters that no key has; set it again"
        )
    return value


def secret_names(profile: Profile | None) -> set[str]:
    """Environment variables that may hold a secret: those that the profile names, and all that are
    called so here."""
    # A shell may hold keys that no profile names, such as that of a model hub.
    names = set(filter(_CALLED_SECRET.search, os.environ))
    if profile:
        names.update(_SECRET_NAME.findall(profile.model_dump_json()))
    return names


def withheld_secrets(profile: Profile | None, *allowed: str | None) -> dict[str, str]:
    """The environment of a process that needs no secrets but those allowed, such as `MLFLOW_*`: the
    others are empty there."""
    patterns = [pattern for pattern in allowed if pattern]
    withheld: dict[str, str] = {}
    for name in secret_names(profile):
        is_allowed = any(fnmatchcase(name, pattern) for pattern in patterns)
        if not is_allowed:
            withheld[name] = ""
    return withheld


def profile_names() -> list[str]:
    return sorted({path.stem for folder in _folders() for path in folder.glob("*.yaml")})


def _folders() -> tuple[Path, Path]:
    # A site's own profiles come before those that are shipped.
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
        problem = " ".join(str(error).split())
        raise ConfigError(f"profile {path}: not valid YAML: {problem}") from error
    if not isinstance(raw, dict):
        raise ConfigError(
            f"profile {path}: expected sections such as `teacher:`, found {type(raw).__name__}"
        )
    if raw.keys() >= {"extends", "rehearses"}:
        raise ConfigError(
            f"profile {path}: `extends` and `rehearses` exclude each other; give one of them"
        )
    for key in ("extends", "rehearses"):
        base = raw.pop(key, None)
        if base is None:
            continue
        # It may name itself by way of others.
        if path.resolve() in extended_by:
            raise ConfigError(f"profile {path}: {key} itself; name another profile")
        base_path = _find_beside(path, str(base))
        below = _parse(base_path, _text_of(base_path), (*extended_by, path.resolve()))
        if key == "rehearses":
            below = _rehearsal_of(base_path, below)
        # A name is never that of the profile below.
        below.pop("name", None)
        return _laid_over(below, raw)
    return raw


def _rehearsal_of(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    # A profile that is wrong itself can't be rehearsed.
    _validated(path, raw)
    demo = _find(demo_of(raw))
    return rehearsal(raw, _parse(demo, _text_of(demo)), raw.get("name", path.stem))


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = below | above
    for key in below.keys() & above.keys():
        # Anything but two sections is a value, and takes the place of the one below; lists too.
        section_below = below[key]
        section_above = above[key]
        if isinstance(section_below, dict) and isinstance(section_above, dict):
            merged[key] = _laid_over(section_below, section_above)
    return merged


def _find_beside(path: Path, name_or_path: str) -> Path:
    """The profile that the one at `path` names: a file beside it, or one as anywhere else."""
    beside = path.parent / name_or_path
    if beside.suffix in _YAML and beside.is_file():
        return beside
    return _find(name_or_path)


def _find(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.suffix in _YAML:
        if not path.is_file():
            raise ConfigError(f"profile {path}: no such file")
        return path
    for folder in _folders():
        candidate = folder / f"{name_or_path}.yaml"
        if candidate.is_file():
            return candidate
    names = profile_names()
    known_profiles = f"known profiles: {', '.join(names) or 'none'}"
    hint = did_you_mean(name_or_path, names, known_profiles)
    raise ConfigError(f"profile `{name_or_path}`: there is no configs/{name_or_path}.yaml; {hint}")


def _apply(raw: dict[str, Any], override: str) -> None:
    """Set the key that an override names; sections that are absent are added."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override!r}: write it as dotted.key=value")
    try:
        # Nothing behind the sign is an empty text; `null` says that there is no value.
        value = yaml.safe_load(text) if text else text
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML") from error
    *section_names, leaf = key.split(".")
    section = raw
    for name in section_names:
        if section.get(name) is None:
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):
            raise ConfigError(f"--set {override!r}: `{name}` is a value, not a section")
    section[leaf] = value
