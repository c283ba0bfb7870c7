"""`qinglan serve` and `qinglan canary`: the champion's endpoint, and a share of its traffic for another model."""

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from qinglan.cli.common import ProfileOption, SetOption, forced, say
from qinglan.config import Profile, load_profile
from qinglan.errors import ConfigError

if TYPE_CHECKING:  # each costs much of a second to import, which --help and other commands need not wait for
    from qinglan.serving.canary_observer import CanaryVerdict
    from qinglan.serving.registry import Registry

canary_app = typer.Typer(no_args_is_help=True, help="Try a released model on a share of the live traffic.")

VersionArgument = Annotated[str, typer.Argument(metavar="VERSION", help="As in `qinglan release list`.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Although the gate did not pass it; needs --reason.")]
ReasonOption = Annotated[str, typer.Option(help="Kept with the version.")]


def serve(
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
    port: Annotated[int | None, typer.Option(help="Instead of serve.port; 0 takes a free one.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Ask one question, print the answer, stop.")] = False,
    question: Annotated[str | None, typer.Option(help="What --check asks; else the sample's first.")] = None,
    if_released: Annotated[
        bool, typer.Option("--if-released", help="With --check: where no model is released, say so and end well.")
    ] = False,
) -> None:
    """Serve the champion behind an OpenAI-compatible router that always answers, until Ctrl-C."""
    from qinglan.serving.checks import run_smoke_test
    from qinglan.serving.registry import registry_of
    from qinglan.serving.site import serve_site

    overrides = tuple(set_ or ())
    if (question or if_released) and not check:
        raise ConfigError(f"{'--question' if question else '--if-released'} goes with --check")
    if if_released and "champion" not in registry_of(load_profile(profile, overrides)).aliases():
        say("No model is released, so none is asked a question.")
    elif check:
        say(run_smoke_test(profile, overrides, question, lambda _: None))
    else:
        serve_site(profile, overrides, say, port)


@canary_app.command()
def start(
    version: VersionArgument,
    share: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Else serve.canary.share.")] = None,
    force: ForceOption = False,
    reason: ReasonOption = "",
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Make it the challenger: a running `qinglan serve` gives it its share once it answers."""
    from qinglan.serving.registry import registry_of
    from qinglan.serving.site import STATE_FILE, CanaryShare, archive_verdict, read_verdict, serving_folder, share_of

    loaded = load_profile(profile, set_ or ())
    folder, registry = serving_folder(loaded), registry_of(loaded)
    before, fallen = registry.aliases().get("challenger"), read_verdict(folder)
    begins = before != version or (fallen is not None and fallen.challenger == version)
    if begins:  # do what a site that has just seen its verdict, or was stopped, has not done yet
        if fallen and fallen.challenger == before:
            registry.withdraw_challenger(f"canary {fallen.summary}", before)
        archive_verdict(folder)
    released = registry.challenge(version, force_reason=forced(force, reason))
    if begins:
        (folder / STATE_FILE).unlink(missing_ok=True)  # else its counts from before the site was stopped would go on
    if share is not None:
        CanaryShare(version=version, share=share).write(folder)
    say(f"{released.name} {version}: challenger, {share_of(loaded, folder, version):.0%} of the requests")
    say("it ends by itself; see `qinglan canary status`")


@canary_app.command()
def status(profile: ProfileOption = "embedded", set_: SetOption = None) -> None:
    """Show the canary's figures, or how the last one ended."""
    from qinglan.serving.canary import describe_difference
    from qinglan.serving.canary_observer import read_state
    from qinglan.serving.registry import registry_of
    from qinglan.serving.site import serving_folder

    loaded = load_profile(profile, set_ or ())
    challenger = registry_of(loaded).aliases().get("challenger")
    state = read_state(serving_folder(loaded))
    if challenger is None:
        last = _last_verdict(loaded)
        say("no canary" + (f"; the last one: {_describe_verdict(last)}" if last else ""))
    elif state is None or state.challenger != challenger:
        say(f"version {challenger} is the challenger, but gets no requests yet: is `qinglan serve` running?")
    else:
        counts = state.counts
        say(f"version {state.challenger} gets {state.share:.0%}: {state.judgement.outcome}")
        arms = {f"champion {state.champion}": counts.champion, f"challenger {state.challenger}": counts.challenger}
        for name, arm in arms.items():
            p95 = f", p95 {arm.latency.p95:.0f} ms" if arm.latency.p95 is not None else ""
            say(f"  {name}: {arm.fallbacks.n:,} requests, {arm.fallbacks.mean:.1%} fell back{p95}")
        if counts.retrieval.n:
            difference = describe_difference(counts.retrieval)
            say(f"  retrieval: {difference}; {state.failed:,} without a result, {state.left_out:,} left out")


@canary_app.command()
def stop(
    reason: Annotated[str, typer.Option(help="Kept with the version.")] = "stopped by hand",
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """End the canary; the champion takes all requests."""
    from qinglan.serving.registry import registry_of

    withdrawn = registry_of(load_profile(profile, set_ or ())).withdraw_challenger(reason)
    say(f"{withdrawn.name} {withdrawn.version}: no longer the challenger" if withdrawn else "no canary")


@canary_app.command()
def promote(
    version: Annotated[
        str | None,
        typer.Argument(metavar="VERSION", help="The challenger, or the last one that did better, if not given."),
    ] = None,
    force: ForceOption = False,
    reason: ReasonOption = "",
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Make the challenger the champion."""
    from qinglan.serving.registry import registry_of

    loaded = load_profile(profile, set_ or ())
    registry = registry_of(loaded)
    released = registry.promote(version or _version_to_promote(loaded, registry), force_reason=forced(force, reason))
    replaced = f", version {released.replaced} stays as the previous one" if released.replaced else ""
    say(f"{released.name} {released.version}: champion{replaced}")


def _version_to_promote(profile: Profile, registry: "Registry") -> str:
    """The challenger; where there is none, the version that did better in the last canary."""
    from qinglan.serving.canary_observer import read_verdict
    from qinglan.serving.site import serving_folder

    challenger, fallen = registry.aliases().get("challenger"), read_verdict(serving_folder(profile))
    # The site has yet to act upon a verdict that is still in its folder.
    has_lost = fallen is not None and fallen.challenger == challenger and fallen.judgement.outcome != "better"
    if challenger and not has_lost:
        return challenger
    last = _last_verdict(profile)
    if last is None or last.judgement.outcome != "better":
        last_one = f"; the last one: {_describe_verdict(last)}" if last else ""
        raise ConfigError(f"there is no canary to promote{last_one}; name a VERSION")
    if replaced_by := registry.version(last.challenger).rolled_back_to:
        problem = f"did better in the last canary, but was rolled back to version {replaced_by} since then"
        raise ConfigError(f"version {last.challenger} {problem}; name a VERSION")
    return last.challenger


def _last_verdict(profile: Profile) -> "CanaryVerdict | None":
    from qinglan.runs.schema_version import parse_record
    from qinglan.serving.canary_observer import CanaryVerdict, read_verdict
    from qinglan.serving.site import HISTORY_FILE, serving_folder

    if fallen := read_verdict(serving_folder(profile)):  # the site has yet to put it away
        return fallen
    history = serving_folder(profile) / HISTORY_FILE
    lines = history.read_text(encoding="utf-8", errors="replace").splitlines() if history.exists() else []
    for line in reversed(lines):
        with suppress(ValueError):  # a full disk may have cut one
            return parse_record(CanaryVerdict, line, history)
    return None


def _describe_verdict(verdict: "CanaryVerdict") -> str:
    arms, judgement = f"version {verdict.challenger} against {verdict.champion}", verdict.judgement
    return f"{arms}, {verdict.requests:,} requests: {judgement.outcome}, {judgement.reason}"
