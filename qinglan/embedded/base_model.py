"""The embedded base model as the orchestrator sees it: where it is cached, and how to make it. Imports no torch.

A tiny Qwen3 is pretrained once per machine and kept under `paths.state`. The key hashes the sources that it is made
from, so a changed corpus never meets an old model.
"""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from qinglan.artifacts import MANIFEST, hash_of
from qinglan.config import Embedded, Paths
from qinglan.recipes import identity

_SOURCES = ("embedded/corpus.py", "embedded/domain.py", "embedded/pretrain.py", "embedded/tokenizer.py")
_PACKAGES = ("torch", "transformers", "tokenizers")


def cache_key(embedded: Embedded) -> str:
    """Digest of everything that the pretrained weights depend on."""
    package = Path(__file__).parent.parent
    sources = {name: (package / name).read_text(encoding="utf-8") for name in _SOURCES}
    prompt = identity("query_rewrite")  # the corpus holds its frame
    return hash_of(sources, prompt, embedded.pretrain_steps, {name: _version(name) for name in _PACKAGES})


def cached_path(paths: Paths, embedded: Embedded) -> Path:
    """The Hugging Face folder of the model that this configuration asks for, whether it exists or not."""
    return paths.state / "base_models" / f"qwen3-tiny-{cache_key(embedded)[:16]}"


def is_complete(path: Path) -> bool:
    """Whether pretraining ran to its end: its last act is to write the manifest."""
    return (path / MANIFEST).is_file()


def pretrain_argv(python: str, embedded: Embedded, output_dir: Path, metrics_path: Path, threads: int) -> list[str]:
    """Command line of the pretraining process; it needs the trainer's environment."""
    options = {
        "--output": str(output_dir.resolve()),
        "--metrics": str(metrics_path.resolve()),
        "--steps": str(embedded.pretrain_steps),
        "--seconds-max": str(embedded.pretrain_seconds_max),
        "--threads": str(threads),
    }
    return [python, "-m", "qinglan.embedded.pretrain", *(word for option in options.items() for word in option)]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # the orchestrator's image may do without
        return "absent"
