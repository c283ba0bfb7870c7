"""`qinglan serve` and `qinglan canary`: the champion's endpoint, and a share of it for another."""

from typing import TYPE_CHECKING, Annotated

import typer

from qinglan.cli.common import ProfileOption, SetOption, forced, say
from qinglan.config import load_profile
from qinglan.errors import ConfigError
from qinglan.text import latency

# It takes a second to import.
if TYPE_CHECKING:
    from qinglan.serving.canary_observer import CanaryState

canary_app = typer.Typer(
    no_args_is_help=True, help="Try a released model on a share of the live traffic."
)

VersionArgument = Annotated[
    str, typer.Argument(metavar="VERSION", help="As in `qinglan release list`.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Although the gate did not pass it; needs --reason.")
]
ReasonOption = Annotated[str, typer.Option(help="Kept with the version.")]


def serve(
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
    port: Annotated[
        int | None, typer.Option(help="Instead of serve.port; 0 takes a free one.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Ask one question, print the answer, stop.")
    ] = False,
    question: Annotated[
        str | None, typer.Option(help="What --check asks; else the sample's first.")
    ] = None,
    if_released: Annotated[
        bool,
        typer.Option(
            "--if-released", help="With --check: where no model is released, say so and end well."
        ),
    ] = False,
) -> None:
    """Serve the champion behind an OpenAI-compatible router, until Ctrl-C."""
    from qinglan.registry import registry_of
    from qinglan.serving.checks import run_smoke_test
    from qinglan.serving.site import serve_site

    overrides = tuple(set_ or ())
    if (question or if_released) and not check:
        option = "--question" if question else "--if-released"
        raise ConfigError(f"{option} goes with --check")
    if if_released and "champion" not in registry_of(load_profile(profile, overrides)).aliases():
        say("No model is released, so none is asked a question.")
    elif check:
        say(run_smoke_test(profile, overrides, question, lambda _: None))
    else:
        serve_site(profile, overrides, say, port)


@canary_app.command()
def start(
    version: VersionArgument,
    share: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Else serve.canary.share.")
    ] = None,
    force: ForceOption = False,
    reason: ReasonOption = "",
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Make it the challenger: a running `qinglan serve` gives it its share once it answers."""
    from qinglan.registry import registry_of
    from qinglan.serving.canary_observer import STATE_FILE, read_verdict
    from qinglan.serving.site import CanaryShare, archive_verdict, serving_folder, share_of

    loaded = load_profile(profile, set_ or ())
    folder = serving_folder(loaded)
    registry = registry_of(loaded)
    last_challenger = registry.aliases().get("challenger")
    verdict = read_verdict(folder)
    is_judged = verdict is not None and verdict.challenger == version
    is_new_canary = last_challenger != version or is_judged
    if is_new_canary:
        # A site that has just seen its verdict, or was stopped, has not done this yet.
        if verdict and verdict.challenger == last_challenger:
            registry.withdraw_challenger(f"canary {verdict.summary}", last_challenger)
        archive_verdict(folder)
    released = registry.challenge(version, force_reason=forced(force, reason))
    if is_new_canary:
        # Else its counts from before the site was stopped would go on.
        (folder / STATE_FILE).unlink(missing_ok=True)
    if share is not None:
        CanaryShare(version=version, share=share).write(folder)
    requests = f"{share_of(loaded, folder, version):.0%} of the requests"
    say(f"{released.name} {version}: challenger, {requests}")
    say("it ends by itself; see `qinglan canary status`")


@canary_app.command()
def status(profile: ProfileOption = "embedded", set_: SetOption = None) -> None:
    """Show the canary's figures, or how the last one ended."""
    from qinglan.registry import registry_of
    from qinglan.serving.canary_observer import read_state
    from qinglan.serving.site import last_verdict, serving_folder

    loaded = load_profile(profile, set_ or ())
    folder = serving_folder(loaded)
    challenger = registry_of(loaded).aliases().get("challenger")
    state = read_state(folder)
    if challenger is None:
        verdict = last_verdict(folder)
        say(f"no canary; the last one: {verdict.description}" if verdict else "no canary")
    elif state is None or state.challenger != challenger:
        problem = "is the challenger, but gets no requests yet"
        say(f"version {challenger} {problem}: is `qinglan serve` running?")
    else:
        _say_figures(state)


def _say_figures(state: "CanaryState") -> None:
    """Say what champion and challenger have done since the canary began."""
    from qinglan.serving.canary import describe_difference

    counts = state.counts
    say(f"version {state.challenger} gets {state.share:.0%}: {state.judgement.outcome}")
    arms = {
        f"champion {state.champion}": counts.champion,
        f"challenger {state.challenger}": counts.challenger,
    }
    for name, arm in arms.items():
        requests = f"{arm.latency.n:,} requests"
        fallbacks = f"{arm.fallbacks.mean:.1%} of its questions fell back"
        p95 = f", p95 {latency(arm.latency.p95)} ms" if arm.latency.p95 is not None else ""
        say(f"  {name}: {requests}, {fallbacks}{p95}")
    if counts.retrieval.n:
        difference = describe_difference(counts.retrieval)
        losses = f"{state.failed:,} without a result, {state.left_out:,} left out"
        say(f"  retrieval: {difference}; {losses}")


@canary_app.command()
def stop(
    reason: ReasonOption = "stopped by hand",
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """End the canary; the champion takes all requests."""
    from qinglan.registry import registry_of

    withdrawn = registry_of(load_profile(profile, set_ or ())).withdraw_challenger(reason)
    if withdrawn:
        say(f"{withdrawn.name} {withdrawn.version}: no longer the challenger")
    else:
        say("no canary")
