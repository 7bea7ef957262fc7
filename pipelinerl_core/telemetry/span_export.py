"""Exports spans to a file of JSON lines or to an OpenTelemetry collector; imported only if tracing is on.

Each line of the file is one message of OTLP's JSON encoding, which a collector's otlpjsonfile receiver reads.
"""

import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as OtelEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Link, SpanContext, TraceFlags

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.telemetry.traces import Span, SpanRef

logger = logging.getLogger(__name__)

SCOPE = "pipelinerl"
CLOSE_SECONDS = 2.0
"""Longest delay of the end of a role by a collector that does not answer."""
DELAY_SECONDS = 1.0
"""Time for which spans are collected into a batch."""
_NANO = 1_000_000_000


class BatchSink:
    """Exports spans with OpenTelemetry's batch processor, which has a bounded queue and a thread."""

    def __init__(self, exporter: SpanExporter, *, role: str, name: str, run_id: str) -> None:
        self._resource = Resource.create(
            {"service.name": f"pipelinerl-{role}", "service.instance.id": name, "pipelinerl.run": run_id}
        )
        self._processor = BatchSpanProcessor(exporter, schedule_delay_millis=DELAY_SECONDS * 1000)

    def emit(self, span: Span) -> None:
        """Queue a span; dropped if 2,048 spans are queued."""
        self._processor.on_end(
            ReadableSpan(
                span.name,
                context=_context(span.ref),
                parent=_context(span.parent) if span.parent else None,
                resource=self._resource,
                attributes=span.attributes,
                events=[OtelEvent(event.name, event.attributes, _nanoseconds(event.at)) for event in span.events],
                links=[Link(_context(ref)) for ref in span.links],
                start_time=_nanoseconds(span.start),
                end_time=_nanoseconds(span.end),
            )
        )

    def close(self) -> None:
        """Export the queued spans; waits at most 2 s."""
        thread = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)


class FileExporter(SpanExporter):
    """Appends to a file. At half of max_bytes, the file is renamed to `.1`, replacing the previous `.1`."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._half_bytes = max_bytes // 2

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append one line with all spans."""
        if not spans:
            return SpanExportResult.SUCCESS
        scope = {"scope": {"name": SCOPE}, "spans": [_as_json(span) for span in spans]}
        resource = {"attributes": _attributes(spans[0].resource.attributes)}
        try:
            if self._path.exists() and self._path.stat().st_size > self._half_bytes:
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            with self._path.open("a") as file:
                file.write(json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}) + "\n")
        except OSError as error:
            logger.warning("%s: %d spans are lost: %s", self._path, len(spans), error.strerror or error)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS


def build_sink(
    kind: Literal["file", "otlp"], *, role: str, name: str, run_id: str, directory: Path, max_bytes: int
) -> BatchSink:
    """The sink of a role. For `otlp`, the variables OTEL_EXPORTER_OTLP_* name the collector.

    Raises ConfigError if the package for `otlp` is not installed.
    """
    to_file = kind == "file"
    exporter = FileExporter(directory / f"{name}.traces.jsonl", max_bytes) if to_file else _otlp_exporter()
    return BatchSink(exporter, role=role, name=name, run_id=run_id)


def _otlp_exporter() -> SpanExporter:
    # Traces are not worth a long wait for a collector. The variable is OpenTelemetry's.
    os.environ.setdefault("OTEL_EXPORTER_OTLP_TIMEOUT", "5")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            "tracking.traces=otlp needs opentelemetry-exporter-otlp-proto-http, which is not installed. "
            "Run `make install`, or set tracking.traces=file"
        ) from None
    return OTLPSpanExporter()


def _context(ref: SpanRef) -> SpanContext:
    return SpanContext(ref.trace_id, ref.span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * _NANO)


def _as_json(span: ReadableSpan) -> dict[str, Any]:
    """A span in OTLP's JSON encoding: ids in hexadecimal, 64-bit integers as text."""
    assert span.context is not None
    return {
        "traceId": f"{span.context.trace_id:032x}",
        "spanId": f"{span.context.span_id:016x}",
        **({"parentSpanId": f"{span.parent.span_id:016x}"} if span.parent else {}),
        "name": span.name,
        "kind": 1,  # SPAN_KIND_INTERNAL
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes or {}),
        "events": [
            {
                "timeUnixNano": str(event.timestamp),
                "name": event.name,
                "attributes": _attributes(event.attributes or {}),
            }
            for event in span.events
        ],
        "links": [
            {"traceId": f"{link.context.trace_id:032x}", "spanId": f"{link.context.span_id:016x}"}
            for link in span.links
        ],
    }


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}
