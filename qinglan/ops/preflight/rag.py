"""The check of the RAG: what it answers to a few questions, or the simulator's documents."""

from contextlib import suppress
from itertools import islice
from pathlib import Path

from qinglan.clients.contract import find_preset, probe_rag
from qinglan.config import EMBEDDED, Profile, RagMapping, RagPreset
from qinglan.data.forgotten import Tombstones
from qinglan.data.workbook import read_rows
from qinglan.errors import ConfigError, QinglanError, RetrievalError, WorkbookError
from qinglan.ops.checks import Check, run_check
from qinglan.recipes import get_recipe
from qinglan.simulators.domains import domain_for

_PROBED_ROWS = 200
"""First rows of the workbook, of which the questions are that the RAG is asked."""


def check_rag(profile: Profile) -> Check:
    """Ask the RAG three or four times, or read the simulator's documents."""
    rag = profile.rag
    if rag.url == EMBEDDED:
        return run_check("rag", rag.url, lambda: _check_knowledge_base(profile))
    try:
        about_rewrite, *findings = probe_rag(rag, profile.tenant.id, _probe_questions(profile))
    except RetrievalError as error:
        # Since the address answers, it may be that of another product.
        return Check("rag", rag.url, f"{error}{_advice_on_preset(profile)}")
    except QinglanError as error:
        return Check("rag", rag.url, str(error))
    if about_rewrite.kind == "ignored":
        # A run would measure nothing, so it must not start.
        return Check("rag", rag.url, f"rag {rag.url}: {about_rewrite.text}")
    detail = rag.url
    if about_rewrite.kind == "honoured":
        detail = f"{rag.url} ({about_rewrite.text})"
    else:
        findings.insert(0, about_rewrite)
    note = "; ".join(finding.text for finding in findings)
    return Check("rag", detail, note=note or None)


def fitting_preset(profile: Profile) -> RagPreset | None:
    """The preset of `rag.preset` by which the RAG's address answers, if any."""
    with suppress(QinglanError):
        return find_preset(profile.rag, profile.tenant.id, _probe_questions(profile))
    return None


def _advice_on_preset(profile: Profile) -> str:
    """The end of a message: which preset to set, empty where none fits."""
    preset = fitting_preset(profile)
    if not preset:
        return ""
    advice = f"; the address answers as {preset} does: set rag.preset: {preset}"
    if preset == profile.rag.preset:
        advice += ", and leave rag.mapping out"
    return advice


def _check_knowledge_base(profile: Profile) -> None:
    """Read the documents of the simulated RAG."""
    rag = profile.rag
    if rag.mapping != RagMapping():
        raise ConfigError(
            "rag.preset: the simulator keeps Qinglan's own contract; "
            "set `qinglan`, without rag.mapping"
        )
    if rag.knowledge_base == EMBEDDED:
        domain_for(profile, "rag.knowledge_base")
        return
    path = Path(rag.knowledge_base)
    if not path.is_file():
        raise ConfigError(
            f"rag.knowledge_base: {rag.knowledge_base}: no such file; give a JSONL file"
        )
    # Only the simulators need the retriever and its word lists.
    from qinglan.simulators.retriever import load_documents

    load_documents(path)


def _probe_questions(profile: Profile) -> list[str]:
    """Questions of the user's own to probe the RAG with.

    There are none of the built-in sample, of a database, or of a workbook that can't be read.
    """
    data = profile.data
    if data.workbook == EMBEDDED or data.sql is not None:
        return []
    inputs = get_recipe(profile.recipe).INPUTS
    forgotten = Tombstones.read(profile.paths.state)
    path = Path(data.workbook)
    try:
        rows = read_rows(path, data, profile.tenant, inputs=inputs, forgotten=forgotten)
        first_rows = list(islice(rows, _PROBED_ROWS))
    except WorkbookError:
        # The workbook has a check of its own.
        return []
    return [row.query for row in first_rows if row.status == "ok"]
