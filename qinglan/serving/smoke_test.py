"""`qinglan serve --check`: starts a whole site, asks the champion one question, and stops."""

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2

from qinglan.config import Data, Profile, load_profile, require_secret
from qinglan.data.workbook import read_rows
from qinglan.errors import ConfigError, EngineError
from qinglan.recipes import get_recipe, placeholders
from qinglan.rows import Row
from qinglan.runs.processes import Say, stop_signals
from qinglan.serving.site import STEP_S, ServingSite, open_site, serving_folder
from qinglan.simulators.domains import sample_of

WITHIN_S, REGISTRY_WITHIN_S = 1800.0, 30.0


def run_smoke_test(profile_name: str, overrides: Sequence[str], question: str | None, say: Say) -> str:
    """Ask one question, the first test question of the sample if none is given; a line with the answer."""
    overrides = (*overrides, "serve.request_log.consent=none")  # a made-up question is no user's
    profile = load_profile(profile_name, overrides)
    asked = _made_of(question, profile) if question else _first_of_sample(profile)
    folder = serving_folder(profile)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        stop_signals(),
        TemporaryDirectory(prefix="check-", dir=folder) as own,
        open_site(profile, Path(own), say, port=0, watched=False) as site,
    ):
        return _ask(profile, _wait(site), asked)


def _wait(site: ServingSite) -> str:
    start = time.monotonic()
    url = f"{site.router.url}/health"
    while not (site.routes.champion and httpx2.get(url, trust_env=False, timeout=5).json()["champion"]):
        site.step()
        waited_s = time.monotonic() - start
        if (problem := site.watcher.problem) and waited_s > REGISTRY_WITHIN_S:
            raise ConfigError(f"the registry can't be read: {problem}")
        named = site.watcher.latest
        if named and "champion" not in named.aliases:
            name = site.profile.name
            raise ConfigError(
                f"there is no champion to serve: `qinglan release list --profile {name}` shows the versions, if any, "
                f"and why none was released; `qinglan run pipeline --profile {name}` makes one"
            )
        if waited_s > WITHIN_S:
            raise EngineError(f"the champion does not answer within {WITHIN_S:.0f} s")
        time.sleep(STEP_S)
    return site.router.url


def _made_of(question: str, profile: Profile) -> Row:
    if needed := placeholders(get_recipe(profile.recipe).INPUTS, ""):
        raise ConfigError(
            f"recipe `{profile.recipe_name}` needs {', '.join(needed)} beside the question; leave --question out, and "
            "one of the sample is asked"
        )
    return Row(id="", tenant=profile.tenant.id, query=question, source="check")


def _first_of_sample(profile: Profile) -> Row:
    sample = sample_of(profile, "`serve --check` without --question")
    # In the sample's own columns, whatever the profile calls those of its workbook.
    rows = read_rows(sample.workbook, Data(), profile.tenant, inputs=get_recipe(profile.recipe).INPUTS)
    return next(row for row in rows if row.split == "test" and row.status == "ok")


def _ask(profile: Profile, url: str, question: Row) -> str:
    identifying = {each.name for each in get_recipe(profile.recipe).INPUTS if each.identifies}
    body = {
        "model": profile.model_name,
        "messages": [{"role": "user", "content": question.query}],
        "profile": question.profile,
        "history": question.history,
        "inputs": {name: text for name, text in question.inputs.items() if name in identifying},
    }
    key = profile.serve.api_key_env
    headers = {"authorization": f"Bearer {require_secret(key, 'serve.api_key_env')}"} if key else {}
    with httpx2.Client(trust_env=False, timeout=60, headers=headers) as client:
        start = time.perf_counter()
        answer = client.post(f"{url}/v1/chat/completions", json=body)
        took_ms = 1000 * (time.perf_counter() - start)
    version = answer.headers.get("x-qinglan-version", "?")
    if answer.headers.get("x-qinglan-source") != "model":
        reason = answer.headers.get("x-qinglan-reason", f"HTTP {answer.status_code}")
        raise EngineError(f"version {version} gave no usable answer to {question.query!r}: {reason}")
    text = answer.json()["choices"][0]["message"]["content"]
    context = " / ".join(text for text in (question.profile, question.history, *question.inputs.values()) if text)
    asked = f"{question.query}{f' ({context})' if context else ''}"
    return f"{asked} → {text}  (version {version}, {took_ms:.0f} ms)"
