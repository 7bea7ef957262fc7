"""Sampled rollouts as traces in MLflow: prompt, turns, answers of tools or the environment, reward, versions."""

import hashlib
import json
import logging
import time
from collections.abc import Iterable
from typing import Any

from pipelinerl_core.report.facts import TrainedRollout
from pipelinerl_core.report.samples import Decode, plain_text
from pipelinerl_core.rollouts.task_columns import task_columns
from pipelinerl_core.telemetry import mlflow as _variables  # noqa: F401 (MLflow reads them when it is imported)
from pipelinerl_core.telemetry.redact import redact_text
from pipelinerl_core.types import TurnSpan

from mlflow.entities import Run, Span, TraceInfo, TraceLocation, TraceState  # isort: skip
from mlflow.exceptions import MlflowException
from mlflow.tracing.client import TracingClient

logger = logging.getLogger(__name__)

MAX_CHARS = 2000
_MAX_PREVIEW = 1000  # of MLflow's columns on PostgreSQL
_MAX_FAILING_SECONDS = 60.0  # later, a failure ends the writing: MLflow is probably away
_ATTRIBUTES = {"kind": "mlflow.spanType", "inputs": "mlflow.spanInputs", "outputs": "mlflow.spanOutputs"}


def log_traces(uri: str, run: Run, rollouts: Iterable[TrainedRollout], decode: Decode | None) -> None:
    """Write rollouts as traces of an MLflow run. A resume writes the same ids again. A trace that MLflow refuses
    is left out. Raises MlflowException if a request fails after a minute."""
    client, begun = TracingClient(uri), time.monotonic()
    refused: list[str] = []
    for row in rollouts:
        try:
            _log_trace(client, run, row, decode)
        except MlflowException as error:
            refused.append(redact_text(str(error)).partition("\n")[0][:200])
            if time.monotonic() - begun > _MAX_FAILING_SECONDS:
                raise
    if refused:
        logger.warning("MLflow refused %d traces of rollouts, which are left out: %s", len(refused), refused[0])


def _log_trace(client: TracingClient, run: Run, row: TrainedRollout, decode: Decode | None) -> None:
    spans, experiment = trace_spans(row, decode), run.info.experiment_id
    trace_id = f"tr-{hashlib.sha256(f'{run.info.run_id} {row.name}'.encode()).hexdigest()[:32]}"
    client.start_trace(TraceInfo(
        trace_id, TraceLocation.from_experiment_id(experiment), round(row.started_at * 1000), TraceState.OK,
        request_preview=spans[0]["inputs"][:_MAX_PREVIEW], response_preview=spans[0]["outputs"][:_MAX_PREVIEW],
        execution_duration=round((spans[0]["end"] - row.started_at) * 1000),
        trace_metadata={"mlflow.sourceRun": run.info.run_id},
        tags={"mlflow.traceName": f"rollout {row.name}", "step": str(row.step), "reward": str(row.reward)},
    ))  # fmt: skip
    client.log_spans(experiment, [_span(trace_id, number, span) for number, span in enumerate(spans, 1)])


def trace_spans(row: TrainedRollout, decode: Decode | None) -> list[dict[str, Any]]:
    """The spans of a rollout, the whole rollout first; texts are cut, times are Unix seconds. Rows have no times of
    tokens: the spans of turns divide the time of the rollout by their tokens."""
    num_tokens, scored_at = row.num_tokens, row.scored_at
    per_token = (row.finished_at - row.started_at) / max(1, num_tokens)
    prompt = plain_text(row.prompt_token_ids, decode)[:MAX_CHARS].replace("\0", "")  # PostgreSQL refuses NUL

    def span(name: str, kind: str, start: int, end: int, inputs: Any) -> dict[str, Any]:
        versions = [own.version for own in row.weight_spans if own.start < end and own.end > start]
        text = plain_text(row.completion_token_ids[start:end], decode)[:MAX_CHARS].replace("\0", "")
        times = {"start": row.started_at + start * per_token, "end": row.started_at + end * per_token}
        return {"name": name, "kind": kind, "inputs": inputs, "outputs": text, "versions": versions, **times}

    whole = span("rollout", "AGENT", 0, num_tokens, prompt)
    spans = [{**whole, "end": scored_at, "step": row.step, "advantage": row.advantage, "actor": row.actor}]
    given, before = prompt, 0
    for number, (start, end) in enumerate(row.turn_spans or (TurnSpan(0, num_tokens),)):
        if start > before:
            spans.append({**span("environment", "TOOL", before, start, spans[-1]["outputs"]), "versions": []})
            given = spans[-1]["outputs"]
        spans.append(span(f"turn {number + 1}", "LLM", start, end, given))
        spans[-1] |= {"reward": row.turn_rewards[number]} if row.turn_rewards else {}
        before = end
    outputs = {**row.components, "reward": row.reward}
    scoring = {"name": "reward", "kind": "EVALUATOR", "start": row.finished_at, "end": scored_at}
    return [*spans, {**scoring, "inputs": task_columns(row.task), "outputs": outputs, "outcome": row.outcome}]


def _span(trace_id: str, number: int, span: dict[str, Any]) -> Span:
    own = {_ATTRIBUTES.get(key, key): json.dumps(span[key]) for key in span.keys() - {"name", "start", "end"}}
    return Span.from_dict({
        "trace_id": trace_id, "span_id": f"{number:016x}", "parent_span_id": f"{1:016x}" if number > 1 else None,
        "name": span["name"], "events": [], "status": {"code": "STATUS_CODE_OK", "message": ""},
        "start_time_unix_nano": int(span["start"] * 1e9), "end_time_unix_nano": int(span["end"] * 1e9),
        "attributes": {"mlflow.traceRequestId": json.dumps(trace_id), **own},
    })  # fmt: skip
