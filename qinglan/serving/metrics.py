"""The router's metrics for Prometheus: counts and times by role, version, source and reason; never a text."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from qinglan.serving.request_handler import ServedAnswer

BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0)
_PREFIX = "qinglan_router"


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._answers = Counter(
            f"{_PREFIX}_answers", "Answered requests", ("role", "version", "source", "reason"), registry=self.registry
        )
        self._latency = Histogram(
            f"{_PREFIX}_latency_seconds", "From a request's arrival to its answer", ("role", "source"),
            buckets=BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self.refused = Counter(
            f"{_PREFIX}_refused", "Requests with an HTTP error for an answer", ("status",), registry=self.registry
        )
        ProcessCollector(registry=self.registry)

    def answered(self, served: ServedAnswer) -> None:
        self._answers.labels(served.role, served.version, served.source, served.reason).inc()
        self._latency.labels(served.role, served.source).observe(served.latency_ms / 1000)

    def add_gauge(self, name: str, what: str, value: Callable[[], float]) -> None:
        Gauge(f"{_PREFIX}_{name}", what, registry=self.registry).set_function(value)


@dataclass(eq=False)
class LogLines(Collector):
    outcomes: Mapping[str, int]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(f"{_PREFIX}_log_lines", "Lines for the request log", labels=["outcome"])
        for outcome, lines in sorted(dict(self.outcomes).items()):
            family.add_metric([outcome], lines)
        yield family
