"""The router's metrics for Prometheus: counts and times by role, version, source and reason; never a text."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from qinglan.serving.request_handler import ServedAnswer

BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0)
_PREFIX = "qinglan_router"


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._answers = Counter(
            f"{_PREFIX}_answers", "Answered requests", ("role", "version", "source", "reason"), registry=self._registry
        )
        self._latency = Histogram(
            f"{_PREFIX}_latency_seconds", "From a request's arrival to its answer", ("role", "source"),
            buckets=BUCKETS_S, registry=self._registry,
        )  # fmt: skip
        self._refused = Counter(
            f"{_PREFIX}_refused", "Requests with an HTTP error for an answer", ("status",), registry=self._registry
        )
        ProcessCollector(registry=self._registry)

    def answered(self, served: ServedAnswer) -> None:
        self._answers.labels(served.role, served.version, served.source, served.reason).inc()
        self._latency.labels(served.role, served.source).observe(served.latency_ms / 1000)

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def add_gauge(self, name: str, what: str, value: Callable[[], float]) -> None:
        Gauge(f"{_PREFIX}_{name}", what, registry=self._registry).set_function(value)

    def add_log_lines(self, outcomes: Mapping[str, int]) -> None:
        self._registry.register(_LogLines(outcomes))

    def page(self) -> bytes:
        return generate_latest(self._registry)


class _LogLines(Collector):
    def __init__(self, outcomes: Mapping[str, int]) -> None:
        self._outcomes = outcomes

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(f"{_PREFIX}_log_lines", "Lines for the request log", labels=["outcome"])
        for outcome, lines in sorted(dict(self._outcomes).items()):
            family.add_metric([outcome], lines)
        yield family
