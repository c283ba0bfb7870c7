"""The code that a stage's result depends on, and an interrupted training whose code changes."""

import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from qinglan.config import Profile
from qinglan.errors import StageError
from qinglan.runs.artifacts import StageResult
from qinglan.runs.code_digest import CARRIERS, code_of, module_path
from qinglan.runs.run import open_run
from qinglan.tasks import stage as stage_module
from qinglan.tasks.attempts import digests_of
from qinglan.tasks.stage import Outcome, Stage, perform

ROOT = Path(__file__).parents[2]
Train = Callable[..., StageResult | None]
STAGES = [
    "ingest",
    "distill",
    "validate",
    "select",
    "dataset",
    "publish",
    "base_model",
    "sft",
    "local_judge",
    "rl",
    "evaluate",
    "gate",
    "register",
    "sample",
    "compare",
    "extract",
]
ASKS_RECIPE = [name for name in STAGES if name not in ("base_model", "sft")]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the sources, whose digests count from now on."""
    copy = tmp_path / "sources" / "qinglan"
    shutil.copytree(
        ROOT / "qinglan",
        copy,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    ours = Path(import_module("qinglan").__file__ or "").parent

    def path(module: str) -> Path | None:
        original = module_path(module)
        return original and copy / original.relative_to(ours)

    monkeypatch.setattr("qinglan.runs.code_digest.module_path", path)
    code_of.cache_clear()
    yield copy
    code_of.cache_clear()


def digests(profile: Profile) -> dict[str, dict[str, str]]:
    code_of.cache_clear()
    return {name: digests_of(profile, f"qinglan.tasks.{name}") for name in STAGES}


@pytest.mark.parametrize(
    ("file", "old", "new", "stages"),
    [
        (
            "recipes/query_rewrite.py",
            "math.tanh(3 * rq_gain)",
            "math.tanh(4 * rq_gain)",
            ASKS_RECIPE,
        ),
        ("recipes/query_rewrite.py", "return prompt(", "return prompt('' + ", ASKS_RECIPE),
        ("recipes/medical.py", "", "MORE = 1\n", []),
        ("grading/by_retrieval.py", "", "MORE = 1\n", ASKS_RECIPE),
        ("training/reward_service/scorer.py", "", "MORE = 1\n", ["rl"]),
        ("training/engines/verl.py", "", "MORE = 1\n", ["rl"]),
        ("training/engines/agents.yaml", "", "more: 1\n", ["rl"]),
        ("training/verl_cpu/router.yaml", "", "more: 1\n", ["rl"]),
        ("training/verl_cpu/rollout.py", "", "MORE = 1\n", ["rl"]),
        ("training/engines/swift.py", "", "MORE = 1\n", ["base_model", "sft", "rl", "evaluate"]),
        ("training/engines/export.py", "", "MORE = 1\n", ["rl"]),
        ("tasks/sft.py", "", "MORE = 1\n", ["sft"]),
        ("data/dataset/augment.py", "", "MORE = 1\n", ["dataset"]),
        (
            "data/dataset/splits.py",
            "",
            "MORE = 1\n",
            ["ingest", "dataset", "publish", "evaluate", "compare"],
        ),
        (
            "clients/rag/__init__.py",
            "",
            "MORE = 1\n",
            [name for name in ASKS_RECIPE if name not in ("ingest", "select", "publish")],
        ),
        ("statistics/__init__.py", "", "MORE = 1\n", ASKS_RECIPE),
        ("cpu.py", "", "MORE = 1\n", ["base_model", "sft", "rl", "evaluate"]),
        (
            "evaluation/reasons.py",
            "",
            "MORE = 1\n",
            ["dataset", "evaluate", "gate", "register", "sample", "compare"],
        ),
        ("evaluation/gate.py", "", "MORE = 1\n", ["gate"]),
        ("evaluation/report/html.py", "", "MORE = 1\n", []),
        ("cli/__init__.py", "", "MORE = 1\n", []),
        ("runs/tracking.py", "", "MORE = 1\n", []),
        ("ledger/queue.py", "", "MORE = 1\n", []),
    ],
)
def test_an_edit_changes_its_stages(
    sources: Path, profile: Profile, file: str, old: str, new: str, stages: list[str]
):
    before = digests(profile)
    path = sources / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    edited = text.replace(old, new, 1) if old else text + new
    path.write_text(edited, encoding="utf-8")
    after = digests(profile)
    assert [name for name in STAGES if before[name] != after[name]] == stages


def test_docstrings_comments_registry_and_serving_leave_every_stage_reusable(
    sources: Path, profile: Profile
):
    before = digests(profile)
    for path in sources.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        edited = text.replace('"""', '"""Otherwise: ', 1) + "# a comment\n"
        if path.relative_to(sources).parts[0] in ("registry", "serving"):
            edited += "\nMORE = 1\n"
        path.write_text(edited, encoding="utf-8")
    assert digests(profile) == before


@pytest.mark.parametrize(
    ("stage", "module"),
    [
        ("rl", "qinglan.training.reward_service.function"),
        ("rl", "qinglan.training.reward_service.scorer"),
        ("rl", "qinglan.training.engines.ppo_trainer"),
        ("rl", "qinglan.training.verl_cpu.trainer"),
        ("rl", "qinglan.training.engines.vllm_rollout"),
        ("evaluate", "qinglan.training.engines.generate"),
        ("evaluate", "qinglan.grading.panel"),
        ("validate", "qinglan.clients.rag"),
        ("select", "qinglan.recipes.query_rewrite"),
    ],
)
def test_code_that_an_engine_loads_by_name_counts_as_well(
    profile: Profile, stage: str, module: str
):
    assert module in digests_of(profile, f"qinglan.tasks.{stage}")


def test_what_only_carries_results_is_there():
    packages = {path.stem for path in (ROOT / "qinglan").iterdir() if not path.name.startswith("_")}
    carriers = {name.removeprefix("qinglan.") for name in CARRIERS}
    assert carriers <= packages


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The digests of a stage's code, to be changed."""
    code_digests = {"qinglan.training.engines.swift": "1", "qinglan.tasks.sft": "1"}
    monkeypatch.setattr(stage_module, "digests_of", lambda *_: dict(code_digests))
    return code_digests


@pytest.fixture
def train(profile: Profile, code: dict[str, str], tracker: Any) -> Train:
    """Runs one attempt of SFT; each writes one more checkpoint, and all but the last die."""

    def attempt(
        *, dies: bool = False, continue_anyway: bool = False, rows: str = "a"
    ) -> StageResult | None:
        def work(stage: Stage) -> Outcome:
            with (stage.directory / "checkpoints").open("a") as file:
                file.write("x")
            if dies:
                raise StageError("died")
            return Outcome(rows_out=(stage.directory / "checkpoints").stat().st_size)

        with open_run(profile, "train", continue_anyway=continue_anyway) as run:
            try:
                return perform(run, "sft", {"rows": rows}, work, has_checkpoints=True)
            except StageError:
                return None

    return attempt


def checkpoints(result: StageResult | None) -> int:
    assert result is not None
    return result.rows_out


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_training_with_changed_code_starts_anew(
    train: Train, code: dict[str, str], caplog: pytest.LogCaptureFixture
):
    train(dies=True)
    code["qinglan.training.engines.swift"] = "2"
    assert checkpoints(train()) == 1
    (warning,) = warnings_of(caplog)
    assert warning.startswith(
        "sft: the code of qinglan.training.engines.swift changed since the last attempt, "
        "so it starts anew"
    )
    assert "--continue-anyway" in warning


def test_other_inputs_are_named_as_the_reason(train: Train, caplog: pytest.LogCaptureFixture):
    train(dies=True)
    assert checkpoints(train(rows="b", continue_anyway=True)) == 1
    (warning,) = warnings_of(caplog)
    assert warning.startswith("sft: its inputs changed since")


def test_a_training_goes_on_anyway(
    train: Train, code: dict[str, str], tracker: Any, caplog: pytest.LogCaptureFixture
):
    train(dies=True)
    code["qinglan.training.engines.swift"] = "2"
    train(dies=True, continue_anyway=True)
    # The third attempt needs not be asked for it again.
    result = train()
    assert checkpoints(result) == 3
    assert result is not None
    assert result.details["continued_anyway"] == ["qinglan.training.engines.swift"]
    assert tracker.tags["qinglan.continued_anyway"] == "qinglan.training.engines.swift"
    assert tracker.tags["qinglan.continued_anyway.sft"] == "qinglan.training.engines.swift"
    assert "it continues all the same" in caplog.text


def test_a_finished_training_of_this_run_stays_where_the_user_continues_anyway(
    train: Train, code: dict[str, str]
):
    first = train()
    code["qinglan.tasks.sft"] = "2"
    again = train(continue_anyway=True)
    assert first is not None
    assert again is not None
    assert (again.rows_out, again.key) == (1, first.key)
    assert again.details["continued_anyway"] == ["qinglan.tasks.sft"]


def test_a_result_of_two_codes_is_not_reused_elsewhere(
    train: Train, code: dict[str, str], profile: Profile
):
    first = train(dies=True)
    code["qinglan.tasks.sft"] = "2"
    mixed = train(continue_anyway=True)
    with open_run(profile, "pipeline") as run:
        result = perform(
            run, "sft", {"rows": "a"}, lambda _: Outcome(rows_out=9), has_checkpoints=True
        )
    assert first is None
    assert mixed is not None
    assert result.key != mixed.key
