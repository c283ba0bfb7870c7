"""`qinglan serve` and `qinglan canary`: the champion's endpoint, and a share of its traffic for
another model."""

from typing import Annotated

import typer

from qinglan.cli.common import ProfileOption, SetOption, forced, say
from qinglan.config import load_profile
from qinglan.errors import ConfigError
from qinglan.text import latency

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
    folder, registry = serving_folder(loaded), registry_of(loaded)
    before, pending = registry.aliases().get("challenger"), read_verdict(folder)
    begins = before != version or (pending is not None and pending.challenger == version)
    if begins:  # do what a site that has just seen its verdict, or was stopped, has not done yet
        if pending and pending.challenger == before:
            registry.withdraw_challenger(f"canary {pending.summary}", before)
        archive_verdict(folder)
    released = registry.challenge(version, force_reason=forced(force, reason))
    if begins:
        (folder / STATE_FILE).unlink(
            missing_ok=True
        )  # else its counts from before the site was stopped would go on
    if share is not None:
        CanaryShare(version=version, share=share).write(folder)
    say(
        f"{released.name} {version}: challenger, {share_of(loaded, folder, version):.0%} of the requests"
    )
    say("it ends by itself; see `qinglan canary status`")


@canary_app.command()
def status(profile: ProfileOption = "embedded", set_: SetOption = None) -> None:
    """Show the canary's figures, or how the last one ended."""
    from qinglan.registry import registry_of
    from qinglan.serving.canary import describe_difference
    from qinglan.serving.canary_observer import read_state
    from qinglan.serving.site import last_verdict, serving_folder

    loaded = load_profile(profile, set_ or ())
    challenger = registry_of(loaded).aliases().get("challenger")
    state = read_state(serving_folder(loaded))
    if challenger is None:
        last = last_verdict(serving_folder(loaded))
        say("no canary" + (f"; the last one: {last.description}" if last else ""))
    elif state is None or state.challenger != challenger:
        say(
            f"version {challenger} is the challenger, but gets no requests yet: is `qinglan serve` running?"
        )
    else:
        counts = state.counts
        say(f"version {state.challenger} gets {state.share:.0%}: {state.judgement.outcome}")
        arms = {
            f"champion {state.champion}": counts.champion,
            f"challenger {state.challenger}": counts.challenger,
        }
        for name, arm in arms.items():
            p95 = f", p95 {latency(arm.latency.p95)} ms" if arm.latency.p95 is not None else ""
            say(
                f"  {name}: {arm.latency.n:,} requests, {arm.fallbacks.mean:.1%} of its questions fell back{p95}"
            )
        if counts.retrieval.n:
            difference = describe_difference(counts.retrieval)
            say(
                f"  retrieval: {difference}; {state.failed:,} without a result, {state.left_out:,} left out"
            )


@canary_app.command()
def stop(
    reason: ReasonOption = "stopped by hand",
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """End the canary; the champion takes all requests."""
    from qinglan.registry import registry_of

    withdrawn = registry_of(load_profile(profile, set_ or ())).withdraw_challenger(reason)
    say(
        f"{withdrawn.name} {withdrawn.version}: no longer the challenger"
        if withdrawn
        else "no canary"
    )
