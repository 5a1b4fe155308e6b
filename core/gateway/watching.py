"""What the cluster tells of itself as it runs: metrics for Prometheus, and a stream of what becomes of generations."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass

import msgspec
from litestar import Response, get
from litestar.types import ASGIApp, Receive, Scope, Send
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from core.gateway.answers.answer import send_stream
from core.gateway.bodies import AnyRequest
from core.gateway.bridge import Bridge, while_connected
from core.gateway.openapi import DOCUMENTED, TEXT, Documentation
from core.gateway.routes import gateway_of
from core.interfaces.engine import Engine
from core.interfaces.telemetry import Metric, PaceStatus, Sample, SessionStatus

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


@get("/metrics", opt={DOCUMENTED: Documentation(str, media=TEXT)})
async def metrics(request: AnyRequest) -> Response[bytes]:
    """Counts, for Prometheus."""
    gateway = gateway_of(request)
    counted: tuple[Metric, ...] = await gateway.bridge.call(gateway.engine.metrics)
    return Response(render(counted), media_type=f"{TEXT}; version=0.0.4; charset=utf-8")


@get("/v1/cluster/events", opt={DOCUMENTED: Documentation(events=(SessionStatus, PaceStatus))})
async def events(request: AnyRequest) -> ASGIApp:
    """Tells what becomes of generations, as it happens: phase, progress, speed, and why one is suspended or failed.

    And of machines that have become slower or faster than planned.
    """
    gateway = gateway_of(request)
    return Watch(gateway.engine, gateway.bridge)


@dataclass(slots=True)
class Watch:
    """An ASGI application: a stream of events for as long as the client is there."""

    engine: Engine
    bridge: Bridge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._tell(send))

    async def _tell(self, send: Send) -> None:
        async with self.bridge.open(self.engine.watch) as statuses:
            await send_stream(_framed(statuses), send)


async def _framed(statuses: AsyncIterator[SessionStatus | PaceStatus]) -> AsyncIterator[bytes]:
    async for status in statuses:
        yield b"data: " + msgspec.json.encode(status) + b"\n\n"


def render(metrics: Iterable[Metric]) -> bytes:
    """In Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Told(metrics))
    return generate_latest(registry)


class _Told(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._families = [_family(metric) for metric in metrics]

    def collect(self) -> Iterator[Family]:
        return iter(self._families)


def _family(metric: Metric) -> Family:
    labels = [name for name, _ in metric.samples[0].labels] if metric.samples else []
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
        for sample in metric.samples:
            histogram.add_metric(_values(sample), _buckets(sample), sample.value)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=labels)
    for sample in metric.samples:
        family.add_metric(_values(sample), sample.value)
    return family


def _values(sample: Sample) -> list[str]:
    return [value for _, value in sample.labels]


def _buckets(sample: Sample) -> list[tuple[str, int]]:
    return [("+Inf" if math.isinf(bound) else str(bound), count) for bound, count in sample.buckets]
