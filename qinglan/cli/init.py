"""`qinglan init`: asks for workbook, RAG, teacher, judge and machine, and writes a profile."""

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qinglan.cli.common import say
from qinglan.cli.maintenance import doctor
from qinglan.config import EMBEDDED, Price, Profile, Tenant, load_profile, parse_profile
from qinglan.errors import ConfigError
from qinglan.text import one_line

# It takes much of a second to import.
if TYPE_CHECKING:
    from qinglan.ops.init import MachineName, Role

_COLUMNS = {
    "query": "column of the questions",
    "gold": "column of the right documents' ids, - for none",
}
"""The fields whose column a user is asked for."""
_VARIABLE = "name of the environment variable with the {}'s key, if it wants one"


NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Of the profile: configs/NAME.yaml.")
]
WorkbookOption = Annotated[str | None, typer.Option(help="File or folder with the questions.")]
ColumnOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD=HEADER",
        help="Which column a field is, such as 问题=Question; may be repeated.",
    ),
]
RagUrlOption = Annotated[str | None, typer.Option(help="The RAG's address, or `embedded`.")]
KnowledgeBaseOption = Annotated[
    str | None, typer.Option(help="The knowledge base's name in the RAG.")
]
RagPresetOption = Annotated[
    str | None, typer.Option(help="How the RAG is asked; found out if not given.")
]
RagKeyOption = Annotated[
    str | None, typer.Option(help="Name of the variable with the RAG's token.")
]
DomainOption = Annotated[
    str | None, typer.Option(help="What the knowledge base is about; in the prompts.")
]
ModelOption = Annotated[str | None, typer.Option(metavar="MODEL", help="A model, or `embedded`.")]
ModelUrlOption = Annotated[str | None, typer.Option(help="Up to and including /v1.")]
ModelKeyOption = Annotated[str | None, typer.Option(help="Name of the variable with its key.")]
PriceOption = Annotated[str | None, typer.Option(metavar="IN,OUT", help="USD per million tokens.")]
MachineOption = Annotated[
    str | None, typer.Option(help="What trains: `cpu`, or `gpu1`, 2, 4, 8: 80-GB GPUs.")
]
YesOption = Annotated[
    bool, typer.Option("--yes", help="Ask nothing: take defaults and proposed columns.")
]
DoctorOption = Annotated[
    bool, typer.Option("--doctor/--no-doctor", help="Run `qinglan doctor` at the end.")
]


def init(
    name: NameArgument,
    workbook: WorkbookOption = None,
    column: ColumnOption = None,
    rag_url: RagUrlOption = None,
    kb_name: KnowledgeBaseOption = None,
    rag_preset: RagPresetOption = None,
    rag_key_env: RagKeyOption = None,
    domain: DomainOption = None,
    teacher: ModelOption = None,
    teacher_url: ModelUrlOption = None,
    teacher_key_env: ModelKeyOption = None,
    teacher_price: PriceOption = None,
    judge: ModelOption = None,
    judge_url: ModelUrlOption = None,
    judge_key_env: ModelKeyOption = None,
    judge_price: PriceOption = None,
    machine: MachineOption = None,
    student_price: PriceOption = None,
    yes: YesOption = False,
    run_doctor: DoctorOption = True,
) -> None:
    """Write a profile for your own questions, teacher and RAG; asks for what no option says."""
    from qinglan.ops import init as profiles
    from qinglan.ops.preflight.rag import fitting_preset

    path = profiles.new_path(name)
    dialogue = _Dialogue(is_terminal=sys.stdin.isatty() and not yes)
    file = dialogue.answer("--workbook", workbook, "file or folder with the questions")
    columns = _choose_columns(dialogue, column or (), file)
    rag = _rag_section(dialogue, rag_url, kb_name, rag_key_env)
    about = dialogue.answer("--domain", domain, "what the knowledge base is about", Tenant().domain)
    teacher_section = _chat_section(dialogue, "teacher", teacher, teacher_url, teacher_key_env)
    judge_section = _chat_section(dialogue, "judge", judge, judge_url, judge_key_env)
    machine_name = _machine(dialogue, machine)
    base = load_profile(profiles.BASES[machine_name])
    # The price of a model that is teacher and judge is asked for once.
    prices = dict[str, Price]()
    _add_price(prices, base, dialogue, "--teacher-price", teacher_price, teacher_section["model"])
    _add_price(prices, base, dialogue, "--judge-price", judge_price, judge_section["model"])
    # Without the option the base has the student's price, or that of a GPU's hour.
    if student_price is not None:
        prices[base.student.name] = profiles.price_of(student_price, "--student-price")

    def profile_text() -> str:
        return profiles.profile_text(
            machine_name,
            {"id": name, "domain": about},
            file,
            columns,
            {"teacher": teacher_section, "judge": judge_section},
            rag,
            prices,
        )

    if rag["url"] != EMBEDDED:
        # The RAG is asked which preset it answers to, as the profile without one would ask it.
        fitting = rag_preset or fitting_preset(parse_profile(path, profile_text())) or "qinglan"
        question = "how the RAG is asked and answers"
        rag["preset"] = dialogue.answer("--rag-preset", rag_preset, question, fitting)
        say(f"RAG preset: {rag['preset']}")
    _write_checked(path, profile_text())
    _say_variables((rag, teacher_section, judge_section))
    _say_next(path, name)
    if run_doctor:
        _run_doctor(name)
        return
    command = f"qinglan doctor --profile {name} --flow refresh"
    say(f"Check machine, files, keys and services: {command}")


@dataclass(frozen=True)
class _Dialogue:
    """Asks for what no option says, where there is a terminal to ask at."""

    is_terminal: bool

    def answer(
        self, flag: str, option: str | None, question: str, default: str | None = None
    ) -> str:
        """The option's value, else what the user answers, else the default.

        Raises ConfigError where there is none of them.
        """
        text = option
        if text is None and self.is_terminal:
            text = str(typer.prompt(question, default=default, show_default=bool(default)))
        if text is None:
            text = default
        if text is None:
            hint = "give it, or be asked in a terminal without --yes"
            raise ConfigError(f"{flag} is missing ({question}); {hint}")
        return text.strip()

    def column(self, field: str, proposed: str) -> str:
        """The header of a field's column, "" for none."""
        if not self.is_terminal or field not in _COLUMNS:
            return proposed
        default = proposed or ("-" if field == "gold" else None)
        header = str(typer.prompt(_COLUMNS[field], default=default))
        return "" if header == "-" else header


def _choose_columns(dialogue: _Dialogue, options: Iterable[str], file: str) -> dict[str, str]:
    """The header of the column to read each field from."""
    from qinglan.data.sources.files import read_header
    from qinglan.ops import init as profiles

    header = read_header(Path(file).expanduser())
    if dialogue.is_terminal:
        say("The header has: " + ", ".join(header))
    columns = profiles.choose_columns(header, options, file, dialogue.column)
    chosen = [
        f"{profiles.default_name(field)} = {heading}"
        for field, heading in columns.items()
        if heading
    ]
    say("Columns: " + "; ".join(chosen))
    return columns


def _rag_section(
    dialogue: _Dialogue, url: str | None, kb_name: str | None, key_env: str | None
) -> dict[str, str | None]:
    address = dialogue.answer(
        "--rag-url", url, "the RAG's address that takes the POST, or embedded"
    )
    if address == EMBEDDED:
        return {"url": EMBEDDED}
    name = dialogue.answer("--kb-name", kb_name, "the RAG's name of the knowledge base", "default")
    variable = dialogue.answer("--rag-key-env", key_env, _VARIABLE.format("RAG"), "")
    return {"url": address, "kb_name": name, "api_key_env": variable or None}


def _chat_section(
    dialogue: _Dialogue, role: "Role", model: str | None, url: str | None, key_env: str | None
) -> dict[str, Any]:
    from qinglan.ops.init import chat_section

    model_name = dialogue.answer(f"--{role}", model, f"the {role}'s model, or embedded", EMBEDDED)
    if model_name == EMBEDDED:
        return chat_section(role, model_name, "", "")
    address = dialogue.answer(
        f"--{role}-url", url, f"the {role}'s address, up to and including /v1"
    )
    variable = dialogue.answer(f"--{role}-key-env", key_env, _VARIABLE.format(role), "")
    return chat_section(role, model_name, address, variable)


def _machine(dialogue: _Dialogue, option: str | None) -> "MachineName":
    """The key of what trains in `BASES`; raises ConfigError for another."""
    from qinglan.ops.init import BASES

    question = "what trains: cpu, or gpu1, gpu2, gpu4 or gpu8 of 80 GB each"
    name = dialogue.answer("--machine", option, question, "cpu")
    if name not in BASES:
        raise ConfigError(f"--machine {one_line(name)!r}: take one of {', '.join(BASES)}")
    return name


def _add_price(
    prices: dict[str, Price],
    base: Profile,
    dialogue: _Dialogue,
    flag: str,
    option: str | None,
    model: str,
) -> None:
    """Add a model's price where the option says it, or nothing else knows it."""
    from qinglan.ops.init import SIMULATORS, price_of

    is_known = model in base.prices or model in SIMULATORS.values() or model in prices
    if option is not None or not is_known:
        question = f"price of {model} in US dollars per million tokens, as IN,OUT"
        prices[model] = price_of(dialogue.answer(flag, option, question), flag)


def _write_checked(path: Path, text: str) -> None:
    """Check a profile and write it; a RAG that does not answer as it should is only said."""
    from qinglan.ops.init import check_rag

    rag_check = check_rag(path, text)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Somebody may have written one of this name meanwhile.
    with path.open("x", encoding="utf-8") as stream:
        stream.write(text)
    if rag_check.problem:
        say(f"warning: {rag_check.problem}; no run starts before that is right", style="yellow")
    else:
        say(f"RAG: {', '.join(part for part in (rag_check.detail, rag_check.note) if part)}")


def _say_variables(sections: Iterable[Mapping[str, Any]]) -> None:
    """Say which variables with keys are set."""
    variables = {str(section["api_key_env"]) for section in sections if section.get("api_key_env")}
    for variable in sorted(variables):
        is_set = os.environ.get(variable, "").strip()
        say(f"{variable}: is set" if is_set else f"{variable}: is not set; set it before a run")


def _say_next(path: Path, name: str) -> None:
    say(f"Written: {path}. Next:")
    say(f"  qinglan run refresh --profile {name} --dry-run")
    say(f"  qinglan run refresh --profile {name}")
    say(f"  qinglan run pipeline --profile {name}")


def _run_doctor(name: str) -> None:
    """Check the new profile; it stays where the doctor finds a problem."""
    try:
        doctor(name, flow="refresh")
    except ConfigError as error:
        command = f"qinglan doctor --profile {name} --flow refresh"
        say(f"{error}; correct that, then: {command}", style="yellow")
