"""`qinglan init`: asks for workbook, RAG, teacher, judge and machine, and writes a profile."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from qinglan.cli.common import say
from qinglan.cli.maintenance import doctor
from qinglan.config import EMBEDDED, Price, Tenant, load_profile, parse_profile
from qinglan.errors import ConfigError
from qinglan.text import one_line

_COLUMNS = {
    "query": "column of the questions",
    "gold": "column of the right documents' ids, - for none",
}
_VARIABLE = "name of the environment variable with the {}'s key, if it wants one"


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the profile: configs/NAME.yaml.")],
    workbook: Annotated[str | None, typer.Option(help="File or folder with the questions.")] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=HEADER",
            help="Which column a field is, such as 问题=Question; may be repeated.",
        ),
    ] = None,
    rag_url: Annotated[str | None, typer.Option(help="The RAG's address, or `embedded`.")] = None,
    kb_name: Annotated[
        str | None, typer.Option(help="The knowledge base's name in the RAG.")
    ] = None,
    rag_preset: Annotated[
        str | None, typer.Option(help="How the RAG is asked; found out if not given.")
    ] = None,
    rag_key_env: Annotated[
        str | None, typer.Option(help="Name of the variable with the RAG's token.")
    ] = None,
    domain: Annotated[
        str | None, typer.Option(help="What the knowledge base is about; in the prompts.")
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A model, or `embedded`.")
    ] = None,
    teacher_url: Annotated[str | None, typer.Option(help="Up to and including /v1.")] = None,
    teacher_key_env: Annotated[
        str | None, typer.Option(help="Name of the variable with its key.")
    ] = None,
    teacher_price: Annotated[
        str | None, typer.Option(metavar="IN,OUT", help="USD per million tokens.")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A model, or `embedded`.")
    ] = None,
    judge_url: Annotated[str | None, typer.Option(help="Up to and including /v1.")] = None,
    judge_key_env: Annotated[
        str | None, typer.Option(help="Name of the variable with its key.")
    ] = None,
    judge_price: Annotated[
        str | None, typer.Option(metavar="IN,OUT", help="USD per million tokens.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help="What trains: `cpu`, or `gpu1`, 2, 4, 8: 80-GB GPUs.")
    ] = None,
    student_price: Annotated[
        str | None, typer.Option(metavar="IN,OUT", help="USD per million tokens.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Ask nothing: take defaults and proposed columns.")
    ] = False,
    run_doctor: Annotated[
        bool, typer.Option("--doctor/--no-doctor", help="Run `qinglan doctor` at the end.")
    ] = True,
) -> None:
    """Write a profile for your own questions, teacher and RAG; asks for what no option says."""
    from qinglan.data.sources.files import read_header
    from qinglan.ops import init as profiles
    from qinglan.ops.preflight import fitting_preset

    path, asks = profiles.new_path(name), sys.stdin.isatty() and not yes

    def ask(flag: str, given: str | None, question: str, default: str | None = None) -> str:
        if given is None and asks:
            given = str(typer.prompt(question, default=default, show_default=bool(default)))
        if given is None and default is None:
            raise ConfigError(
                f"{flag} is missing ({question}); give it, or be asked in a terminal without --yes"
            )
        return (default or "" if given is None else given).strip()

    file = ask("--workbook", workbook, "file or folder with the questions")
    header = read_header(Path(file).expanduser())

    def ask_column(field: str, proposed: str) -> str:
        if not asks or field not in _COLUMNS:
            return proposed
        column = str(
            typer.prompt(_COLUMNS[field], default=proposed or ("-" if field == "gold" else None))
        )
        return "" if column == "-" else column

    if asks:
        say("The header has: " + ", ".join(header))
    columns = profiles.choose_columns(header, column or (), file, ask_column)
    say(
        "Columns: "
        + "; ".join(
            f"{profiles.default_name(field)} = {head}" for field, head in columns.items() if head
        )
    )
    url = ask("--rag-url", rag_url, "the RAG's address that takes the POST, or embedded")
    rag: dict[str, str | None] = {"url": url}
    if url != EMBEDDED:
        rag["kb_name"] = ask(
            "--kb-name", kb_name, "the RAG's name of the knowledge base", "default"
        )
        rag["api_key_env"] = ask("--rag-key-env", rag_key_env, _VARIABLE.format("RAG"), "") or None
    about = ask("--domain", domain, "what the knowledge base is about", Tenant().domain)

    def ask_chat(
        role: profiles.Role, model: str | None, url: str | None, key_env: str | None
    ) -> dict[str, Any]:
        named = ask(f"--{role}", model, f"the {role}'s model, or embedded", EMBEDDED)
        if named == EMBEDDED:
            return profiles.chat_section(role, named, "", "")
        address = ask(f"--{role}-url", url, f"the {role}'s address, up to and including /v1")
        variable = ask(f"--{role}-key-env", key_env, _VARIABLE.format(role), "")
        return profiles.chat_section(role, named, address, variable)

    teaches = ask_chat("teacher", teacher, teacher_url, teacher_key_env)
    judges = ask_chat("judge", judge, judge_url, judge_key_env)
    trains = ask(
        "--machine", machine, "what trains: cpu, or gpu1, gpu2, gpu4 or gpu8 of 80 GB each", "cpu"
    )
    if trains not in profiles.BASES:
        raise ConfigError(
            f"--machine {one_line(trains)!r}: take one of {', '.join(profiles.BASES)}"
        )
    base, prices = load_profile(profiles.BASES[trains]), dict[str, Price]()
    priced = (("teacher", teaches["model"], teacher_price), ("judge", judges["model"], judge_price))
    for role, model, given in priced:
        if given is not None or model not in {*base.prices, *profiles.SIMULATORS.values(), *prices}:
            flag, wanted = (
                f"--{role}-price",
                f"price of {model} in US dollars per million tokens, as IN,OUT",
            )
            prices[model] = profiles.price_of(ask(flag, given, wanted), flag)
    if student_price is not None:  # else the base has its price, or that of a GPU's hour
        prices[base.student.name] = profiles.price_of(student_price, "--student-price")

    def profile_text() -> str:
        return profiles.profile_text(
            trains,
            {"id": name, "domain": about},
            file,
            columns,
            {"teacher": teaches, "judge": judges},
            rag,
            prices,
        )

    if url != EMBEDDED:
        fitting = rag_preset or fitting_preset(parse_profile(path, profile_text())) or "qinglan"
        rag["preset"] = ask("--rag-preset", rag_preset, "how the RAG is asked and answers", fitting)
        say(f"RAG preset: {rag['preset']}")
    text = profile_text()
    found = profiles.check_rag(path, text)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as stream:
        stream.write(text)
    if found.problem:
        say(f"warning: {found.problem}; no run starts before that is right", style="yellow")
    else:
        say(f"RAG: {': '.join(said for said in (found.detail, found.note) if said)}")
    variables = {
        str(each["api_key_env"]) for each in (rag, teaches, judges) if each.get("api_key_env")
    }
    for variable in sorted(variables):
        say(
            f"{variable}: {'is set' if os.environ.get(variable, '').strip() else 'is not set; set it before a run'}"
        )
    say(f"Written: {path}. Next:")
    for command in (
        f"refresh --profile {name} --dry-run",
        f"refresh --profile {name}",
        f"pipeline --profile {name}",
    ):
        say(f"  qinglan run {command}")
    if not run_doctor:
        say(
            f"Check machine, files, keys and services: qinglan doctor --profile {name} --flow refresh"
        )
        return
    try:
        doctor(name, flow="refresh")
    except ConfigError as error:  # the profile is written
        say(
            f"{error}; correct that, then: qinglan doctor --profile {name} --flow refresh",
            style="yellow",
        )
