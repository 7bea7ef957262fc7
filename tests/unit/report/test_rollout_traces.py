"""The trace of a rollout with two turns and an answer of a tool between them."""

from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
from mlflow.exceptions import MlflowException

from pipelinerl_core.report import rollout_traces
from pipelinerl_core.report.rollout_traces import log_traces, trace_spans
from pipelinerl_core.types import RewardComponent, TurnSpan, WeightSpan
from tests.synthetic_run import text_of_ids, trained_rollout


def codes(text):
    return np.array([ord(letter) for letter in text], dtype=np.int64)


def rollout_with_tool():
    """Prompt "Q", a call of a tool (tokens 0 to 3), its answer (4, 5), an answer (6 to 9); of versions 3 and 4."""
    mask = np.ones(10, dtype=np.bool_)
    return trained_rollout(
        step=5, group_id=12, rollout_index=3, actor="actor-0", reward=0.5, outcome="scored", finish_reason="stop",
        scored_at=1010.25, prompt_token_ids=codes("Q"), completion_token_ids=codes("call" + "42" + "done"),
        weight_spans=(WeightSpan(3, 0, 4), WeightSpan(4, 4, 10)), loss_mask=mask, loss_mask_trained=mask,
        turn_spans=(TurnSpan(0, 4), TurnSpan(6, 10)), turn_rewards=(0.0, 0.5), task='{"answer": "42"}',
        reward_components=(RewardComponent("exact", 0.5),), advantage=0.1, started_at=1000.0, finished_at=1010.0,
    )  # fmt: skip


def test_turns_tools_reward_and_versions_are_spans():
    root, first, tool, second, reward = trace_spans(rollout_with_tool(), text_of_ids)
    assert (root["inputs"], root["outputs"], root["versions"], root["step"]) == ("Q", "call42done", [3, 4], 5)
    assert (first["kind"], first["inputs"], first["outputs"], first["versions"], first["reward"]) == (
        "LLM", "Q", "call", [3], 0.0
    )  # fmt: skip
    assert (tool["kind"], tool["inputs"], tool["outputs"], tool["versions"]) == ("TOOL", "call", "42", [])
    assert (second["inputs"], second["outputs"], second["versions"], second["reward"]) == ("42", "done", [4], 0.5)
    assert (reward["inputs"], reward["outputs"]) == ({"answer": "42"}, {"reward": 0.5, "exact": 0.5})
    assert [(span["start"], span["end"]) for span in (root, first, tool, second, reward)] == [
        (1000.0, 1010.25), (1000.0, 1004.0), (1004.0, 1006.0), (1006.0, 1010.0), (1010.0, 1010.25)
    ]  # fmt: skip


def test_a_completion_without_turns_is_one_turn_and_long_texts_are_cut():
    long = np.full(3000, ord("x"))
    single = replace(rollout_with_tool(), turn_spans=(), turn_rewards=(), completion_token_ids=long)
    root, turn, _ = trace_spans(single, text_of_ids)
    assert len(root["outputs"]) == len(turn["outputs"]) == 2000
    assert (turn["name"], turn["inputs"]) == ("turn 1", "Q")


def test_a_component_named_reward_does_not_replace_the_reward():
    components = (RewardComponent("reward", 0.1), RewardComponent("exact", 0.5))
    row = replace(rollout_with_tool(), reward_components=components)
    assert trace_spans(row, text_of_ids)[-1]["outputs"] == {"reward": 0.5, "exact": 0.5}


def test_previews_fit_postgresql_and_a_refused_trace_does_not_stop_the_others(monkeypatch, caplog):
    client, run = MagicMock(), MagicMock()
    client.start_trace.side_effect = [MlflowException("value too long\nSQL"), None]
    monkeypatch.setattr(rollout_traces, "TracingClient", lambda uri: client)
    row = replace(rollout_with_tool(), prompt_token_ids=codes("\0" + "a" * 1500))
    log_traces("", run, [row, row], text_of_ids)
    (trace,) = client.start_trace.call_args.args
    assert trace.request_preview == "a" * 1000
    assert client.log_spans.call_count == 1
    assert [record.getMessage() for record in caplog.records] == [
        "MLflow refused 1 traces of rollouts, which are left out: value too long"
    ]
