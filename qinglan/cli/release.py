"""`qinglan release` and `qinglan lineage`: released models, and where their figures come from."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from qinglan.cli.common import ProfileOption, SetOption, facts_table, forced, out, say
from qinglan.config import Profile, load_profile
from qinglan.errors import ConfigError
from qinglan.text import NONE, count, number, plain, usd

# Each costs a second or more to import, which a rollback should not wait for.
if TYPE_CHECKING:
    from pathlib import Path

    from qinglan.registry import Registry, Released
    from qinglan.registry.approval import Approval
    from qinglan.rows import Retrieved
    from qinglan.serving.lineage import Figure, PaidCall, RowTrace, Subject

app = typer.Typer(no_args_is_help=True, help="Released models: list them, promote one, roll back.")
VersionArgument = Annotated[
    str, typer.Argument(metavar="VERSION", help="A version's number, or an alias.")
]
ReasonOption = Annotated[str, typer.Option(help="Why; kept with the version.")]


@app.command("list")
def list_versions(profile: ProfileOption = "embedded", set_: SetOption = None) -> None:
    """All versions, the newest first."""
    registry = _registry(load_profile(profile, set_ or ()))
    versions = registry.versions()
    if not versions:
        hint = "`qinglan run pipeline` does that"
        raise ConfigError(f"{registry.name}: nothing is registered yet; {hint}")
    headings = ("version", "alias", "gate", "arm", "dataset", "run", "created (UTC)")
    table = Table(*headings, box=None, pad_edge=False)
    for version in versions:
        table.add_row(
            version.version,
            ", ".join(version.aliases),
            version.verdict,
            version.arm,
            version.dataset_version,
            version.run_id,
            f"{version.created:%Y-%m-%d %H:%M}",
        )
    out.print(table)


@app.command()
def show(
    version: VersionArgument = "champion",
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """One version: what it was made of, what the gate said, what became of it."""
    released = _registry(load_profile(profile, set_ or ())).named(version)
    if released.weights == "mlflow":
        in_mlflow = "with the weights"
    else:
        in_mlflow = "without the weights, for their size"
    facts = [
        ("version", f"{released.version} of {released.name}"),
        ("alias", ", ".join(released.aliases) or NONE),
        ("gate", f"{released.verdict}: {released.sentence}"),
        ("arm", released.arm),
        ("base model", released.base_model),
        ("recipe", f"{released.recipe} {released.recipe_version}"),
        ("prompt", released.prompt_sha256[:12]),
        ("dataset version", released.dataset_version or NONE),
        ("run", released.run_id),
        ("MLflow run", released.mlflow_run_id),
        ("weights", str(released.folder)),
        ("in MLflow", in_mlflow),
        ("sha256", released.sha256),
    ]
    facts += [("history", line) for line in released.history]
    out.print(facts_table(facts))


@app.command()
def promote(
    version: VersionArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Also one that the gate did not pass.")
    ] = False,
    reason: ReasonOption = "",
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Make a version the champion; the champion becomes the previous one."""
    force_reason = forced(force, reason)
    registry = _registry(load_profile(profile, set_ or ()))
    version_number = registry.named(version).version
    _say_aliases(registry, registry.promote(version_number, force_reason=force_reason))


@app.command()
def rollback(
    reason: ReasonOption = "by hand", profile: ProfileOption = "embedded", set_: SetOption = None
) -> None:
    """Return to the champion before this one."""
    registry = _registry(load_profile(profile, set_ or ()))
    _say_aliases(registry, registry.roll_back(reason))


@app.command()
def approve(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's id, a unique prefix, or `latest`.")
    ],
    reviewer: Annotated[str, typer.Option(help="Your name; kept with the version.")],
    refuse: Annotated[bool, typer.Option("--refuse", help="Do not release it.")] = False,
    comment: Annotated[str, typer.Option(help="Why; kept with the version.")] = "",
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Answer a run that waits for a person, or one that nobody answered in time."""
    from qinglan.ops.prefect.approval import answer
    from qinglan.registry.approval import Approval, Waiting
    from qinglan.runs.run import find_run, is_running

    loaded = load_profile(profile, set_ or ())
    directory = find_run(loaded.paths.runs, run)
    approval = Approval(approve=not refuse, reviewer=reviewer, comment=comment)
    waiting = Waiting.read(directory / "gate")
    if not waiting:
        registry, version = _decide_late(loaded, directory, approval)
        say(f"version {version.version} of {registry.name}: {approval.found.render()}")
        _say_aliases(registry, version)
        return
    if not is_running(directory):
        problem = "its process has ended while it waited, so nobody takes the answer"
        hint = "run the same command again, and answer when it asks"
        raise ConfigError(f"run {directory.name}: {problem}; {hint}")
    answer(waiting, approval, loaded.paths.state)
    say(f"run {directory.name} goes on: {approval.found.render()}")


def lineage(
    subject: Annotated[
        str, typer.Argument(metavar="VERSION|RUN", help="A number, alias, or run's id.")
    ] = "champion",
    metric: Annotated[
        str | None, typer.Option(help="One of the recipe's, such as top1; else the first.")
    ] = None,
    row: Annotated[
        list[str] | None, typer.Option(help="Follow this row; may be given several times.")
    ] = None,
    worst: Annotated[
        int, typer.Option(min=0, help="Without --row: follow that many of the lowest rows.")
    ] = 2,
    arm: Annotated[
        str | None, typer.Option(help="Of a run; the gate's challenger if not given.")
    ] = None,
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Follow a figure back: version → run → rows → workbook cell and paid calls."""
    from qinglan.serving.lineage import figure_of, rows_behind, subject_of

    loaded = load_profile(profile, set_ or ())
    evaluated_arm = subject_of(loaded, subject, arm)
    figure = figure_of(loaded, evaluated_arm, metric)
    _print_figure(evaluated_arm, figure)
    for trace in rows_behind(loaded, evaluated_arm, figure.metric, tuple(row or ()), worst):
        out.print()
        _print_row(evaluated_arm, figure, trace)
    # Last, so that the rows are on the screen which don't give the figure.
    if not figure.agrees:
        figures = f"reported {figure.reported}, but its rows give {figure.recomputed}"
        problem = f"{figures}; evaluation.json was not made of these rows"
        raise ConfigError(f"{evaluated_arm.arm}/{figure.metric}: {problem}")


def _print_figure(subject: "Subject", figure: "Figure") -> None:
    """Print a figure beside what its rows give, and the files and the version behind it."""
    facts: list[tuple[str, str | Text]] = []
    version = subject.released
    if version:
        alias = f" ({', '.join(version.aliases)})" if version.aliases else ""
        facts += [
            ("version", f"{version.version}{alias} of {version.name}"),
            ("weights", f"{version.folder}, sha256 {version.sha256[:12]}"),
            ("gate", f"{version.verdict}: {version.sentence}"),
            ("dataset", f"version {version.dataset_version}"),
        ]
    stage = "evaluate"
    if figure.stage.run_id != subject.run.name:
        stage += f", reused from run {figure.stage.run_id}"
    rows = f"{count(figure.rows)} of {count(figure.of)} rows"
    verdict = "the same" if figure.agrees else "NOT the same"
    recomputed = f"{number(figure.recomputed, 6)}, mean over {rows}: {verdict}"
    facts += [
        ("run", subject.run.name),
        ("stage", stage),
        ("reported", f"{subject.arm}/{figure.metric} = {number(figure.reported, 6)}"),
        ("recomputed", Text(recomputed, "" if figure.agrees else "bold red")),
        ("rows", str(figure.file)),
    ]
    out.print(facts_table(facts))


def _print_row(subject: "Subject", figure: "Figure", trace: "RowTrace") -> None:
    """Print one row behind a figure, with what was retrieved, judged and paid for it."""
    row = trace.row
    entry = trace.entry
    retrieved = entry.retrieved
    if retrieved:
        passages = _first_passages(retrieved)
    else:
        passages = "" if entry.measured else f"failed: {entry.reason}"
    rank = ""
    if retrieved and row.gold_id:
        rank = str(retrieved.rank(row.gold_id) or "missed")
    scores = ", ".join(number(score, 2) for score in entry.judge_scores)
    teacher = ""
    if trace.teacher:
        teacher = trace.teacher.text or f"failed: {trace.teacher.reason}"
    facts = {
        "row": f"{row.id}: {figure.metric} = {number(trace.value)}",
        "source": row.source,
        "question": row.query,
        "profile": row.profile,
        "history": row.history,
        **row.inputs,
        "gold document": row.gold_id or (NONE if retrieved else ""),
        subject.arm: entry.text or f"failed: {entry.reason}",
        "parts": ", ".join(f"{name} {plain(value)}" for name, value in (entry.parts or {}).items()),
        "retrieved": passages,
        "gold document's rank": rank,
        "judge": scores or number(entry.judge_score, 2),
        "teacher": teacher,
    }
    calls = [(f"{paid.role}'s call", _line_about_call(paid)) for paid in trace.paid]
    out.print(facts_table([*facts.items(), *calls]))


def _first_passages(retrieved: "Retrieved") -> str:
    """The first three passages, with their scores and, where there are any, titles."""
    # A RAG need not give titles.
    titles = [*retrieved.titles[:3], "", "", ""]
    passages: list[str] = []
    for document, score, title in zip(
        retrieved.ids[:3], retrieved.scores[:3], titles, strict=False
    ):
        passages.append(f"{len(passages) + 1}. {document} {number(score)} {title}")
    return "; ".join(passages)


def _line_about_call(paid: "PaidCall") -> str:
    """A line about a paid call: its time, tokens and cost."""
    call = paid.call
    if call is None:
        return f"{paid.request[:12]}: not in this site's ledger"
    paid_at = "?"
    if paid.at_s:
        paid_at = datetime.fromtimestamp(paid.at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    tokens = f"{count(call.prompt_tokens)} + {count(call.completion_tokens)} tokens"
    return f"{paid_at}, {call.model}, {tokens}, {usd(call.cost_usd)}, request {paid.request}"


def _decide_late(
    profile: Profile, directory: "Path", approval: "Approval"
) -> "tuple[Registry, Released]":
    """Apply an approval that came after the flow had stopped waiting for it."""
    from qinglan.evaluation.models import Decision
    from qinglan.registry.approval import decided_by, lacks_only_approval
    from qinglan.runs.run import stage_of

    decision = stage_of(directory, "gate").load("decision", Decision)
    if not lacks_only_approval(decision):
        problem = f"waits for no approval; the gate said {decision.verdict}: {decision.sentence}"
        raise ConfigError(f"run {directory.name}: {problem}")
    registry = _registry(profile)
    registered = stage_of(directory, "register").details["released"]
    if registered["name"] != registry.name:
        problem = f"its model is {registered['name']}, and this profile's is {registry.name}"
        hint = "give --profile and --set as that run had them"
        raise ConfigError(f"run {directory.name}: {problem}; {hint}")
    version = registry.version(registered["version"])
    # An earlier approval may have been noted, and ended before it set the alias.
    is_half_done = (
        approval.approve and version.verdict == "promote" and not version.alias_is_decided
    )
    if version.verdict != "undecided" and not is_half_done:
        problem = f"version {version.version} is already decided: {version.sentence}"
        raise ConfigError(f"run {directory.name}: {problem}")
    if not is_half_done:
        registry.redecide(version.version, decided_by(decision, approval))
    decided = registry.assign_alias(version.version, profile.release.promote, decision.champion)
    return registry, decided


def _registry(profile: Profile) -> "Registry":
    from qinglan.registry import registry_of

    return registry_of(profile)


def _say_aliases(registry: "Registry", version: "Released") -> None:
    numbers = registry.aliases()
    aliases = ", ".join(f"{alias} {version_number}" for alias, version_number in numbers.items())
    say(f"{registry.name}: {aliases or 'no alias is set'}")
    if not version.aliases and version.history:
        say(f"version {version.version}: {version.history[-1]}")
