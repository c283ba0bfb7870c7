"""The router's metrics for Prometheus, which never hold a text."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from qinglan.serving.request_handler import ServedAnswer

_PREFIX = "qinglan_router"
_LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0)


class RouterMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._answers = Counter(
            f"{_PREFIX}_answers",
            "Answered requests",
            ("role", "version", "source", "reason"),
            registry=self.registry,
        )
        self._latency = Histogram(
            f"{_PREFIX}_latency_seconds",
            "From a request's arrival to its answer",
            ("role", "source"),
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._refused = Counter(
            f"{_PREFIX}_refused",
            "Requests with an HTTP error for an answer",
            ("status",),
            registry=self.registry,
        )
        ProcessCollector(registry=self.registry)

    def count_answer(self, served: ServedAnswer) -> None:
        self._answers.labels(served.role, served.version, served.source, served.reason).inc()
        self._latency.labels(served.role, served.source).observe(served.latency_ms / 1000)

    def count_refusal(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def add_gauge(self, name: str, description: str, value: Callable[[], float]) -> None:
        """Add a figure that is asked for whenever the metrics are read."""
        gauge = Gauge(f"{_PREFIX}_{name}", description, registry=self.registry)
        gauge.set_function(value)

    def add_log_lines(self, outcomes: Mapping[str, int]) -> None:
        """Add the lines for the request log, by what became of them; the mapping may change."""
        self.registry.register(_LogLines(outcomes))


@dataclass(eq=False)
class _LogLines(Collector):
    outcomes: Mapping[str, int]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            f"{_PREFIX}_log_lines", "Lines for the request log", labels=["outcome"]
        )
        # The log's own thread may add an outcome meanwhile, so a copy is read.
        for outcome, lines in sorted(dict(self.outcomes).items()):
            family.add_metric([outcome], lines)
        yield family
