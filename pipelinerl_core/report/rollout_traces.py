"""Sampled rollouts as traces in MLflow: prompt, turns, answers of tools or the environment, reward, versions."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from pipelinerl_core.report.facts import TrainedRollout
from pipelinerl_core.report.samples import Decode, plain_text
from pipelinerl_core.rollouts.task_columns import task_columns
from pipelinerl_core.telemetry import mlflow as _variables  # noqa: F401 (MLflow reads them when it is imported)
from pipelinerl_core.types import TurnSpan

from mlflow.entities import Run, Span, TraceInfo, TraceLocation, TraceState  # isort: skip
from mlflow.tracing.client import TracingClient

MAX_CHARS = 2000
_ATTRIBUTES = {"kind": "mlflow.spanType", "inputs": "mlflow.spanInputs", "outputs": "mlflow.spanOutputs"}


def log_traces(uri: str, run: Run, rollouts: Iterable[TrainedRollout], decode: Decode | None) -> None:
    """Write rollouts as traces of an MLflow run. A resume writes the same ids again. Raises MlflowException."""
    client, experiment = TracingClient(uri), run.info.experiment_id
    for row in rollouts:
        spans = trace_spans(row, decode)
        trace_id = f"tr-{hashlib.sha256(f'{run.info.run_id} {row.name}'.encode()).hexdigest()[:32]}"
        client.start_trace(TraceInfo(
            trace_id, TraceLocation.from_experiment_id(experiment), round(row.started_at * 1000), TraceState.OK,
            request_preview=spans[0]["inputs"], response_preview=spans[0]["outputs"],
            execution_duration=round((spans[0]["end"] - row.started_at) * 1000),
            trace_metadata={"mlflow.sourceRun": run.info.run_id},
            tags={"mlflow.traceName": f"rollout {row.name}", "step": str(row.step), "reward": str(row.reward)},
        ))  # fmt: skip
        client.log_spans(experiment, [_span(trace_id, number, span) for number, span in enumerate(spans, 1)])


def trace_spans(row: TrainedRollout, decode: Decode | None) -> list[dict[str, Any]]:
    """The spans of a rollout, the whole rollout first; texts are cut, times are Unix seconds. Rows have no times of
    tokens: the spans of turns divide the time of the rollout by their tokens."""
    num_tokens, scored_at = len(row.completion_token_ids), row.finished_at + row.scoring_seconds
    per_token = (row.finished_at - row.started_at) / max(1, num_tokens)
    prompt = plain_text(row.prompt_token_ids, decode)[:MAX_CHARS]

    def span(name: str, kind: str, start: int, end: int, inputs: Any) -> dict[str, Any]:
        versions = [own.version for own in row.weight_spans if own.start < end and own.end > start]
        text = plain_text(row.completion_token_ids[start:end], decode)[:MAX_CHARS]
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
    outputs = {"reward": row.reward, **row.components}
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
