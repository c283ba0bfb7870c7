"""A version's files among those of its MLflow run: what is put there, and how the weights come back."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from qinglan.errors import ArtifactError
from qinglan.runs.artifacts import sha256_of
from qinglan.runs.schema_version import dump_record
from qinglan.serving.registry.versions import Candidate, Released, Weights

if TYPE_CHECKING:
    from mlflow import MlflowClient

ROOT = "release"
"""Above all of them."""
ADVICE = "or serve another: `qinglan release list`, `qinglan release promote VERSION`"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def log_files(client: "MlflowClient", candidate: Candidate, max_bytes: float) -> Weights:
    """Hand MLflow the model and its adapters; of a model larger than `max_bytes` all but the weights."""
    folder, run_id = candidate.model.verify(), candidate.mlflow_run_id
    files = [path for path in folder.rglob("*") if path.is_file()]
    whole = sum(path.stat().st_size for path in files) <= max_bytes
    for path in files:
        if whole or path.suffix not in _WEIGHTS:
            _log_file(client, run_id, path, folder, "model")
    for stage, adapter in candidate.adapters.items():
        for path in adapter.iterdir():
            # Not the state of the optimizer, which lies beside the adapter in a checkpoint.
            belongs = path.name.startswith("adapter_") or path.suffix in (".json", ".jinja", ".txt")
            if path.is_file() and belongs:
                _log_file(client, run_id, path, adapter, f"adapters/{stage}")
    client.log_dict(run_id, dump_record(candidate), f"{ROOT}/release.json")
    return "mlflow" if whole else "path"


def restore(client: "MlflowClient", released: Released, target: Path) -> None:
    """Fetch the merged weights into `target`, whole or not at all."""
    partial = target.with_name(f".partial-{released.version}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # Where below `partial` depends on the kind of MLflow's artifact store.
    got = Path(client.download_artifacts(released.mlflow_run_id, f"{ROOT}/model", str(partial)))
    if sha256_of(got) != released.sha256:
        raise ArtifactError(
            f"release {released.version} of {released.name}: what MLflow has of run {released.mlflow_run_id} is not "
            f"what was registered; put {released.folder} back, {ADVICE}"
        )
    shutil.rmtree(target, ignore_errors=True)
    got.rename(target)
    shutil.rmtree(partial, ignore_errors=True)


def _log_file(client: "MlflowClient", run_id: str, path: Path, folder: Path, below: str) -> None:
    inside = path.parent.relative_to(folder).as_posix()
    client.log_artifact(run_id, str(path), f"{ROOT}/{below}" + ("" if inside == "." else f"/{inside}"))
