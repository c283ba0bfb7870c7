"""The base_model stage: the model that training starts from."""

from pathlib import Path
from typing import Any

from qinglan.config import EMBEDDED
from qinglan.runs.artifacts import WEIGHTS, WEIGHTS_SHA256, Artifact, StageResult, sha256_of
from qinglan.runs.launcher import Command
from qinglan.runs.run import Run
from qinglan.simulators.base_model import cached_path, is_complete, pretrain_argv
from qinglan.simulators.domains import domain_for
from qinglan.tasks.engine import Follower, Metrics, run_engine
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task
from qinglan.training.engines import swift


@stage_task("base-model")
def prepare_base_model(run: Run) -> StageResult:
    """The model to start from: the profile's own, or the embedded one, pretrained once per
    machine."""
    profile = run.profile
    domain = (
        domain_for(profile, "student.base_model")
        if profile.student.base_model == EMBEDDED
        else None
    )
    folder = (
        cached_path(profile.paths, profile.embedded, domain)
        if domain
        else Path(profile.student.base_model)
    )

    def work(stage: Stage) -> Outcome:
        if domain is None:
            return _model_outcome(folder)
        if is_complete(folder):
            stage.say(f"already pretrained: {folder}")
            return _model_outcome(folder)
        metrics_path = stage.directory / "metrics.jsonl"
        stage.say("pretraining a tiny Qwen3 from scratch; this happens once per machine")

        def command() -> Command:
            metrics_path.unlink(missing_ok=True)
            python, threads = swift.engine_python(profile), profile.trainer.threads
            argv = pretrain_argv(python, profile.embedded, domain, folder, metrics_path, threads)
            return Command(
                argv,
                swift.engine_env(profile, str(folder)),
                gpus=int(profile.trainer.device == "cuda"),
            )

        def read(entry: Metrics) -> tuple[int, int, str, Metrics]:
            return (
                entry["step"],
                entry["max_steps"],
                f"steps, loss {entry['loss']:.3f}",
                {"loss": entry["loss"]},
            )

        follow = Follower(stage, metrics_path, read)
        run_engine(stage, command, name="pretraining", log="pretrain.log", watchers=[follow])
        return _model_outcome(folder, {"curve": follow.curve("loss")})

    return perform(run, "base_model", {"folder": str(folder)}, work)


def _model_outcome(folder: Path, details: dict[str, Any] | None = None) -> Outcome:
    # A hub id is not a folder on this machine; the engines resolve it.
    if not folder.is_dir():
        return Outcome(details={"model": str(folder)})
    found = {"model": str(folder), WEIGHTS_SHA256: sha256_of(folder, WEIGHTS)}
    return Outcome(artifacts={"model": Artifact.of(folder)}, details=(details or {}) | found)
