"""`qinglan release` and `qinglan lineage`: which model serves, which served before, and where its
figures come from."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from qinglan.cli.common import ProfileOption, SetOption, facts_table, forced, out, say
from qinglan.config import Profile, load_profile
from qinglan.errors import ConfigError
from qinglan.text import NONE, count, number, plain, usd

if TYPE_CHECKING:  # each costs a second or more to import, which a rollback should not wait for
    from pathlib import Path

    from qinglan.registry import Registry, Released
    from qinglan.registry.approval import Approval
    from qinglan.serving.lineage import Figure, RowTrace, Subject

app = typer.Typer(no_args_is_help=True, help="Released models: list them, promote one, roll back.")
VersionArgument = Annotated[
    str, typer.Argument(metavar="VERSION", help="A version's number, or an alias.")
]
ReasonOption = Annotated[str, typer.Option(help="Why; kept with the version.")]


@app.command("list")
def list_versions(profile: ProfileOption = "embedded", set_: SetOption = None) -> None:
    """All versions, the newest first."""
    registry = _registry(load_profile(profile, set_ or ()))
    if not (versions := registry.versions()):
        raise ConfigError(
            f"{registry.name}: nothing is registered yet; `qinglan run pipeline` does that"
        )
    table = Table(
        "version",
        "alias",
        "gate",
        "arm",
        "dataset",
        "run",
        "created (UTC)",
        box=None,
        pad_edge=False,
    )
    for version in versions:
        cells = (version.version, ", ".join(version.aliases), version.verdict, version.arm)
        table.add_row(
            *cells, version.dataset_version, version.run_id, f"{version.created:%Y-%m-%d %H:%M}"
        )
    out.print(table)


@app.command()
def show(
    version: VersionArgument = "champion",
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """One version: what it was made of, what the gate said, what became of it."""
    found = _registry(load_profile(profile, set_ or ())).named(version)
    facts = {
        "version": f"{found.version} of {found.name}",
        "alias": ", ".join(found.aliases) or NONE,
        "gate": f"{found.verdict}: {found.sentence}",
        "arm": found.arm,
        "base model": found.base_model,
        "recipe": f"{found.recipe} {found.recipe_version}",
        "prompt": found.prompt_sha256[:12],
        "dataset version": found.dataset_version or NONE,
        "run": found.run_id,
        "MLflow run": found.mlflow_run_id,
        "weights": str(found.folder),
        "in MLflow": "with the weights"
        if found.weights == "mlflow"
        else "without the weights, for their size",
        "sha256": found.sha256,
    }
    out.print(facts_table([*facts.items(), *(("history", line) for line in found.history)]))


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
    force_reason, registry = forced(force, reason), _registry(load_profile(profile, set_ or ()))
    _say_aliases(
        registry, registry.promote(registry.named(version).version, force_reason=force_reason)
    )


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
    word = Approval(approve=not refuse, reviewer=reviewer, comment=comment)
    if waiting := Waiting.read(directory / "gate"):
        if not is_running(directory):
            problem = "its process has ended while it waited, so nobody takes the answer"
            raise ConfigError(
                f"run {directory.name}: {problem}; run the same command again, and answer when it asks"
            )
        answer(waiting, word, loaded.paths.state)
        say(f"run {directory.name} goes on: {word.found.render()}")
        return
    registry, version = _decided_late(loaded, directory, word)
    say(f"version {version.version} of {registry.name}: {word.found.render()}")
    _say_aliases(registry, version)


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
    found = subject_of(loaded, subject, arm)
    figure = figure_of(loaded, found, metric)
    _print_figure(found, figure)
    for trace in rows_behind(loaded, found, figure.metric, tuple(row or ()), worst):
        out.print()
        _print_row(found, figure, trace)
    if not figure.agrees:
        differ = f"reported {figure.reported}, but its rows give {figure.recomputed}"
        raise ConfigError(
            f"{found.arm}/{figure.metric}: {differ}; evaluation.json was not made of these rows"
        )


def _print_figure(subject: "Subject", figure: "Figure") -> None:
    facts: list[tuple[str, str | Text]] = []
    if version := subject.released:
        alias = f" ({', '.join(version.aliases)})" if version.aliases else ""
        facts += [
            ("version", f"{version.version}{alias} of {version.name}"),
            ("weights", f"{version.folder}, sha256 {version.sha256[:12]}"),
            ("gate", f"{version.verdict}: {version.sentence}"),
            ("dataset", f"version {version.dataset_version}"),
        ]
    reused = (
        f", reused from run {figure.stage.run_id}"
        if figure.stage.run_id != subject.run.name
        else ""
    )
    verdict = "the same" if figure.agrees else "NOT the same"
    mean = f"{number(figure.recomputed, 6)}, mean over {count(figure.rows)} of {count(figure.of)} rows: {verdict}"
    facts += [
        ("run", subject.run.name),
        ("stage", f"evaluate{reused}"),
        ("reported", f"{subject.arm}/{figure.metric} = {number(figure.reported, 6)}"),
        ("recomputed", Text(mean, "" if figure.agrees else "bold red")),
        ("rows", str(figure.file)),
    ]
    out.print(facts_table(facts))


def _print_row(subject: "Subject", figure: "Figure", trace: "RowTrace") -> None:
    row, entry, found = trace.row, trace.entry, trace.entry.retrieved
    retrieved = "" if entry.measured else f"failed: {entry.reason}"
    if found:
        first = enumerate(
            zip(found.ids[:3], found.scores[:3], (*found.titles[:3], "", "", ""), strict=False), 1
        )
        retrieved = "; ".join(
            f"{n}. {document} {number(score)} {title}" for n, (document, score, title) in first
        )
    facts = {
        "row": f"{row.id}: {figure.metric} = {number(trace.value)}",
        "source": row.source,
        "question": row.query,
        "profile": row.profile,
        "history": row.history,
        **row.inputs,
        "gold document": row.gold_id or (NONE if found else ""),
        subject.arm: entry.text or f"failed: {entry.reason}",
        "parts": ", ".join(f"{name} {plain(value)}" for name, value in (entry.parts or {}).items()),
        "retrieved": retrieved,
        "gold document's rank": str(found.rank(row.gold_id) or "missed")
        if found and row.gold_id
        else "",
        "judge": ", ".join(number(score, 2) for score in entry.judge_scores)
        or number(entry.judge_score, 2),
        "teacher": (trace.teacher.text or f"failed: {trace.teacher.reason}")
        if trace.teacher
        else "",
    }
    calls = []
    for paid in trace.paid:
        text = f"{paid.request[:12]}: not in this site's ledger"
        if call := paid.call:
            at = (
                datetime.fromtimestamp(paid.at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
                if paid.at_s
                else "?"
            )
            tokens = f"{count(call.prompt_tokens)} + {count(call.completion_tokens)} tokens"
            text = f"{at}, {call.model}, {tokens}, {usd(call.cost_usd)}, request {paid.request}"
        calls.append((f"{paid.role}'s call", text))
    out.print(facts_table([*facts.items(), *calls]))


def _decided_late(
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
        raise ConfigError(
            f"run {directory.name}: {problem}; give --profile and --set as that run had them"
        )
    version = registry.version(registered["version"])
    unfinished = version.verdict == "promote" and not version.alias_is_decided and approval.approve
    if version.verdict != "undecided" and not unfinished:
        raise ConfigError(
            f"run {directory.name}: version {version.version} is already decided: {version.sentence}"
        )
    if not unfinished:
        registry.redecide(version.version, decided_by(decision, approval))
    return registry, registry.assign_alias(
        version.version, profile.release.promote, decision.champion
    )


def _registry(profile: Profile) -> "Registry":
    from qinglan.registry import registry_of

    return registry_of(profile)


def _say_aliases(registry: "Registry", version: "Released") -> None:
    listed = ", ".join(f"{alias} {version_id}" for alias, version_id in registry.aliases().items())
    say(f"{registry.name}: {listed or 'no alias is set'}")
    if not version.aliases and version.history:
        say(f"version {version.version}: {version.history[-1]}")
