"""The benchmark's two tables and its targets."""

from collections.abc import Iterator
from typing import Any

Figures = dict[str, Any]


def contestants_table(result: Figures) -> list[str]:
    """All contestants side by side."""
    rows = result["rows"]
    ideal = result["ideal_rows_per_s"]
    latency_ms = 1000 * result["latency_s"]
    lines = [
        f"{rows:,} rows, {result['concurrency']} requests at once, answers after "
        f"{latency_ms:.0f} ms: {ideal:.0f} rows/s is the ideal",
        "",
        "| Contestant | rows | rows/s | of ideal | CPU ms/row | peak RSS MB | whole s "
        "| whole CPU s | calls | at once | again with 1% new rows: calls, rows out |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(contestant_line(contestant, ideal) for contestant in result["contestants"]),
        "",
        "Rows/s and CPU: between the first request and the last answer, as the server saw them; "
        "whole: with start-up and what is written at the end.",
    ]
    ours = result["contestants"][0]
    server = ours["server"]
    stage_cpu_ms = 1000 * ours["stage_cpu_s"] / rows
    prefect_cpu_ms = 1000 * ours["prefect_cpu_s"] / rows
    server_cpu_ms = 1000 * server["cpu_s"] / server["calls"]
    lines.append(
        f"Our stage from its start to its manifest: {ours['stage_s']:.1f} s, "
        f"{stage_share(result):.3f} of ideal, {stage_cpu_ms:.2f} ms CPU a row, beside "
        f"{prefect_cpu_ms:.2f} of Prefect's server. The measuring server itself: "
        f"{server_cpu_ms:.2f} ms CPU a call, its answers late by {server['late_ms_p50']:.1f} ms "
        f"(p50), {server['late_ms_p99']:.1f} (p99)."
    )
    return lines


def contestant_line(contestant: Figures, ideal: float) -> str:
    """Markdown: one contestant."""
    name = contestant["name"]
    if "failed" in contestant:
        return f"| {name} | did not run: {contestant['failed']} " + 9 * "| " + "|"
    server = contestant["server"]
    cells = [
        name,
        f"{contestant['rows']:,}",
        f"{contestant['rows_per_s']:.1f}",
        f"{contestant['rows_per_s'] / ideal:.3f}",
        f"{cpu_ms(contestant):.2f}",
        f"{contestant['peak_rss_mb'].get('client', 0):.0f}",
        f"{contestant['process_wall_s']:.1f}",
        f"{contestant['process_cpu_s']:.1f}",
        f"{server['calls']:,}",
        f"{server['max_in_flight']}",
        f"{contestant['calls_with_new']:,}, {contestant['rows_with_new']:,}",
    ]
    return f"| {' | '.join(cells)} |"


def scenarios_table(result: Figures) -> list[str]:
    """Ours, when things are not as smooth."""
    first = result["scenarios"]["fault-free"]
    lines = [
        "| Scenario | rows out | calls | paid | failed calls | paid twice | stage s "
        "| of the first run's time | USD |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, scenario in result["scenarios"].items():
        server = scenario["server"]
        cells = [
            name,
            str(scenario.get("rows_out", "stopped")),
            f"{server['calls']:,}",
            f"{server['answered']:,}",
            f"{failures(server):,}",
            f"{server['answered_again']:,}",
            f"{scenario['stage_s']:.2f}",
            f"{scenario['stage_s'] / first['stage_s']:.3f}",
            f"{scenario['usd']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    last_line = result["scenarios"]["budget"].get("error", "none: the run was not stopped")
    return [*lines, "", f"The budget's last line: {last_line}"]


def verdicts(result: Figures) -> list[Figures]:
    """Every target with its measured value."""
    return [*stage_verdicts(result), *rival_verdicts(result), *scenario_verdicts(result)]


def verdict(target: str, met: bool, measured: str) -> Figures:
    return {"target": target, "met": met, "measured": measured}


def stage_verdicts(result: Figures) -> Iterator[Figures]:
    """The targets of our stage alone."""
    share = stage_share(result)
    stage_ms = 1000 * result["scenarios"]["fault-free"]["stage_cpu_s"] / result["rows"]
    yield verdict("stage at ≥ 0.95 of the ideal rate", share >= 0.95, f"{share:.3f}")
    yield verdict("CPU ≤ 1.5 ms a row", stage_ms <= 1.5, f"{stage_ms:.2f}")


def rival_verdicts(result: Figures) -> Iterator[Figures]:
    """The targets against the rivals that ran."""
    ours, *rivals = result["contestants"]
    finished = [rival for rival in rivals if "failed" not in rival]
    best_rate = max((rival["rows_per_s"] for rival in finished), default=0.0)
    least_cpu = min(map(cpu_ms, finished), default=float("inf"))
    yield verdict(
        "more rows/s than every rival",
        ours["rows_per_s"] > best_rate,
        f"{ours['rows_per_s']:.1f}, their best {best_rate:.1f}",
    )
    yield verdict(
        "less CPU a row than every rival",
        cpu_ms(ours) < least_cpu,
        f"{cpu_ms(ours):.2f} ms, their best {least_cpu:.2f}",
    )


def scenario_verdicts(result: Figures) -> Iterator[Figures]:
    """The targets of faults, reruns, new rows and the budget."""
    rows = result["rows"]
    scenarios = result["scenarios"]
    first = scenarios["fault-free"]
    faults = scenarios["faults"]
    failed = failures(faults["server"])
    rate_kept = first["stage_s"] / faults["stage_s"]
    yield verdict(
        "faults: no row lost",
        faults.get("rows_out") == rows,
        f"{faults.get('rows_out')} of {rows}",
    )
    yield verdict(
        "faults: calls = rows + failures",
        faults["server"]["calls"] == rows + failed,
        f"{faults['server']['calls']:,} calls, {rows:,} rows + {failed:,} failures",
    )
    yield verdict("faults: ≥ 0.85 of the fault-free rate", rate_kept >= 0.85, f"{rate_kept:.3f}")
    rerun_calls = scenarios["rerun"]["server"]["calls"]
    rerun_share = scenarios["rerun"]["stage_s"] / first["stage_s"]
    yield verdict(
        "rerun: 0 calls, ≤ 5% of the first run's time",
        rerun_calls == 0 and rerun_share <= 0.05,
        f"{rerun_calls} calls, {rerun_share:.1%}",
    )
    grown = scenarios["new rows"]
    yield verdict(
        "1% new rows: calls = the new rows",
        grown["server"]["calls"] == grown["new"],
        f"{grown['server']['calls']} calls, {grown['new']} new rows",
    )
    budget = scenarios["budget"]
    over_usd = budget["usd"] - budget["cap_usd"]
    # The bound is exact up to the sum's rounding.
    is_kept = over_usd <= budget["in_flight_usd"] + 1e-9
    is_spent = budget["usd"] >= 0.9 * budget["cap_usd"]
    yield verdict(
        "budget: at most the cap and the calls in flight, and spent",
        is_kept and is_spent,
        f"${budget['usd']:.3f} of ${budget['cap_usd']:.3f}, {over_usd:+.3f}; "
        f"in flight ${budget['in_flight_usd']:.2f}",
    )


def cpu_ms(contestant: Figures) -> float:
    """Milliseconds of CPU a row between first request and last answer."""
    return float(1000 * contestant["span_cpu_s"] / contestant["server"]["answered"])


def failures(server: Figures) -> int:
    """Calls without an answer."""
    return int(
        server["rate_limited"] + server["server_error"] + server["hang"] + server["abandoned"]
    )


def stage_share(result: Figures) -> float:
    """Share of the ideal rate, by our stage's own seconds."""
    return float(result["rows"] / result["contestants"][0]["stage_s"] / result["ideal_rows_per_s"])
