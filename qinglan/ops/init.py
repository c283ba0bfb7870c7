"""A profile for the user's own questions, teacher and RAG (`qinglan init`): what differs from a
shipped one it extends.

Headers and names come from outside, so they reach the file through YAML's own writer, and no
comment holds any.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel

from qinglan.config import EMBEDDED, Columns, Price, load_profile, parse_profile, profile_names
from qinglan.data.sources.records import FIELDS, listed
from qinglan.errors import ConfigError, WorkbookError
from qinglan.ops.checks import Check
from qinglan.ops.preflight import plan_profile_checks
from qinglan.rows import normalise
from qinglan.text import one_line

Values = dict[str, Any]
Role = Literal["teacher", "judge"]
AskColumn = Callable[[str, str], str]
"""Gets a field and the header that is proposed for it, "" if none; returns the one to take."""
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
    "query": "用户问题 提问 咨询问题 咨询内容 问题描述 学员问题 用户提问 问句 query question user_question user_query",
    "profile": "画像 用户信息 学员画像 profile user_profile persona",
    "history": "历史 历史对话 对话历史 上下文 history chat_history context",
    "gold": "文档 文档id 文档编号 标准文档id gold gold_id doc_id document_id",
    "split": "数据划分 split",
    "intent": "意图分类 intent",
    "pool": "pool",
}
"""What other workbooks call a field's column, beside its default name."""


def new_path(name: str) -> Path:
    """Where the profile will be; ConfigError where the name is none, or taken."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", name):
        raise ConfigError(f"profile name {one_line(name)!r}: use letters, digits, _ and -")
    path = Path("configs") / f"{name}.yaml"
    if path.exists() or name in profile_names():
        raise ConfigError(
            f"{path}: there is a profile of this name already; choose another name, or edit that one"
        )
    return path


def choose_columns(
    header: Sequence[str], named: Iterable[str], where: str, ask: AskColumn
) -> dict[str, str]:
    """Header by field, "" where none is to be read: as the user named them (`FIELD=HEADER`), else
    by usual names."""
    labels = {default_name(field): field for field in FIELDS} | {field: field for field in FIELDS}
    chosen: dict[str, str] = {}
    shown = listed([one_line(name) for name in header]) or "nothing"

    def choose(field: str, column: str) -> None:
        if column not in header:
            near = difflib.get_close_matches(column, header, n=1)
            hint = f"; nearest: {one_line(near[0])}" if near else ""
            raise WorkbookError(
                f"{where}: no column {one_line(column)!r}; its header has {shown}{hint}"
            )
        chosen[field] = column

    for option in named:
        label, separator, column = option.partition("=")
        field = labels.get(label.strip())
        if not separator or field is None:
            hint = f"write FIELD=HEADER, FIELD being one of {', '.join(labels)}"
            raise ConfigError(f"--column {one_line(option)!r}: {hint}")
        choose(field, column)
    for field in (each for each in _OTHER_NAMES if each not in chosen):
        usual = {normalise(name) for name in (default_name(field), *_OTHER_NAMES[field].split())}
        found = [
            column
            for column in header
            if normalise(column) in usual and column not in chosen.values()
        ]
        proposed = default_name(field) if default_name(field) in found else next(iter(found), "")
        if column := ask(field, proposed):
            choose(field, column)
        elif proposed:
            chosen[field] = ""
    if not chosen.get("query"):
        hint = f"say it with --column {default_name('query')}=HEADER"
        raise WorkbookError(
            f"{where}: which column holds the questions? Its header has {shown}; {hint}"
        )
    return chosen


def price_of(text: str, flag: str) -> Price:
    try:
        given, made = (float(part) for part in text.split(","))
    except ValueError:
        given = made = math.nan
    if not (0 <= given < math.inf and 0 <= made < math.inf):
        raise ConfigError(
            f"{flag} {text!r}: write IN,OUT in US dollars per million tokens, such as 1.25,10"
        )
    return Price(input_per_million_usd=given, output_per_million_usd=made)


def chat_section(role: Role, model: str, url: str, key_env: str) -> Values:
    """The section of a teacher or judge; a model called `embedded` is the simulator."""
    if model == EMBEDDED:
        return {"base_url": EMBEDDED, "model": SIMULATORS[role], "api_key_env": None}
    # A reasoning model's thoughts count towards max_tokens.
    return {
        "base_url": url,
        "model": model,
        "api_key_env": key_env or None,
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
    base, on_cpu, simulated = (
        load_profile(base_name),
        base_name == EMBEDDED,
        chats["teacher"]["base_url"] == EMBEDDED,
    )
    wanted = {field: columns.get(field, Columns.model_fields[field].default) for field in FIELDS}
    renamed = {
        field: column
        for field, column in wanted.items()
        if column != getattr(base.data.columns, field)
    }
    gate: dict[str, Any] = {}
    if on_cpu and not simulated:  # its limits are for a teacher that answers within milliseconds
        gate = {"max_latency_ratio": 1.0, "max_latency_p95_ms": None}
    elif simulated and not on_cpu:
        gate = {"max_latency_ratio": None}
    simulators = {str(chat["model"]) for chat in chats.values() if chat["base_url"] == EMBEDDED}
    more = {
        model: load_profile(EMBEDDED).prices[model]
        for model in sorted(simulators - base.prices.keys())
    }
    priced = {
        model: price.model_dump(exclude_unset=True) for model, price in {**more, **prices}.items()
    }
    data = {"workbook": workbook} | ({"columns": renamed} if renamed else {})
    asked: Values = {role: _changed(chat, getattr(base, role)) for role, chat in chats.items()}
    trainer = {} if on_cpu else {"gpus_per_node": int(machine.removeprefix("gpu"))}
    parts: dict[str, dict[str, Any]] = {
        "Whose questions these are, and what they are about, as the prompts say it.": {
            "tenant": tenant
        },
        "Of the columns, those with other names than usual (docs/reference/file-formats.md).": {
            "data": data
        },
        "docs/how-to/rag.md says what the service takes and answers.": {
            "rag": _changed(rag, base.rag)
        },
        "`embedded` is a simulator. A key stays in the environment, in the variable that api_key_env names.": asked,
        "How slow the student may be beside the teacher.": {"gate": gate},
        "trainer.python is the trainer's interpreter (docs/how-to/gpus.md).": {"trainer": trainer},
        "US dollars per million tokens; the gate's cost rule compares by them.": {"prices": priced},
    }
    lines = [
        f"# Made by `qinglan init`. What is not here is as in configs/{base_name}.yaml.",
        "# docs/reference/configuration.md lists every setting.",
        f"extends: {base_name}",
    ]
    for comment, section in parts.items():
        if not any(section.values()):
            continue
        text = yaml.safe_dump(
            section, allow_unicode=True, sort_keys=False, default_flow_style=None, width=118
        )
        lines += ["", f"# {comment}", text.rstrip("\n")]
    return "\n".join(lines) + "\n"


def check_rag(path: Path, text: str) -> Check:
    """Check the profile before it is written; what its RAG answers is only told, other mistakes are
    raised."""
    planned = {
        each.name: each for each in plan_profile_checks(parse_profile(path, text), "refresh")
    }
    if problem := planned["workbook"].run()[0].problem:
        raise WorkbookError(problem)
    return planned["rag"].run()[0].with_hint()


def _changed(section: Values, base: BaseModel) -> Values:
    """Without what is null there as well."""
    return {
        key: value
        for key, value in section.items()
        if value is not None or getattr(base, key) is not None
    }


def default_name(field: str) -> str:
    """What its column is usually called; that of dialogues has no default, as it is read only where
    it is named."""
    return str(Columns.model_fields[field].default or "对话")
