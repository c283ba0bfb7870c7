"""`qinglan ledger`: what was spent, every try at one request, and dropping an answer."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from qinglan.cli.common import ProfileOption, SetOption, figures_table, out, say
from qinglan.config import FlowName, Profile, load_profile
from qinglan.errors import ConfigError
from qinglan.text import count, latency, number, shown, size, usd

# It takes much of a second to import.
if TYPE_CHECKING:
    from qinglan.ops.estimate import Estimate
    from qinglan.ops.estimate.counting import QuestionCounts

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

    since_s = _start_of_day(since) if since is not None else 0.0
    with site_ledger(load_profile(profile, set_ or ())) as ledger:
        lines = ledger.spending(by, since_s)
        lines_by_model = ledger.spending("model", since_s)
    table = figures_table([by], ["calls", "failed", "prompt tokens", "answer tokens", "cost"])
    for line in lines:
        is_simulated = by == "model" and line.key.startswith(SIMULATED)
        table.add_row(
            f"{line.key}*" if is_simulated else line.key,
            count(line.calls),
            count(line.failed),
            count(line.prompt_tokens),
            count(line.completion_tokens),
            usd(line.cost_usd),
        )
    table.add_section()
    table.add_row(
        "all",
        count(sum(line.calls for line in lines)),
        count(sum(line.failed for line in lines)),
        count(sum(line.prompt_tokens for line in lines)),
        count(sum(line.completion_tokens for line in lines)),
        usd(sum(line.cost_usd for line in lines)),
    )
    out.print(table)
    unpaid_usd = sum(line.cost_usd for line in lines_by_model if line.key.startswith(SIMULATED))
    if unpaid_usd:
        say(
            f"* Simulated: {usd(unpaid_usd)} of it was paid by nobody, "
            "and budget.per_month_usd does not count it."
        )


def _start_of_day(day: str) -> float:
    """Seconds since 1970 at the start of a day in UTC."""
    try:
        return datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise ConfigError(f"--since {day!r}: write a day as 2026-11-01") from None


@app.command()
def request(
    request_hash: Annotated[str, typer.Argument(help="`answer_request` of a row.")],
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Every try at one request, and its answer."""
    from qinglan.clients.roles import site_ledger

    with site_ledger(load_profile(profile, set_ or ())) as ledger:
        attempts = ledger.attempts("request_hash", request_hash)
        call = ledger.get(request_hash)
    if not attempts:
        hint = "a row's `answer_request` names its own"
        raise ConfigError(f"ledger: there is no request {request_hash!r}; {hint}")
    table = figures_table(["at (UTC)", "run", "role", "model", "outcome"], ["ms", "cost"])
    for attempt in attempts:
        bound = "≤ " if attempt.estimated else ""
        table.add_row(
            datetime.fromtimestamp(attempt.created_s, UTC).strftime("%Y-%m-%d %H:%M:%S"),
            attempt.run_id,
            attempt.role,
            attempt.model,
            attempt.outcome,
            latency(attempt.latency_ms),
            bound + usd(attempt.cost_usd),
        )
    out.print(table)
    if call:
        say(call.text)


@app.command()
def drop(
    request: Annotated[
        str,
        typer.Argument(
            help="`answer_request` of a row, or how it begins; "
            "or the id of a batch that is not merged."
        ),
    ],
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Forget the answer to one request, or an open batch: the next run asks and pays again."""
    from qinglan.clients.roles import site_ledger

    with site_ledger(load_profile(profile, set_ or ())) as ledger:
        job = ledger.drop_batch(request)
        if job:
            requests = f"requests that may be asked again: {len(job.request_hashes):,}"
            say(f"dropped batch {job.batch_id}; {requests}")
            return
        for call in ledger.drop(request):
            answer = f"{call.role} {call.model}, {usd(call.cost_usd)}: {shown(call.text)}"
            say(f"dropped {call.request_hash}: {answer}")


def print_estimate(profile: Profile, flow: FlowName) -> None:
    """Print what a flow would ask and cost, what may be spent, and what a training would do."""
    from qinglan.clients.roles import site_ledger
    from qinglan.ops.estimate import estimate, rag_requests
    from qinglan.ops.estimate.counting import count_questions, questions_of

    with site_ledger(profile) as ledger, questions_of(profile) as rows:
        counts = count_questions(profile, rows, ledger)
        parts = estimate(profile, flow, counts, ledger)
        _, this_month_usd = ledger.spent_usd("")
    _print_parts(parts)
    _say_costs(profile, parts, this_month_usd)
    requests_by_stage = rag_requests(profile, flow, counts)
    requests = ", ".join(f"{stage} {most:,}" for stage, most in requests_by_stage.items())
    if requests:
        say(f"The RAG would be asked at most: {requests}.")
    if flow in ("pipeline", "train", "refresh"):
        _say_forecast(profile, counts)


def _print_parts(parts: "Sequence[Estimate]") -> None:
    """Print a table of what each role would be asked in each stage."""
    table = figures_table(
        ["role", "stage", "model"], ["questions", "known", "prompt", "answer", "cost"]
    )
    for part in parts:
        bound = "" if part.measured_on else "≤ "
        table.add_row(
            part.role,
            part.what,
            part.model,
            count(part.questions),
            count(part.known),
            f"{bound}{part.prompt_tokens:,.0f}",
            f"{bound}{part.completion_tokens:,.0f}",
            bound + usd(part.cost_usd),
        )
    out.print(table)


def _say_costs(profile: Profile, parts: "Sequence[Estimate]", this_month_usd: float) -> None:
    """Say what a flow would cost in all, and whether its budgets allow that."""
    from qinglan.ledger import SIMULATED

    total_usd = sum(part.cost_usd for part in parts)
    expected_usd = sum(part.expected_usd for part in parts)
    expected = ""
    if expected_usd < total_usd:
        expected = f", some {usd(expected_usd)} if RL repeats itself as `budget.rl_new_share` says"
    is_measured = any(part.measured_on and part.cost_usd for part in parts)
    about = "About" if is_measured else "At most"
    say(
        f"{about} {usd(total_usd)}{expected}. Known are answers in the ledger; "
        "prompt and answer are tokens per call, marked ≤ where they are an upper bound; "
        "else answers are taken to be as long as earlier ones were."
    )
    budget = profile.budget
    if budget.per_run_usd is not None and total_usd > budget.per_run_usd:
        limit = f"budget.per_run_usd = {budget.per_run_usd:g}"
        say(f"That is more than {limit}: the run would stop there.")
    paid_usd = sum(part.cost_usd for part in parts if not part.model.startswith(SIMULATED))
    if budget.per_month_usd is not None and this_month_usd + paid_usd > budget.per_month_usd:
        limit = f"budget.per_month_usd = {budget.per_month_usd:g}"
        spent_so_far = f"the {usd(this_month_usd)} of this month"
        say(f"With {spent_so_far} that is more than {limit}: the run would stop there.")


def _say_forecast(profile: Profile, counts: "QuestionCounts") -> None:
    """Say how large a training would be, how long it would take, and what may go wrong."""
    from qinglan.ops.forecast import find_problems, forecast
    from qinglan.training.disk_space import needed_bytes

    plan = forecast(profile, counts)
    say(
        f"Of {plan.questions:,} questions {plan.sft_rows:,} would be learnt by SFT, "
        f"{plan.rl_prompts:,} asked in RL and {plan.test_rows:,} tested "
        f"(known from {plan.rows_from})."
    )
    say(
        f"SFT: {plan.sft_steps:,} steps in {profile.sft.num_train_epochs:g} epochs. "
        f"RL: {plan.rl_steps:,} steps, each prompt {number(plan.rl_passes, 1)} times. "
        f"Disk: up to {size(needed_bytes(profile, 'train'))}. "
        f"The test split shows a gain of {number(plan.detectable_gain)}."
    )
    gpu_hours = ", ".join(f"{stage} {number(hours, 1)}" for stage, hours in plan.gpu_hours.items())
    if gpu_hours:
        say(f"GPU-hours: {gpu_hours}.")
    else:
        say("GPU-hours: not known before the first training; see trainer.step_s.")
    for problem in find_problems(profile, plan):
        say(f"Warning: {problem}.")
