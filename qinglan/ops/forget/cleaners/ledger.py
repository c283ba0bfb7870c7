"""Removes answers from the ledger: what models said about the rows, and what quotes them."""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

from qinglan.clients.roles import site_ledger
from qinglan.config import Profile
from qinglan.errors import TeacherError
from qinglan.ledger import LEDGER_FILE, Ledger
from qinglan.ops.forget.finding import NamedRows
from qinglan.ops.forget.notes import noting
from qinglan.recipes import get_recipe
from qinglan.recipes.requests import distill_requests, extract_requests, judge_requests
from qinglan.rows import Row
from qinglan.runs.artifacts import hash_of
from qinglan.runs.run import RUN_FILE
from qinglan.text import forms_of

_REQUEST_SETTINGS = {"recipe", "tenant", "teacher", "answerer", "judge", "extract"}
"""Sections of a profile that the ledger's keys depend on."""


def has_ledger(profile: Profile) -> bool:
    """Tell whether the site has a ledger, so that none is made here."""
    return bool(profile.ledger.url_env) or (profile.paths.state / LEDGER_FILE).exists()


def drop_answers(
    profile: Profile,
    named_rows: NamedRows,
    texts: Collection[str],
    notes: list[str],
    *,
    dry_run: bool,
) -> int:
    """Drop the answers about the rows, and those that quote one of the texts.

    Returns how many there are, which with `dry_run` stay.

    Args:
        notes: gets a line for each run of which it can't be told what it asked.
    """
    requests = set(named_rows.requests)
    with site_ledger(profile) as ledger:
        for asking_profile in _asking_profiles(profile):
            with noting(f"ledger: what a run of {asking_profile.name} asked", notes):
                if _can_ask(asking_profile):
                    requests |= _requests_about(
                        named_rows.rows, named_rows.answers, asking_profile, ledger
                    )
        quoted_forms = set[str]().union(*map(forms_of, texts))
        requests |= ledger.requests_quoting(quoted_forms)
        answers = ledger.get_many(requests) if dry_run else ledger.drop_all(requests)
        return len(answers)


def _can_ask(profile: Profile) -> bool:
    """Tell whether the profile names all models that its recipe asks."""
    asks_answerer = "answerer" in get_recipe(profile.recipe).DISTILL_ROLES
    return not asks_answerer or profile.answerer is not None


def _requests_about(
    rows: Mapping[str, Row],
    answers: Mapping[str, Collection[str]],
    profile: Profile,
    ledger: Ledger,
) -> set[str]:
    """Ledger keys of what a profile's models are asked about the rows."""
    distill = distill_requests(profile)
    extract = extract_requests(profile)
    judge = judge_requests(profile)
    recipe = get_recipe(profile.recipe)
    requests: set[str] = set()
    for row in rows.values():
        # The recipe may need inputs that a question alone does not have.
        with suppress(LookupError):
            distill_hashes = {request.request_hash for request in distill(row).values()}
            requests |= distill_hashes
            further = [extract(row)]
            for text in answers.get(row.id, ()):
                further.append(judge(row, text))
            # The judge was also asked about answers that no file has, only the ledger.
            for answer in ledger.get_many(distill_hashes).values():
                # Nobody judged an answer that is of no use.
                with suppress(TeacherError):
                    text = recipe.parse_answer(answer.text)
                    further.append(judge(row.with_answer(text), text))
            for request in filter(None, further):
                requests.add(request.request_hash)
    return requests


def _asking_profiles(profile: Profile) -> list[Profile]:
    """This profile and those of the runs, once for each teacher and each difference in asking."""
    by_settings: dict[str, Profile] = {}
    for own in [profile, *_profiles_of_runs(profile)]:
        for teacher in (own.teacher, *own.compare.teachers.values()):
            asking = own.model_copy(update={"teacher": teacher})
            settings = asking.model_dump(mode="json", include=_REQUEST_SETTINGS)
            by_settings[hash_of(settings)] = asking
    return list(by_settings.values())


def _profiles_of_runs(profile: Profile) -> Iterator[Profile]:
    """The profiles of the runs at hand, whose prompts and models may have been others."""
    for path in profile.paths.runs.glob(f"*/{RUN_FILE}"):
        # Runs of another version of Qinglan may have settings that this one does not know.
        with suppress(OSError, ValueError, KeyError, TypeError):
            yield Profile.model_validate(json.loads(path.read_bytes())["profile"])
