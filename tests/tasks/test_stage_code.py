"""Which code a stage's result depends on, and what becomes of an interrupted training when that
code changes."""

import ast
import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from qinglan.config import Profile
from qinglan.errors import StageError
from qinglan.runs.artifacts import StageResult
from qinglan.runs.code_digest import code_digest, imported_modules, module_path
from qinglan.runs.run import open_run
from qinglan.tasks import stage as stage_module
from qinglan.tasks.stage import Outcome, Stage, digests_of, perform

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
]
STAGES += ["evaluate", "gate", "register", "sample", "compare", "extract"]
USES_RECIPE = [
    name for name in STAGES if name not in ("base_model", "sft", "gate", "register", "sample")
]
PACKAGE_FILES = {"qinglan.data", "qinglan.recipes", "qinglan.training.engines"}
"""They only pass on names of modules, which are listed."""
HELD_IN_THE_KEY = {
    "qinglan.config": "the settings that a stage reads are in its key",
    "qinglan.clients": "carries questions and answers; what is asked and what an answer is worth lies in the recipe",
    "qinglan.data.versions": "what the dataset stage takes from it, the pins, is in the key",
    "qinglan.recipes.kinds.distillation": "names the questions, which the recipe words",
    "qinglan.recipes.scoring.keys": "makes a part of the key",
    "qinglan.registry": "the model that it names is in the key",
    "qinglan.serving": "the model that it provides is in the key",
    "qinglan.simulators": "the folder of the tiny base model is named by the digest of the code that makes it",
}
CHANGES_NO_RESULT = {
    "qinglan.errors": "only stops a stage",
    "qinglan.ledger": "keeps what was paid for",
    "qinglan.runs": "keeps files and starts processes",
    "qinglan.tasks": "shows, waits and starts processes",
    "qinglan.text": "words for the log",
    "qinglan.training.disk_space": "only stops a stage",
    "qinglan.evaluation.report": "only draws what was found",
}

OF_ONE_STAGE = {
    (
        "base_model",
        "qinglan.training.engines.swift",
    ): "only names the interpreter and the environment",
    ("dataset", "qinglan.evaluation.red_team"): "the questions that it reads are in the key",
}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the sources, whose digests count from now on."""
    copy = tmp_path / "sources" / "qinglan"
    shutil.copytree(
        ROOT / "qinglan",
        copy,
        ignore=shutil.ignore_patterns("__pycache__", "configs", "deployments"),
    )
    ours = Path(import_module("qinglan").__file__ or "").parent

    def path(module: str) -> Path | None:
        found = module_path(module)
        return found and copy / found.relative_to(ours)

    monkeypatch.setattr("qinglan.runs.code_digest.module_path", path)
    code_digest.cache_clear()
    yield copy
    code_digest.cache_clear()


def digests(profile: Profile) -> dict[str, dict[str, str]]:
    code_digest.cache_clear()
    return {
        name: digests_of(profile, import_module(f"qinglan.tasks.{name}").CODE) for name in STAGES
    }


@pytest.mark.parametrize(
    ("file", "old", "new", "stages"),
    [
        ("recipes/query_rewrite.py", "math.tanh(3 * rq_gain)", "math.tanh(4 * rq_gain)", ["rl"]),
        ("recipes/query_rewrite.py", "return prompt(", "return prompt('' + ", USES_RECIPE),
        ("recipes/scoring/scorer.py", "", "MORE = 1\n", ["rl"]),
        ("training/engines/verl.py", "", "MORE = 1\n", ["rl"]),
        ("training/engines/agents.yaml", "", "more: 1\n", ["rl"]),
        ("training/verl_cpu/router.yaml", "", "more: 1\n", ["rl"]),
        (
            "clients/rag/__init__.py",
            "",
            "MORE = 1\n",
            ["distill", "validate", "local_judge", "rl", "evaluate", "extract"],
        ),
        (
            "clients/rag/answers.py",
            "",
            "MORE = 1\n",
            ["distill", "validate", "local_judge", "rl", "evaluate", "extract"],
        ),
        (
            "statistics/bootstrap.py",
            "",
            "MORE = 1\n",
            ["publish", "local_judge", "rl", "evaluate", "gate", "compare"],
        ),
        ("runs/cpu.py", "", "MORE = 1\n", ["base_model", "sft", "rl", "evaluate"]),
        ("tasks/sft.py", "", "MORE = 1\n", ["sft"]),
        ("data/dataset/splits.py", "", "MORE = 1\n", ["dataset", "compare"]),
        ("evaluation/reasons.py", "", "MORE = 1\n", ["evaluate", "gate", "compare"]),
        ("evaluation/report/html.py", "", "MORE = 1\n", []),
        ("cli/__init__.py", "", "MORE = 1\n", []),
    ],
)
def test_an_edit_changes_its_stages(
    sources: Path, profile: Profile, file: str, old: str, new: str, stages: list[str]
):
    before, path = digests(profile), sources / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1) if old else text + new, encoding="utf-8")
    after = digests(profile)
    assert [name for name in STAGES if before[name] != after[name]] == stages


def test_docstrings_comments_registry_and_serving_leave_every_stage_reusable(
    sources: Path, profile: Profile
):
    before = digests(profile)
    for path in sources.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        changes_no_result = path.relative_to(sources).parts[0] in ("registry", "serving")
        more = "\nMORE = 1\n" if changes_no_result else ""
        path.write_text(
            text.replace('"""', '"""Otherwise: ', 1) + "# a comment\n" + more, encoding="utf-8"
        )
    assert digests(profile) == before


@pytest.mark.parametrize("stage", STAGES)
def test_a_stages_list_covers_what_its_module_imports(stage: str):
    module = f"qinglan.tasks.{stage}"
    path = module_path(module)
    assert path
    listed = {*import_module(module).CODE}
    known = (
        listed
        | HELD_IN_THE_KEY.keys()
        | CHANGES_NO_RESULT.keys()
        | {m for s, m in OF_ONE_STAGE if s == stage}
    )
    imported = {
        name for name in imported_modules(ast.parse(path.read_bytes())) if module_path(name)
    }
    ours = {name for name in imported if name.startswith("qinglan.")} - PACKAGE_FILES
    assert not {
        name for name in ours if not any(f"{name}.".startswith(f"{each}.") for each in known)
    }


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The digests of a stage's code, to be changed."""
    made = {"qinglan.training.engines.swift": "1", "qinglan.tasks.sft": "1"}
    monkeypatch.setattr(stage_module, "digests_of", lambda *_: dict(made))
    return made


@pytest.fixture
def train(profile: Profile, code: dict[str, str], tracker: Any) -> Train:
    """Runs one attempt of SFT; each writes one more checkpoint, and all but the last die."""

    def make(
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
                return perform(run, "sft", {"rows": rows}, work, code=(), has_checkpoints=True)
            except StageError:
                return None

    return make


def checkpoints(result: StageResult | None) -> int:
    assert result
    return result.rows_out


def test_a_training_with_changed_code_starts_anew(
    train: Train, code: dict[str, str], caplog: pytest.LogCaptureFixture
):
    train(dies=True)
    code["qinglan.training.engines.swift"] = "2"
    assert checkpoints(train()) == 1
    said = "sft: the code of qinglan.training.engines.swift changed since the last attempt, so it starts anew"
    assert any(
        message.startswith(said) and "--continue-anyway" in message for message in caplog.messages
    )


def test_other_inputs_are_named_as_the_reason(train: Train, caplog: pytest.LogCaptureFixture):
    train(dies=True)
    assert checkpoints(train(rows="b", continue_anyway=True)) == 1
    assert any(message.startswith("sft: its inputs changed since") for message in caplog.messages)


def test_a_training_goes_on_anyway(
    train: Train, code: dict[str, str], tracker: Any, caplog: pytest.LogCaptureFixture
):
    train(dies=True)
    code["qinglan.training.engines.swift"] = "2"
    train(dies=True, continue_anyway=True)
    result = train()  # which needs not be asked for again
    assert checkpoints(result) == 3
    assert result and result.details["continued_anyway"] == ["qinglan.training.engines.swift"]
    assert tracker.tags["qinglan.continued_anyway"] == "qinglan.training.engines.swift"
    assert tracker.tags["qinglan.continued_anyway.sft"] == "qinglan.training.engines.swift"
    assert any("it continues all the same" in message for message in caplog.messages)


def test_a_finished_training_of_this_run_stays_where_the_user_continues_anyway(
    train: Train, code: dict[str, str]
):
    first = train()
    code["qinglan.tasks.sft"] = "2"
    again = train(continue_anyway=True)
    assert first and again
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
            run, "sft", {"rows": "a"}, lambda _: Outcome(rows_out=9), code=(), has_checkpoints=True
        )
    assert first is None
    assert mixed and result.key != mixed.key
