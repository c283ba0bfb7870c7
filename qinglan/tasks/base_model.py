"""The base_model stage: the model that training starts from."""

from functools import partial
from pathlib import Path
from typing import Any

from qinglan.config import EMBEDDED, Profile
from qinglan.runs.artifacts import WEIGHTS, WEIGHTS_SHA256, Artifact, StageResult, sha256_of
from qinglan.runs.launcher import Command, Metrics
from qinglan.runs.run import Run
from qinglan.simulators.base_model import cached_path, is_complete, pretrain_argv
from qinglan.simulators.domains import Domain, domain_for
from qinglan.tasks.engine import run_engine
from qinglan.tasks.followers import Follower
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task
from qinglan.training.engines import swift


@stage_task("base-model")
def prepare_base_model(run: Run) -> StageResult:
    """The profile's own base model, or the embedded one, which is pretrained once per machine."""
    profile = run.profile
    domain: Domain | None = None
    folder = Path(profile.student.base_model)
    if profile.student.base_model == EMBEDDED:
        domain = domain_for(profile, "student.base_model")
        folder = cached_path(profile.paths, profile.embedded, domain)

    def work(stage: Stage) -> Outcome:
        if domain is None:
            return _model_outcome(folder)
        if is_complete(folder):
            stage.say(f"already pretrained: {folder}")
            return _model_outcome(folder)
        stage.say("pretraining a tiny Qwen3 from scratch; this happens once per machine")
        metrics_file = stage.directory / "metrics.jsonl"
        follower = Follower(stage, metrics_file, _pretraining_line)
        pretrain = partial(_pretraining_command, profile, domain, folder, metrics_file)
        run_engine(stage, pretrain, name="pretraining", log="pretrain.log", watchers=[follower])
        return _model_outcome(folder, {"curve": follower.curve("loss")})

    return perform(run, "base_model", {"folder": str(folder)}, work)


def _pretraining_command(
    profile: Profile, domain: Domain, folder: Path, metrics_file: Path
) -> Command:
    # It is of an earlier attempt, which left no checkpoint.
    metrics_file.unlink(missing_ok=True)
    argv = pretrain_argv(
        swift.engine_python(profile),
        profile.embedded,
        domain,
        folder,
        metrics_file,
        profile.trainer.threads,
    )
    gpus = 1 if profile.trainer.device == "cuda" else 0
    return Command(argv, swift.engine_env(profile, str(folder)), gpus=gpus)


def _pretraining_line(entry: Metrics) -> tuple[int, int, str, Metrics]:
    """A line of the pretraining's metrics as a logged step."""
    text = f"steps, loss {entry['loss']:.3f}"
    return entry["step"], entry["max_steps"], text, {"loss": entry["loss"]}


def _model_outcome(folder: Path, details: dict[str, Any] | None = None) -> Outcome:
    # A hub id is not a folder on this machine; the engines resolve it.
    if not folder.is_dir():
        return Outcome(details={"model": str(folder)})
    return Outcome(
        artifacts={"model": Artifact.of(folder)},
        details={
            **(details or {}),
            "model": str(folder),
            WEIGHTS_SHA256: sha256_of(folder, WEIGHTS),
        },
    )
