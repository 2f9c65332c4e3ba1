"""The injector's metrics, all of them, by name."""

from __future__ import annotations

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from slotcar_injector.denial import FAILURES, Reason, Result

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Metrics:
    """Labels have values of closed tables only, so that nobody's pods can make series."""

    def __init__(self, version: str) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._admissions = Counter(
            "slotcar_injector_admissions",
            "Admission reviews, by what they came to and why.",
            ("result", "reason"),
            registry=self._registry,
        )
        self.seconds = Histogram(
            "slotcar_injector_admission_seconds",
            "Time from the head of a review to its answer.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "slotcar_injector_reviews_in_flight", "Reviews that are being read or answered.", registry=self._registry
        )
        self.expiry = Gauge(
            "slotcar_injector_certificate_expiry_timestamp_seconds",
            "When the certificate that is served ends; 0 before there is one.",
            registry=self._registry,
        )
        self._reloads = Counter(
            "slotcar_injector_certificate_reloads",
            "Certificates that were found in new files, by whether they could be used.",
            ("result",),
            registry=self._registry,
        )
        build = Gauge("slotcar_injector_build_info", "1.", ("version",), registry=self._registry)
        build.labels(version).set(1)
        # From the start at 0, so that the first one is an increase.
        for result in ("used", "refused"):
            self._reloads.labels(result)
        for reason in FAILURES:
            self._admissions.labels(Result.FAILED, reason)

    def admitted(self, result: Result, reason: Reason, seconds: float) -> None:
        self._admissions.labels(result, reason).inc()
        self.seconds.observe(seconds)

    def reloaded(self, *, used: bool) -> None:
        self._reloads.labels("used" if used else "refused").inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
