"""The red team: questions on which a student must not go wrong, whatever its averages say.

Cases that guard people must pass, each of them; on the others the student must not be worse than
its rivals. A recipe's own cases are redteam/<recipe>.jsonl beside its file; `evaluate.red_team`
adds the user's, and one with the id of a built-in case replaces that. A case that could not be
checked is neither passed nor failed.
"""

import asyncio
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from qinglan import recipes
from qinglan.clients.roles import Clients
from qinglan.clients.row_batches import RETRYABLE_REASONS
from qinglan.config import Profile, Tenant
from qinglan.config.base import Pattern
from qinglan.data.workbook import read_rows
from qinglan.errors import ConfigError, WorkbookError
from qinglan.evaluation.reasons import Reason, reason
from qinglan.grading.grade import Grade
from qinglan.grading.grader import Grader
from qinglan.grading.leftovers import is_boilerplate, is_degenerate
from qinglan.recipes import Recipe, get_recipe
from qinglan.rows import HINTS, ArmName, ArmRow, Retrieved, Row, normalise
from qinglan.runs.schema_version import first_flaw
from qinglan.statistics import ArmScores, Comparison, compare

BUILT_IN = Path(recipes.__file__).parent / "redteam"
REGRESSION = "regression"
"""The kind of the cases that come from a workbook's rows."""
_SETTING = "evaluate.red_team"
RAG_NO_ANSWER = reason("rag_no_answer")
"""The reason of a case that could not be checked because the RAG failed."""
_FAILED_CALLS = RETRYABLE_REASONS | {"teacher_bad_request"}
"""Reasons of a teacher's row that say nothing about what it would have answered."""
ASKED = {"query", "profile", "history", "inputs"}
"""Fields that a case shares with a row."""


def _says_something(word: str) -> str:
    if not normalise(word):
        raise ValueError(
            f"{word!r} has no letter or digit, so that every text contains it; use must_not_match"
        )
    return word


Word = Annotated[str, AfterValidator(_says_something)]


class Checks(BaseModel, frozen=True, extra="forbid"):
    """Demands on a text; those that a case does not set itself are as its recipe's grader says."""

    non_empty: bool = True
    not_repetitive: bool = False
    """No word three times, no piece of text three times in a row, no character that fills half of
    it."""
    not_boilerplate: bool = False
    """No refusal, label, markup, JSON or piece of the prompt, by the patterns with which `select`
    refuses rewrites."""
    max_chars: Annotated[int, Field(ge=1)] | None = None
    not_echo: bool = False
    """The text may not be the question itself."""
    must_not_contain: tuple[Word, ...] = ()
    """White space, punctuation, width and case don't count."""
    must_not_match: tuple[Pattern, ...] = ()
    """Regular expressions, tried with the text's white space and without."""
    keeps_any: tuple[Word, ...] = ()
    """One of them must be there: what the question is about."""
    keeps_all: tuple[Word, ...] = ()
    """Every one of them must be there, such as what a safe answer has to say."""
    parts: dict[str, float] = {}
    """Lowest value of the recipe's own parts by rule, such as `harmless: 1`."""
    gold_top1: str | None = None
    """Id of the document that must come first."""
    gold_in_top3: str | None = None

    @property
    def needs_retrieval(self) -> bool:
        return self.gold_top1 is not None or self.gold_in_top3 is not None


class Case(BaseModel, frozen=True, extra="forbid"):
    """A question and what must hold of a student's text."""

    id: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    name: str
    """One sentence for people, in the language of the questions."""
    kind: Annotated[str, Field(min_length=1)]
    """Such as `injection`, `other_tenant`, `medical_claim`, `personal_data`, `empty`, `long`,
    `regression`."""
    query: str
    profile: str = ""
    history: str = ""
    inputs: dict[str, str] = {}
    """The recipe's further inputs, by `Input.name`."""
    must_pass: bool = True
    """True where a release needs this case. Of the other cases, the student must pass no fewer than
    its rivals."""
    checks: Checks = Checks()

    def with_checks(self, checks: Checks) -> "Case":
        return self.model_copy(update={"checks": checks})


class RedTeamResult(BaseModel, frozen=True, extra="forbid"):
    """One arm's text for one case, and whether it passed."""

    case_id: str
    name: str
    kind: str
    must_pass: bool
    passed: bool | None
    """None where it could not be checked."""
    reason: Reason | None = None
    """Cause why it failed, or could not be checked."""
    text: str | None = None


class RedTeamCounts(NamedTuple):
    """An arm's results on the red team's cases."""

    cases: int
    passed: int
    failed: int
    blocking: int
    """Failed cases that a release needs."""
    unchecked: int

    @classmethod
    def of(cls, results: Sequence[RedTeamResult]) -> "RedTeamCounts":
        outcomes = Counter(result.passed for result in results)
        blocking = [result for result in results if result.must_pass and result.passed is False]
        return cls(
            cases=len(results),
            passed=outcomes[True],
            failed=outcomes[False],
            blocking=len(blocking),
            unchecked=outcomes[None],
        )


def cases_of(profile: Profile) -> list[Case]:
    """The recipe's cases and the user's own.

    Raises:
        ConfigError: a file can't be used; it says where.
    """
    recipe = get_recipe(profile.recipe)
    built_in = _built_in_file(profile.recipe)
    cases = _read_cases(built_in, recipe) if built_in.exists() else []
    if profile.evaluate.red_team:
        cases += _read_own(Path(profile.evaluate.red_team), profile, recipe)
    # A user's case replaces the built-in one with its id, in its place.
    by_id = {case.id: case for case in cases}
    return list(by_id.values())


def _built_in_file(recipe_name: str) -> Path:
    """The file of a recipe's own cases; a user's recipe, which is a file, has it beside that."""
    path = Path(recipe_name)
    folder = path.parent / BUILT_IN.name if path.suffix == ".py" else BUILT_IN
    return folder / f"{path.stem}.jsonl"


def row_of(case: Case, tenant: Tenant) -> Row:
    """The case as a row to make a prompt of."""
    return Row(
        # The case's own id, since a regression case may be a test row, too.
        id=f"redteam-{case.id}",
        tenant=tenant.id,
        **case.model_dump(include=ASKED),
        gold_id=case.checks.gold_top1 or case.checks.gold_in_top3,
        source=f"redteam:{case.id}",
    )


def texts_of(answers: Iterable[str | bytes], recipe: Recipe) -> dict[str, str]:
    """A student's texts by prompt id, as they are graded and served.

    Args:
        answers: the JSON lines of a generation.
    """
    texts = {}
    for line in answers:
        answer = json.loads(line)
        texts[answer["id"]] = recipe.grader.clean(answer["text"])
    return texts


def texts_of_teacher(answers: Iterable[ArmRow]) -> dict[str, str | Reason]:
    """A teacher's texts by prompt id, or a reason where the call failed.

    A refusal is an empty text.
    """
    texts: dict[str, str | Reason] = {}
    for entry in answers:
        if entry.reason in _FAILED_CALLS:
            texts[entry.row_id] = reason("call_failed", why=entry.reason)
        else:
            texts[entry.row_id] = entry.text or ""
    return texts


async def try_cases(
    cases: Sequence[Case],
    answers: Mapping[ArmName, Mapping[str, str | Reason]],
    recipe: Recipe,
    tenant: Tenant,
    clients: Clients,
) -> dict[ArmName, list[RedTeamResult]]:
    """Check each arm's texts, in the cases' order; an arm has results of the cases it was asked.

    A case whose call failed counts as not checked.

    Args:
        answers: by arm, what `texts_of` and `texts_of_teacher` give.
    """

    async def try_case(case: Case, row: Row, text: str | Reason) -> RedTeamResult:
        if isinstance(text, Reason):
            return _result(case, None, None, text)
        grade = Grade(text)
        # Most cases are checked by their words alone: nothing is retrieved for them.
        if text and (case.checks.needs_retrieval or case.checks.parts):
            # A failed call leaves the case unchecked.
            grades = await recipe.grader.grade(row, [text], clients, tenant)
            grade = grades[text]
        return check(case, text or None, grade.retrieved, grade.parts or {})

    async def try_arm(texts: Mapping[str, str | Reason]) -> list[RedTeamResult]:
        attempts = []
        for case in cases:
            row = row_of(case, tenant)
            if row.id in texts:
                attempts.append(try_case(case, row, texts[row.id]))
        return await asyncio.gather(*attempts)

    results = await asyncio.gather(*map(try_arm, answers.values()))
    return dict(zip(answers, results, strict=True))


def check(
    case: Case,
    answer: str | None,
    retrieved: Retrieved | None,
    parts: Mapping[str, float] = MappingProxyType({}),
) -> RedTeamResult:
    """Try a student's text by all checks of a case.

    Args:
        answer: None or empty where the student gave none.
        retrieved: what the RAG found with it; None where it was not asked, or did not answer.
        parts: of the text, by the recipe's rules.
    """
    text = answer or ""
    # The first flaw says enough.
    flaw = next(_flaws(case, text, parts, retrieved), None)
    # Where no answer is a right one, nothing is looked up.
    was_looked_up = case.checks.needs_retrieval and bool(text.strip())
    if flaw is None and was_looked_up and retrieved is None:
        return _result(case, answer, None, RAG_NO_ANSWER)
    return _result(case, answer, flaw is None, flaw)


def _result(case: Case, text: str | None, passed: bool | None, why: Reason | None) -> RedTeamResult:
    return RedTeamResult(
        case_id=case.id,
        name=case.name,
        kind=case.kind,
        must_pass=case.must_pass,
        passed=passed,
        reason=why,
        text=text,
    )


def compare_rates(
    results: Mapping[ArmName, Sequence[RedTeamResult]], a: ArmName, b: ArmName
) -> Comparison:
    """Two arms on the cases that need not pass, case by case."""
    passed_a = _passed_by_case(results.get(a, ()))
    passed_b = _passed_by_case(results.get(b, ()))
    # Each case is a group of its own.
    groups = {case_id: case_id for case_id in passed_a}
    return compare(
        ArmScores(arm=a, scores={"passed": passed_a}),
        ArmScores(arm=b, scores={"passed": passed_b}),
        "passed",
        groups,
        proportion=True,
    )


def _passed_by_case(results: Iterable[RedTeamResult]) -> dict[str, float | None]:
    return {result.case_id: result.passed for result in results if not result.must_pass}


def _flaws(
    case: Case, text: str, parts: Mapping[str, float], retrieved: Retrieved | None
) -> Iterator[Reason]:
    """The checks that a text fails.

    No flaw quotes the text, which may repeat what a user wrote: the gate's sentence names flaws.
    """
    checks = case.checks
    if not text.strip():
        if checks.non_empty:
            yield reason("empty")
        return
    key = normalise(text)
    for word in checks.must_not_contain:
        if normalise(word) in key:
            yield reason("contains", word=word)
    # Also without white space, by which a forbidden word may be spread out.
    compatible = unicodedata.normalize("NFKC", text)
    forms = (compatible, "".join(compatible.split()))
    for pattern in checks.must_not_match:
        if any(re.search(pattern, form, re.IGNORECASE) for form in forms):
            yield reason("matches", pattern=pattern)
    if checks.max_chars is not None and len(text) > checks.max_chars:
        yield reason("too_long", chars=len(text), limit=checks.max_chars)
    if checks.not_echo and key == normalise(case.query):
        yield reason("echo")
    if checks.not_boilerplate and is_boilerplate(text):
        yield reason("boilerplate")
    if checks.not_repetitive and is_degenerate(text):
        yield reason("repetitive")
    if checks.keeps_any and not any(normalise(word) in key for word in checks.keeps_any):
        yield reason("one_of_words_missing", words=list(checks.keeps_any))
    missing_words = [word for word in checks.keeps_all if normalise(word) not in key]
    if missing_words:
        yield reason("words_missing", words=missing_words)
    yield from _flaws_of_parts(checks, parts)
    if retrieved is not None:
        yield from _flaws_of_retrieval(checks, retrieved)


def _flaws_of_parts(checks: Checks, parts: Mapping[str, float]) -> Iterator[Reason]:
    for name, least in checks.parts.items():
        value = parts.get(name)
        if value is None:
            yield reason("part_without_value", part=name, least=least)
        elif value < least:
            yield reason("part_too_low", part=name, value=value, least=least)


def _flaws_of_retrieval(checks: Checks, retrieved: Retrieved) -> Iterator[Reason]:
    for gold_id, places in ((checks.gold_top1, 1), (checks.gold_in_top3, 3)):
        if gold_id is None:
            continue
        demand = reason("first_place") if places == 1 else reason("first_places", places=places)
        rank = retrieved.rank(gold_id)
        if rank == 0:
            yield reason("document_not_found", document=gold_id, demand=demand)
        elif rank > places:
            yield reason("document_too_low", document=gold_id, place=rank, demand=demand)


def _read_own(path: Path, profile: Profile, recipe: Recipe) -> list[Case]:
    """The user's cases: JSON lines, or a workbook where the recipe retrieves."""
    if not path.exists():
        raise ConfigError(
            f"{_SETTING}: {path}: no such file; correct the path or remove the setting"
        )
    is_workbook = path.suffix.lower() != ".jsonl"
    if is_workbook and not recipe.grader.retrieves:
        raise ConfigError(
            f"{_SETTING}: {path}: a workbook's rows say which document must come first, "
            f"and recipe `{recipe.NAME}` retrieves nothing; write the cases as .jsonl"
        )
    try:
        if is_workbook:
            return list(_read_regressions(path, profile, recipe))
        return _read_cases(path, recipe)
    except (WorkbookError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_SETTING}: {error}") from error


def _read_cases(path: Path, recipe: Recipe) -> list[Case]:
    cases: dict[str, Case] = {}
    # Not `splitlines`, which also breaks a line at signs that a JSON string may hold.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{_SETTING}: {path}:{number}"
        case = _parse_case(line, where)
        flaw = _unfit(case, recipe)
        if flaw:
            raise ConfigError(f"{where}: {flaw}")
        if case.id in cases:
            raise ConfigError(
                f"{where}: the id {case.id!r} stands in an earlier line as well; "
                "give each case its own"
            )
        cases[case.id] = _with_default_checks(case, recipe.grader)
    if not cases:
        raise ConfigError(f"{_SETTING}: {path}: holds no case; write one JSON object a line")
    return list(cases.values())


def _parse_case(line: str, where: str) -> Case:
    try:
        return Case.model_validate_json(line)
    except ValidationError as error:
        hint = "see docs/reference/gate.md for what a case looks like"
        raise ConfigError(f"{where}: {first_flaw(error)}; {hint}") from error


def _with_default_checks(case: Case, grader: Grader) -> Case:
    """The case with the checks that are on by default and that it doesn't set itself."""
    defaults = grader.default_checks(must_pass=case.must_pass)
    own_checks = case.checks.model_fields_set
    added = {name: value for name, value in defaults.items() if name not in own_checks}
    return case.with_checks(case.checks.model_copy(update=added))


def _unfit(case: Case, recipe: Recipe) -> str:
    """The reason why this recipe can't be asked the case; empty where it can."""
    input_names = {further_input.name for further_input in recipe.INPUTS}
    unknown_inputs = [name for name in case.inputs if name not in input_names]
    if unknown_inputs:
        listed = ", ".join(sorted(input_names)) or "none"
        return (
            f"`inputs.{unknown_inputs[0]}`: recipe `{recipe.NAME}` knows no such input; "
            f"its inputs: {listed}"
        )
    for further_input in recipe.INPUTS:
        if further_input.is_asked and not case.inputs.get(further_input.name):
            return f"`inputs.{further_input.name}`: recipe `{recipe.NAME}` needs it"
    parts = sorted(recipe.grader.rule_parts)
    if case.checks.parts.keys() - set(parts):
        return (
            f"`checks.parts`: recipe `{recipe.NAME}` grades these by rule: "
            f"{', '.join(parts) or 'none'}"
        )
    if case.checks.needs_retrieval and not recipe.grader.retrieves:
        return (
            f"`checks`: recipe `{recipe.NAME}` retrieves nothing; "
            "leave out gold_top1 and gold_in_top3"
        )
    return ""


def _read_regressions(path: Path, profile: Profile, recipe: Recipe) -> Iterator[Case]:
    """Each row of a workbook with the usual columns: its gold document must come first."""
    # The whole file is read, whatever part of its workbook the profile takes.
    columns = profile.data.columns.model_copy(update={"dialogue": ""})
    data = profile.data.model_copy(
        update={"sql": None, "sheet": None, "limit": None, "columns": columns}
    )
    default_checks = recipe.grader.default_checks(must_pass=False)
    for row in read_rows(path, data, profile.tenant, inputs=recipe.INPUTS):
        where = f"{_SETTING}: {row.source}"
        if row.status == "failed":
            raise ConfigError(f"{where}: {row.reason}: {HINTS.get(row.reason or '', '')}")
        if not row.gold_id:
            column = profile.data.columns.gold
            raise ConfigError(
                f"{where}: no document in column `{column}`; say which one must come first"
            )
        yield Case(
            id=f"{REGRESSION}-{row.id}",
            # Not the question, which is a user's: the gate's sentence, with the name, leaves the
            # machine.
            name=row.source,
            kind=REGRESSION,
            **row.model_dump(include=ASKED),
            must_pass=False,
            checks=Checks.model_validate({**default_checks, "gold_top1": row.gold_id}),
        )
