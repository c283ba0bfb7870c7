"""The benchmark's two tables and its targets."""

from typing import Any

Found = dict[str, Any]


def contestants_table(result: Found) -> list[str]:
    """Side by side."""
    lines = [
        f"{result['rows']:,} rows, {result['concurrency']} requests at once, answers after "
        f"{1000 * result['latency_s']:.0f} ms: {result['ideal_rows_per_s']:.0f} rows/s is the ideal",
        "",
        "| Contestant | rows | rows/s | of ideal | CPU ms/row | peak RSS MB | whole s | whole CPU s | calls "
        "| at once | again with 1% new rows: calls, rows out |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in result["contestants"]:
        if "failed" in one:
            lines.append(f"| {one['name']} | did not run: {one['failed']} " + 9 * "| " + "|")
            continue
        server = one["server"]
        lines.append(
            f"| {one['name']} | {one['rows']:,} | {one['rows_per_s']:.1f} "
            f"| {one['rows_per_s'] / result['ideal_rows_per_s']:.3f} | {cpu_ms(one):.2f} "
            f"| {one['peak_rss_mb'].get('client', 0):.0f} | {one['process_wall_s']:.1f} "
            f"| {one['process_cpu_s']:.1f} | {server['calls']:,} | {server['max_in_flight']} "
            f"| {one['calls_with_new']:,}, {one['rows_with_new']:,} |"
        )
    ours = result["contestants"][0]
    server = ours["server"]
    return [
        *lines,
        "",
        "Rows/s and CPU: between the first request and the last answer, as the server saw them; whole: with start-up "
        "and what is written at the end.",
        f"Our stage from its start to its manifest: {ours['stage_s']:.1f} s, "
        f"{stage_share(result):.3f} of ideal, {1000 * ours['stage_cpu_s'] / result['rows']:.2f} ms CPU a row, beside "
        f"{1000 * ours['prefect_cpu_s'] / result['rows']:.2f} of Prefect's server. "
        f"The measuring server itself: {1000 * server['cpu_s'] / server['calls']:.2f} ms CPU a call, "
        f"its answers late by {server['late_ms_p50']:.1f} ms (p50), {server['late_ms_p99']:.1f} (p99).",
    ]


def scenarios_table(result: Found) -> list[str]:
    """Ours, when things are not as smooth."""
    first = result["scenarios"]["fault-free"]
    lines = [
        "| Scenario | rows out | calls | paid | failed calls | paid twice | stage s | of the first run's time | USD |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, one in result["scenarios"].items():
        server = one["server"]
        lines.append(
            f"| {name} | {one.get('rows_out', 'stopped')} | {server['calls']:,} | {server['answered']:,} "
            f"| {failures(server):,} | {server['answered_again']:,} | {one['stage_s']:.2f} "
            f"| {one['stage_s'] / first['stage_s']:.3f} | {one['usd']:.2f} |"
        )
    budget = result["scenarios"]["budget"]
    return [
        *lines,
        "",
        f"The budget's last line: {budget.get('error', 'none: the run was not stopped')}",
    ]


def verdicts(result: Found) -> list[Found]:
    """Every target with what was measured."""
    scenarios, rows = result["scenarios"], result["rows"]
    first, faults, new, budget = (
        scenarios[name] for name in ("fault-free", "faults", "new rows", "budget")
    )
    ours, rivals = (
        result["contestants"][0],
        [one for one in result["contestants"][1:] if "failed" not in one],
    )
    best_rate = max((one["rows_per_s"] for one in rivals), default=0.0)
    least_cpu = min((cpu_ms(one) for one in rivals), default=float("inf"))
    stage_ms, kept = 1000 * first["stage_cpu_s"] / rows, first["stage_s"] / faults["stage_s"]
    expected = rows + failures(faults["server"])
    over = budget["usd"] - budget["cap_usd"]
    again = scenarios["rerun"]["stage_s"] / first["stage_s"]

    def target(text: str, met: bool, measured: str) -> Found:
        return {"target": text, "met": met, "measured": measured}

    return [
        target(
            "stage at ≥ 0.95 of the ideal rate",
            stage_share(result) >= 0.95,
            f"{stage_share(result):.3f}",
        ),
        target("CPU ≤ 1.5 ms a row", stage_ms <= 1.5, f"{stage_ms:.2f}"),
        target(
            "more rows/s than every rival",
            ours["rows_per_s"] > best_rate,
            f"{ours['rows_per_s']:.1f}, their best {best_rate:.1f}",
        ),
        target(
            "less CPU a row than every rival",
            cpu_ms(ours) < least_cpu,
            f"{cpu_ms(ours):.2f} ms, their best {least_cpu:.2f}",
        ),
        target(
            "faults: no row lost",
            faults.get("rows_out") == rows,
            f"{faults.get('rows_out')} of {rows}",
        ),
        target(
            "faults: calls = rows + failures",
            faults["server"]["calls"] == expected,
            f"{faults['server']['calls']:,} calls, {rows:,} rows + {failures(faults['server']):,} failures",
        ),
        target("faults: ≥ 0.85 of the fault-free rate", kept >= 0.85, f"{kept:.3f}"),
        target(
            "rerun: 0 calls, ≤ 5% of the first run's time",
            scenarios["rerun"]["server"]["calls"] == 0 and again <= 0.05,
            f"{scenarios['rerun']['server']['calls']} calls, {again:.1%}",
        ),
        target(
            "1% new rows: calls = the new rows",
            new["server"]["calls"] == new["new"],
            f"{new['server']['calls']} calls, {new['new']} new rows",
        ),
        target(
            "budget: at most the cap and the calls in flight, and spent",
            over <= budget["in_flight_usd"] + 1e-9 and budget["usd"] >= 0.9 * budget["cap_usd"],
            f"${budget['usd']:.3f} of ${budget['cap_usd']:.3f}, {over:+.3f}; in flight ${budget['in_flight_usd']:.2f}",
        ),
    ]


def cpu_ms(one: Found) -> float:
    """Milliseconds a row between first request and last answer."""
    return float(1000 * one["span_cpu_s"] / one["server"]["answered"])


def failures(server: Found) -> int:
    """Calls without an answer."""
    return int(
        server["rate_limited"] + server["server_error"] + server["hang"] + server["abandoned"]
    )


def stage_share(result: Found) -> float:
    """Of the ideal rate, by our stage's own seconds."""
    return float(result["rows"] / result["contestants"][0]["stage_s"] / result["ideal_rows_per_s"])
