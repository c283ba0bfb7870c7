"""The command that starts the router's process, and what it takes to ask it."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from qinglan.config import EMBEDDED, Profile, withheld_secrets
from qinglan.recipes import get_recipe, placeholders
from qinglan.rows import Row
from qinglan.runs.launcher import Command
from qinglan.serving.routes import ROUTES_FILE
from qinglan.simulators.domains import embedded_knowledge_base
from qinglan.simulators.services import embedded_services, rag_service

WARM_UP_QUESTION = "这个怎么吃"


@contextmanager
def with_addresses(profile: Profile) -> Iterator[Profile]:
    """The profile with addresses of simulators in place of `embedded`, where the router asks them.

    The simulators end with the `with`.
    """
    knowledge_base = embedded_knowledge_base(profile)
    with ExitStack() as stack:
        rag_url = stack.enter_context(rag_service(profile, knowledge_base)) or EMBEDDED
        services: dict[str, Any] = {"rag": profile.rag.model_copy(update={"url": rag_url})}
        if profile.serve.try_page == "with_teacher":
            addresses = stack.enter_context(embedded_services(profile, None))()
            services["teacher"] = profile.teacher.model_copy(
                update={"base_url": addresses.teacher_url}
            )
            if profile.answerer:
                services["answerer"] = profile.answerer.model_copy(
                    update={"base_url": addresses.answerer_url}
                )
        yield profile.model_copy(update=services)


def router_command(profile: Profile, folder: Path, port: int | None, *, watched: bool) -> Command:
    """The router's command, with the keys of its clients, of the RAG, and of what its page asks."""
    # It reads the profile as it is now, overrides included: a router that is started again must not
    # read another one.
    path = folder / "profile.yaml"
    content = yaml.safe_dump(profile.model_dump(mode="json"), allow_unicode=True)
    path.write_text(content, encoding="utf-8")
    argv = [
        sys.executable,
        "-m",
        "qinglan.serving.router",
        f"--profile={path}",
        f"--routes={folder / ROUTES_FILE}",
    ]
    if port is not None:
        argv.append(f"--port={port}")
    if watched:
        argv.append(f"--watch={folder}")
    key_names = [profile.rag.api_key_env]
    if profile.serve.try_page == "with_teacher":
        key_names.append(profile.teacher.api_key_env)
        if profile.answerer:
            key_names.append(profile.answerer.api_key_env)
    for client in profile.serve.clients.values():
        key_names.append(client.key_env)
    return Command(argv, withheld_secrets(profile, profile.ledger.url_env, *key_names))


def warm_up_messages(profile: Profile) -> list[dict[str, str]]:
    """The messages of a question that a model's server is asked before it gets any other."""
    recipe = get_recipe(profile.recipe)
    row = Row(
        id="",
        tenant=profile.tenant.id,
        query=WARM_UP_QUESTION,
        inputs=placeholders(recipe.INPUTS, WARM_UP_QUESTION),
        source="serve",
    )
    return recipe.student_messages(row, profile.tenant)


def announcement(profile: Profile, url: str) -> str:
    """The text for the terminal that says where the router is, and how to ask it."""
    body: dict[str, Any] = {
        "model": profile.model_name,
        "messages": [{"role": "user", "content": WARM_UP_QUESTION}],
    }
    inputs = placeholders(get_recipe(profile.recipe).INPUTS, "…")
    if inputs:
        body["inputs"] = inputs
    command = f"curl {url}/v1/chat/completions"
    clients = list(profile.serve.clients.values())
    if clients:
        # The shell puts the key in, so that none is shown.
        command += f" -H 'Authorization: Bearer '\"${clients[0].key_env}\""
    command += f" -d '{json.dumps(body, ensure_ascii=False)}'"
    page = "" if profile.serve.try_page == "none" else f"Try it   {url}/\n"
    return f"\nRouter   {url}/v1\n{page}\n{command}\n\nCtrl-C stops all of it."
