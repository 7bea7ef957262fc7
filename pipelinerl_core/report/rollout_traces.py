"""A trained rollout as a trace: prompt, turns, what tools or the environment answered, reward, weight versions."""

from pipelinerl_core.report.facts import TrainedRollout
from pipelinerl_core.report.samples import Decode, plain_text
from pipelinerl_core.rollouts.task_columns import task_columns
from pipelinerl_core.telemetry.mlflow_traces import RolloutTrace, TraceSpan
from pipelinerl_core.types import TurnSpan

MAX_CHARS = 2000


def rollout_trace(row: TrainedRollout, decode: Decode | None) -> RolloutTrace:
    """The trace of a rollout. Texts are cut.

    No row has the times of single tokens: the spans of turns divide the time of the rollout by their tokens.
    """

    def text(start: int, end: int) -> str:
        return plain_text(row.completion_token_ids[start:end], decode)[:MAX_CHARS]

    def time_of(token: int) -> float:
        return row.started_at + (row.finished_at - row.started_at) * token / max(1, num_tokens)

    def versions(start: int, end: int) -> list[int]:
        return [span.version for span in row.weight_spans if span.start < end and span.end > start]

    num_tokens = len(row.completion_token_ids)
    prompt = plain_text(row.prompt_token_ids, decode)[:MAX_CHARS]
    given, spans, before = prompt, list[TraceSpan](), 0
    for number, (start, end) in enumerate(row.turn_spans or (TurnSpan(0, num_tokens),)):
        if start > before:
            answer = text(before, start)
            spans.append(TraceSpan(
                name="environment", kind="TOOL", start=time_of(before), end=time_of(start),
                inputs=spans[-1].outputs if spans else prompt, outputs=answer,
            ))  # fmt: skip
            given = answer
        reward = {"reward": row.turn_rewards[number]} if row.turn_rewards else {}
        spans.append(TraceSpan(
            name=f"turn {number + 1}", kind="LLM", start=time_of(start), end=time_of(end), inputs=given,
            outputs=text(start, end), attributes={"versions": versions(start, end), **reward},
        ))  # fmt: skip
        before = end
    scored_at = row.finished_at + row.scoring_seconds
    spans.append(TraceSpan(
        name="reward", kind="EVALUATOR", start=row.finished_at, end=scored_at, inputs=task_columns(row.task),
        outputs={"reward": row.reward, **row.components}, attributes={"outcome": row.outcome},
    ))  # fmt: skip
    root = TraceSpan(
        name="rollout", kind="AGENT", start=row.started_at, end=scored_at, inputs=prompt, outputs=text(0, num_tokens),
        attributes={
            "step": row.step, "reward": row.reward, "advantage": row.advantage, "actor": row.actor,
            "versions": versions(0, num_tokens), "tokens": num_tokens, "finish_reason": row.finish_reason,
        },
    )  # fmt: skip
    tags = {
        "step": str(row.step),
        "reward": "none" if row.reward is None else f"{row.reward:.4g}",
        "versions": ", ".join(map(str, versions(0, num_tokens))),
    }
    return RolloutTrace(name=f"rollout {row.name}", spans=[root, *spans], tags=tags)
