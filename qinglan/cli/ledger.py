"""`qinglan ledger`: what was spent, every try at one request, and dropping an answer."""

from datetime import UTC, datetime
from typing import Annotated, Literal

import typer

from qinglan.cli.common import ProfileOption, SetOption, figures_table, out, say
from qinglan.config import FlowName, Profile, load_profile
from qinglan.errors import ConfigError
from qinglan.text import count, latency, number, shown, size, usd

app = typer.Typer(no_args_is_help=True, help="What was paid for: every answer, every dollar.")
By = Literal["model", "run", "tenant", "role", "month"]


@app.command()
def spent(
    by: Annotated[By, typer.Option(help="What to add up by.")] = "model",
    since: Annotated[
        str | None, typer.Option(help="Only from this day on, as 2026-11-01 (UTC).")
    ] = None,
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Calls, tokens and dollars, the most expensive first."""
    from qinglan.clients.roles import site_ledger
    from qinglan.ledger import SIMULATED

    try:
        since_s = (
            datetime.strptime(since, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
            if since is not None
            else 0.0
        )
    except ValueError:
        raise ConfigError(f"--since {since!r}: write a day as 2026-11-01") from None
    with site_ledger(load_profile(profile, set_ or ())) as ledger:
        lines, models = ledger.spending(by, since_s), ledger.spending("model", since_s)
    table = figures_table([by], ["calls", "failed", "prompt tokens", "answer tokens", "cost"])
    figures = ("calls", "failed", "prompt_tokens", "completion_tokens")
    for line in lines:
        mark = "*" if by == "model" and line.key.startswith(SIMULATED) else ""
        table.add_row(
            line.key + mark, *(count(getattr(line, name)) for name in figures), usd(line.cost_usd)
        )
    table.add_section()
    totals = (count(sum(getattr(line, name) for line in lines)) for name in figures)
    table.add_row("all", *totals, usd(sum(line.cost_usd for line in lines)))
    out.print(table)
    if unpaid_usd := sum(line.cost_usd for line in models if line.key.startswith(SIMULATED)):
        say(
            f"* Simulated: {usd(unpaid_usd)} of it was paid by nobody, and budget.per_month_usd does not count it."
        )


@app.command()
def request(
    request_hash: Annotated[str, typer.Argument(help="`answer_request` of a row.")],
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Every try at one request, and its answer."""
    from qinglan.clients.roles import site_ledger

    with site_ledger(load_profile(profile, set_ or ())) as ledger:
        attempts, call = ledger.attempts("request_hash", request_hash), ledger.get(request_hash)
    if not attempts:
        raise ConfigError(
            f"ledger: there is no request {request_hash!r}; a row's `answer_request` names its own"
        )
    table = figures_table(["at (UTC)", "run", "role", "model", "outcome"], ["ms", "cost"])
    for each in attempts:
        at = datetime.fromtimestamp(each.created_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
        cost = ("≤ " if each.estimated else "") + usd(each.cost_usd)
        table.add_row(
            at, each.run_id, each.role, each.model, each.outcome, latency(each.latency_ms), cost
        )
    out.print(table)
    if call:
        say(call.text)


@app.command()
def drop(
    request: Annotated[
        str,
        typer.Argument(
            help="`answer_request` of a row, or how it begins; or the id of a batch that is not merged."
        ),
    ],
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Forget the answer to one request, or an open batch: the next run that needs it asks again,
    and pays again."""
    from qinglan.clients.roles import site_ledger

    with site_ledger(load_profile(profile, set_ or ())) as ledger:
        if job := ledger.drop_batch(request):
            say(
                f"dropped batch {job.batch_id}; requests that may be asked again: {len(job.request_hashes):,}"
            )
            return
        for call in ledger.drop(request):
            say(
                f"dropped {call.request_hash}: {call.role} {call.model}, {usd(call.cost_usd)}: {shown(call.text)}"
            )


def print_estimate(profile: Profile, flow: FlowName) -> None:
    """What a flow would ask and what that would cost, beside what may be spent; what a training
    would make of it."""
    from qinglan.clients.roles import site_ledger
    from qinglan.ledger import SIMULATED
    from qinglan.ops.estimate import count_questions, estimate, questions_of, rag_requests

    with site_ledger(profile) as ledger, questions_of(profile) as rows:
        counts = count_questions(profile, rows, ledger)
        parts = estimate(profile, flow, counts, ledger)
        _, this_month_usd = ledger.spent_usd("")
    table = figures_table(
        ["role", "stage", "model"], ["questions", "known", "prompt", "answer", "cost"]
    )
    for part in parts:
        bound = "" if part.measured_on else "≤ "
        tokens = (f"{bound}{part.prompt_tokens:,.0f}", f"{bound}{part.completion_tokens:,.0f}")
        cells = (
            part.role,
            part.what,
            part.model,
            count(part.questions),
            count(part.known),
            *tokens,
        )
        table.add_row(*cells, bound + usd(part.cost_usd))
    out.print(table)
    total_usd, expected_usd = (
        sum(part.cost_usd for part in parts),
        sum(part.expected_usd for part in parts),
    )
    some = f", some {usd(expected_usd)} if RL repeats itself as `budget.rl_new_share` says" * (
        expected_usd < total_usd
    )
    about = "About" if any(part.measured_on and part.cost_usd for part in parts) else "At most"
    say(
        f"{about} {usd(total_usd)}{some}. Known are answers in the ledger; prompt and answer are tokens per call, "
        "marked ≤ where they are an upper bound; else answers are taken to be as long as earlier ones were."
    )
    budget = profile.budget
    if budget.per_run_usd is not None and total_usd > budget.per_run_usd:
        say(
            f"That is more than budget.per_run_usd = {budget.per_run_usd:g}: the run would stop there."
        )
    paid_usd = sum(part.cost_usd for part in parts if not part.model.startswith(SIMULATED))
    if budget.per_month_usd is not None and this_month_usd + paid_usd > budget.per_month_usd:
        limit = f"budget.per_month_usd = {budget.per_month_usd:g}"
        say(
            f"With the {usd(this_month_usd)} of this month that is more than {limit}: the run would stop there."
        )
    asked = ", ".join(
        f"{stage} {count:,}" for stage, count in rag_requests(profile, flow, counts).items()
    )
    if asked:
        say(f"The RAG would be asked at most: {asked}.")
    if flow not in ("pipeline", "train", "refresh"):
        return
    from qinglan.ops.forecast import find_problems, forecast
    from qinglan.training.disk_space import needed_bytes

    found = forecast(profile, counts)
    say(
        f"Of {found.questions:,} questions {found.sft_rows:,} would be learnt by SFT, {found.rl_prompts:,} asked in RL "
        f"and {found.test_rows:,} tested (known from {found.rows_from})."
    )
    say(
        f"SFT: {found.sft_steps:,} steps in {profile.sft.num_train_epochs:g} epochs. RL: {found.rl_steps:,} steps, "
        f"each prompt {number(found.rl_passes, 1)} times."
        f" Disk: up to {size(needed_bytes(profile, 'train'))}."
        f" The test split shows a gain of {number(found.detectable_gain)}."
    )
    hours = ", ".join(f"{stage} {number(spent, 1)}" for stage, spent in found.gpu_hours.items())
    say(
        f"GPU-hours: {hours}."
        if hours
        else "GPU-hours: not known before the first training; see trainer.step_s."
    )
    for problem in find_problems(profile, found):
        say(f"Warning: {problem}.")
