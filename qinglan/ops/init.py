"""A profile for the user's own questions, teacher and RAG (`qinglan init`).

The file extends a shipped profile and holds only what differs from it. Headers and names come from
outside, so they reach the file through YAML's own writer, and no comment holds any.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel

from qinglan.config import (
    EMBEDDED,
    Columns,
    Price,
    Profile,
    load_profile,
    parse_profile,
    profile_names,
)
from qinglan.data.sources.records import FIELDS, listed
from qinglan.errors import ConfigError, WorkbookError
from qinglan.ops.checks import Check
from qinglan.ops.preflight import plan_profile_checks
from qinglan.rows import normalise
from qinglan.text import nearest_names, one_line

Values = dict[str, Any]
Role = Literal["teacher", "judge"]
AskColumn = Callable[[str, str], str]
"""Gets a field and the header that is proposed for it, "" if none; returns the header to take."""
MachineName = Literal["cpu", "gpu1", "gpu2", "gpu4", "gpu8"]
BASES: dict[MachineName, str] = {
    "cpu": EMBEDDED,
    "gpu1": "chengla",
    "gpu2": "chengla",
    "gpu4": "fivedoctors_4gpus",
    "gpu8": "fivedoctors",
}
"""The shipped profile whose student and training settings fit a machine: a tiny model, Qwen3-8B,
Qwen3-32B."""
SIMULATORS: dict[Role, str] = {"teacher": "simulated-rewriter", "judge": "simulated-judge"}
_OTHER_NAMES = {
    "query": (
        "用户问题 提问 咨询问题 咨询内容 问题描述 学员问题 用户提问 问句 "
        "query question user_question user_query"
    ),
    "profile": "画像 用户信息 学员画像 profile user_profile persona",
    "history": "历史 历史对话 对话历史 上下文 history chat_history context",
    "gold": "文档 文档id 文档编号 标准文档id gold gold_id doc_id document_id",
    "split": "数据划分 split",
    "intent": "意图分类 intent",
    "pool": "pool",
}
"""Names by which other workbooks call a field's column, beside its default name."""
_YAML_WIDTH = 118


def new_path(name: str) -> Path:
    """The path of the new profile; ConfigError where the name is none, or taken."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", name):
        raise ConfigError(f"profile name {one_line(name)!r}: use letters, digits, _ and -")
    path = Path("configs") / f"{name}.yaml"
    if path.exists() or name in profile_names():
        raise ConfigError(
            f"{path}: there is a profile of this name already; "
            "choose another name, or edit that one"
        )
    return path


def choose_columns(
    header: Sequence[str], options: Iterable[str], where: str, ask: AskColumn
) -> dict[str, str]:
    """The header to read each field from, "" where none is to be read.

    Fields are read as the user named them by options (`FIELD=HEADER`), others by usual names.
    """
    columns: dict[str, str] = {}
    for option in options:
        field, column = _parse_option(option)
        columns[field] = _column_in(header, column, where)
    for field in _OTHER_NAMES:
        if field in columns:
            continue
        proposed = _usual_column(field, header, columns.values())
        column = ask(field, proposed)
        if column:
            columns[field] = _column_in(header, column, where)
        elif proposed:
            columns[field] = ""
    if not columns.get("query"):
        hint = f"say it with --column {default_name('query')}=HEADER"
        raise WorkbookError(
            f"{where}: which column holds the questions? Its header has {_names(header)}; {hint}"
        )
    return columns


def price_of(text: str, flag: str) -> Price:
    """The price that a user gave as `IN,OUT`, in US dollars per million tokens."""
    try:
        input_usd, output_usd = map(float, text.split(","))
        is_price = 0 <= input_usd < math.inf and 0 <= output_usd < math.inf
    except ValueError:
        is_price = False
    if not is_price:
        raise ConfigError(
            f"{flag} {text!r}: write IN,OUT in US dollars per million tokens, such as 1.25,10"
        )
    return Price(input_per_million_usd=input_usd, output_per_million_usd=output_usd)


def chat_section(role: Role, model: str, url: str, key_env: str) -> Values:
    """The section of a teacher or judge; a model called `embedded` is the simulator."""
    if model == EMBEDDED:
        return {"base_url": EMBEDDED, "model": SIMULATORS[role], "api_key_env": None}
    return {
        "base_url": url,
        "model": model,
        "api_key_env": key_env or None,
        # A reasoning model's thoughts count towards it.
        "max_tokens": 2048,
        "timeout_s": 120,
    }


def profile_text(
    machine: MachineName,
    tenant: Values,
    workbook: str,
    columns: Mapping[str, str],
    chats: Mapping[Role, Values],
    rag: Values,
    prices: Mapping[str, Price],
) -> str:
    """The profile as a commented file; `columns` are headers by field, `prices` go by model."""
    base_name = BASES[machine]
    base = load_profile(base_name)
    data: Values = {"workbook": workbook}
    renamed_columns = _renamed_columns(columns, base)
    if renamed_columns:
        data["columns"] = renamed_columns
    chat_sections: Values = {}
    for role, chat in chats.items():
        chat_sections[role] = _differing(chat, getattr(base, role))
    trainer: Values = {}
    if base_name != EMBEDDED:
        trainer["gpus_per_node"] = int(machine.removeprefix("gpu"))
    sections_by_comment: dict[str, Values] = {
        "Whose questions these are, and what they are about, as the prompts say it.": {
            "tenant": tenant
        },
        "Of the columns, those with other names than usual (docs/reference/file-formats.md).": {
            "data": data
        },
        "docs/how-to/rag.md says what the service takes and answers.": {
            "rag": _differing(rag, base.rag)
        },
        (
            "`embedded` is a simulator. "
            "A key stays in the environment, in the variable that api_key_env names."
        ): chat_sections,
        "How slow the student may be beside the teacher.": {
            "gate": _latency_limits(base_name, chats["teacher"])
        },
        "trainer.python is the trainer's interpreter (docs/how-to/gpus.md).": {"trainer": trainer},
        "US dollars per million tokens; the gate's cost rule compares by them.": {
            "prices": _price_values(prices, chats, base)
        },
    }
    lines = [
        f"# Made by `qinglan init`. What is not here is as in configs/{base_name}.yaml.",
        "# docs/reference/configuration.md lists every setting.",
        f"extends: {base_name}",
    ]
    for comment, sections in sections_by_comment.items():
        if any(sections.values()):
            lines += ["", f"# {comment}", _yaml(sections)]
    return "\n".join(lines) + "\n"


def check_rag(path: Path, text: str) -> Check:
    """Check the profile before it is written; a problem of its RAG is only told, others raised."""
    profile = parse_profile(path, text)
    checks = {planned.name: planned for planned in plan_profile_checks(profile, "refresh")}
    (workbook_check,) = checks["workbook"].run()
    if workbook_check.problem:
        raise WorkbookError(workbook_check.problem)
    (rag_check,) = checks["rag"].run()
    return rag_check.with_hint()


def default_name(field: str) -> str:
    """The usual name of a field's column."""
    # That of dialogues has no default, as it is read only where it is named.
    return str(Columns.model_fields[field].default or "对话")


def _parse_option(option: str) -> tuple[str, str]:
    """Field and header of `FIELD=HEADER`, where the field may be named as its column usually is."""
    fields = {default_name(field): field for field in FIELDS}
    fields.update({field: field for field in FIELDS})
    label, separator, column = option.partition("=")
    field = fields.get(label.strip())
    if not separator or field is None:
        hint = f"write FIELD=HEADER, FIELD being one of {', '.join(fields)}"
        raise ConfigError(f"--column {one_line(option)!r}: {hint}")
    return field, column


def _column_in(header: Sequence[str], column: str, where: str) -> str:
    """The column, which must be in the header."""
    if column in header:
        return column
    near = nearest_names(column, header)
    hint = f"; nearest: {one_line(near[0])}" if near else ""
    raise WorkbookError(
        f"{where}: no column {one_line(column)!r}; its header has {_names(header)}{hint}"
    )


def _usual_column(field: str, header: Sequence[str], taken_columns: Collection[str]) -> str:
    """The header's name for a field by usual names, the default one first; "" if there is none."""
    default = default_name(field)
    usual_names = {normalise(name) for name in (default, *_OTHER_NAMES[field].split())}
    matches: list[str] = []
    for column in header:
        if normalise(column) in usual_names and column not in taken_columns:
            matches.append(column)
    if default in matches:
        return default
    return matches[0] if matches else ""


def _names(header: Sequence[str]) -> str:
    return listed([one_line(name) for name in header]) or "nothing"


def _renamed_columns(columns: Mapping[str, str], base: Profile) -> dict[str, str]:
    """Headers by field, where the base profile reads another one."""
    renamed: dict[str, str] = {}
    for field in FIELDS:
        column = columns.get(field, Columns.model_fields[field].default)
        if column != getattr(base.data.columns, field):
            renamed[field] = column
    return renamed


def _latency_limits(base_name: str, teacher: Values) -> Values:
    """Settings of the gate, where the base profile's limits are for another kind of teacher."""
    is_on_cpu = base_name == EMBEDDED
    is_simulated = teacher["base_url"] == EMBEDDED
    if is_on_cpu and not is_simulated:
        # The base's limits are for a teacher that answers within milliseconds.
        return {"max_latency_ratio": 1.0, "max_latency_p95_ms": None}
    if is_simulated and not is_on_cpu:
        return {"max_latency_ratio": None}
    return {}


def _price_values(
    prices: Mapping[str, Price], chats: Mapping[Role, Values], base: Profile
) -> Values:
    """Prices by model: those of the simulators that the base profile lacks, then the given ones."""
    simulators = {str(chat["model"]) for chat in chats.values() if chat["base_url"] == EMBEDDED}
    all_prices: dict[str, Price] = {}
    for model in sorted(simulators - base.prices.keys()):
        all_prices[model] = load_profile(EMBEDDED).prices[model]
    all_prices.update(prices)
    return {model: price.model_dump(exclude_unset=True) for model, price in all_prices.items()}


def _differing(section: Values, base: BaseModel) -> Values:
    """The section without the keys that are null both in it and in the base profile."""
    differing: Values = {}
    for key, value in section.items():
        if value is not None or getattr(base, key) is not None:
            differing[key] = value
    return differing


def _yaml(sections: Values) -> str:
    text = yaml.safe_dump(
        sections,
        allow_unicode=True,
        sort_keys=False,
        default_flow_style=None,
        width=_YAML_WIDTH,
    )
    return text.rstrip("\n")
