"""Rollouts as traces in MLflow. The id of a trace follows from the run and the rollout, so that a resume writes the
same trace again."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipelinerl_core.telemetry import mlflow as _variables  # noqa: F401 (before mlflow)

from mlflow.entities import Run, Span, TraceInfo, TraceLocation, TraceState  # isort: skip
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey, TraceTagKey

_ID_CHARS = 32
_NANOSECONDS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """A part of a rollout."""

    name: str
    kind: Literal["AGENT", "LLM", "TOOL", "EVALUATOR"]
    start: float
    """Unix seconds."""
    end: float
    inputs: Any
    outputs: Any
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTrace:
    """A rollout: the first span has all others below it."""

    name: str
    spans: Sequence[TraceSpan]
    tags: Mapping[str, str]


def log_traces(uri: str, run: Run, traces: Sequence[RolloutTrace]) -> None:
    """Write traces that belong to an MLflow run. Raises MlflowException."""
    client, experiment = TracingClient(uri), run.info.experiment_id
    for trace in traces:
        digest = hashlib.sha256(f"{run.info.run_id} {trace.name}".encode()).hexdigest()[:_ID_CHARS]
        root = trace.spans[0]
        metadata = {
            TraceMetadataKey.SOURCE_RUN: run.info.run_id,
            TraceMetadataKey.INPUTS: json.dumps(root.inputs),
            TraceMetadataKey.OUTPUTS: json.dumps(root.outputs),
        }
        info = TraceInfo(
            trace_id=f"tr-{digest}",
            trace_location=TraceLocation.from_experiment_id(experiment),
            request_time=round(root.start * 1000),
            execution_duration=round((root.end - root.start) * 1000),
            state=TraceState.OK,
            request_preview=str(root.inputs),
            response_preview=str(root.outputs),
            trace_metadata=metadata,
            tags={TraceTagKey.TRACE_NAME: trace.name, **trace.tags},
        )
        client.start_trace(info)
        client.log_spans(
            experiment, [_span(info.trace_id, number, span) for number, span in enumerate(trace.spans, 1)]
        )


def _span(trace_id: str, number: int, span: TraceSpan) -> Span:
    attributes = {
        SpanAttributeKey.REQUEST_ID: trace_id,
        SpanAttributeKey.SPAN_TYPE: span.kind,
        SpanAttributeKey.INPUTS: span.inputs,
        SpanAttributeKey.OUTPUTS: span.outputs,
        **span.attributes,
    }
    return Span.from_dict({
        "trace_id": trace_id, "span_id": f"{number:016x}", "parent_span_id": f"{1:016x}" if number > 1 else None,
        "name": span.name, "events": [], "status": {"code": "STATUS_CODE_OK", "message": ""},
        "start_time_unix_nano": int(span.start * _NANOSECONDS), "end_time_unix_nano": int(span.end * _NANOSECONDS),
        "attributes": {key: json.dumps(value) for key, value in attributes.items()},
    })  # fmt: skip
