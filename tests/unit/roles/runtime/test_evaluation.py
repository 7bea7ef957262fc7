"""Evaluation on a scripted engine: what an EvalRecord says, limits of time, and errors."""

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest

from pipelinerl_core.errors import ConfigError, EngineError, RewardError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.runtime.evaluation import EvalSet, Evaluation, measure
from pipelinerl_core.roles.runtime.task import Task
from pipelinerl_core.rollouts.player import TextCodec
from pipelinerl_core.types import Chunk, Completion, FinishReason, Prompt, RewardComponent, Score, WeightSpan
from tests.fakes import MemoryStore

EMPTY = np.zeros(0, np.float32)


class Engine:
    """Answers with the number of the sample (9 if greedy) as its one token; counts the sequences at once."""

    weight_version = 4

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.running = self.most = 0

    async def generate(self, request):
        if request.request_id.endswith(".broken"):
            raise EngineError("too long")
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        number = 9 if request.sampler.temperature == 0 else int(request.request_id.rpartition(".")[2])
        self.weight_version += number == 1  # a swap in the middle of the evaluation
        completion = Completion(
            token_ids=np.array([request.prompt_token_ids[0], number], np.int32),
            rollout_logprobs=EMPTY,
            weight_spans=(WeightSpan(self.weight_version, 0, 2),),
            finish_reason=FinishReason.STOP,
        )
        yield Chunk(
            request_id=request.request_id, token_ids=completion.token_ids, rollout_logprobs=EMPTY,
            weight_version=self.weight_version, completion=completion,
        )  # fmt: skip


def score(prompt, text):
    """0 for sample 0, 1 for the others; an error for prompt 2."""
    if prompt.prompt_id == "2":
        raise RewardError("no number")
    value = float(not text.endswith("0"))
    return Score(value, (RewardComponent("right", value), RewardComponent("length", 2.0)))


def prompts(num):
    return [Prompt(prompt_id=str(i), source="s", env="e", text=f"prompt {i}", task={"answer": i}) for i in range(num)]


async def async_score(prompt, text, completion):
    return score(prompt, text)


def held_out_set(num, *overrides):
    codec = TextCodec(
        encode=lambda prompt: np.array([int(prompt.prompt_id)], np.int32),
        decode=lambda token_ids: " ".join(map(str, token_ids.tolist())),
    )
    config = load_config("quickstart", list(overrides))
    task = Task(config=config, codec=codec, scorer=SimpleNamespace(score=async_score))
    return EvalSet(name="hard", prompts=prompts(num), task=task)


def evaluated(engine, num, *overrides, slots=8, max_seconds=60.0, reports=None):
    held_out = held_out_set(num, *overrides)
    report = (lambda progress: None) if reports is None else reports.append
    return asyncio.run(
        measure(engine, held_out, slots=slots, num_prompts=num, max_seconds=max_seconds, report=report)
    )


def test_a_first_evaluation_without_a_reward_ends_the_run(monkeypatch):
    calls = []

    async def fails(prompt, text, completion):
        calls.append(prompt.prompt_id)
        if len(calls) != healthy:
            raise RewardError("no server")
        return Score(1.0, ())

    monkeypatch.setitem(globals(), "async_score", fails)
    for version, healthy, is_refused in ((0, 0, True), (0, 5, False), (1, 0, False)):
        calls.clear()
        engine = Engine()
        engine.weight_version = version
        if is_refused:
            with pytest.raises(ExceptionGroup) as caught:
                evaluated(engine, 40, slots=2)
            (error,) = caught.value.exceptions
            assert isinstance(error, ConfigError)
            assert str(error).startswith(
                "the first evaluation of the set hard has no reward: all of its first 8 roll"
            )
            assert "no server" in str(error)
            assert len(calls) < 12
        else:
            assert evaluated(engine, 40, slots=2).errors == 40 - bool(healthy)


def test_samples_greedy_completions_best_and_components_are_apart():
    record = evaluated(Engine(), 4, "eval.samples=2", "eval.greedy=true")
    assert (record.set, record.num_prompts, record.num_samples) == ("hard", 4, 2)
    assert (record.accuracy, record.best, record.greedy) == (0.5, 1.0, 1.0)
    assert record.components == {"right": 0.5, "length": 2.0}
    assert record.errors == 3, "prompt 2, three times"
    assert record.low < 0.5 < record.high
    assert (record.version, record.last_version) == (4, 8), "swapped in once per second sample"
    assert record.mean_tokens == 2.0
    assert record.samples[2] == {
        "prompt": "prompt 2", "completion": "2 0", "reward": None, "reference": "2", "task": {"answer": 2},
    }  # fmt: skip


def test_one_sample_has_no_best_and_nothing_scored_is_zero_without_interval():
    assert evaluated(Engine(), 2).best is None
    engine = Engine()
    engine.generate = lambda request: broken(request)
    record = evaluated(engine, 3)
    assert (record.accuracy, record.low, record.errors, record.mean_tokens) == (0.0, None, 3, 0.0)


async def broken(request):
    raise EngineError("too long")
    yield


def test_an_evaluation_keeps_to_its_slots():
    engine = Engine(seconds=0.01)
    evaluated(engine, 12, "eval.samples=2", slots=6)
    assert engine.most == 6
    engine = Engine(seconds=0.01)
    evaluated(engine, 3, "eval.samples=4", slots=1)
    assert engine.most == 4, "the completions of one prompt at least"


def test_after_the_limit_no_further_prompt_is_taken_and_the_evaluated_prompts_are_the_first():
    record = evaluated(Engine(seconds=0.05), 1000, slots=2, max_seconds=0.2)
    assert 2 <= record.num_prompts < 1000
    assert [sample["prompt"] for sample in record.samples][:2] == ["prompt 0", "prompt 1"]


def test_progress_is_reported_and_cleared(monkeypatch):
    monkeypatch.setattr("pipelinerl_core.roles.runtime.evaluation._PROGRESS_SECONDS", 0.02)
    reports = []
    evaluated(Engine(seconds=0.05), 6, slots=2, reports=reports)
    assert reports[0].startswith("evaluating version 4 on hard: ")
    assert reports[0].endswith("/6 prompts")
    assert reports[-1] == ""


@pytest.mark.parametrize("changed", [["eval.samples=3"], ["eval.greedy=true"]], ids=str)
def test_the_first_sample_of_a_prompt_does_not_depend_on_the_others(changed):
    seeds = {}

    class Seeds(Engine):
        async def generate(self, request):
            seeds.setdefault(request.request_id, set()).add(request.sampler.seed)
            async for chunk in super().generate(request):
                yield chunk

    evaluated(Seeds(), 3)
    evaluated(Seeds(), 3, *changed)
    assert all(len(seen) == 1 for seen in seeds.values())
    sampled = [seed for name, seen in seeds.items() if not name.endswith("greedy") for seed in seen]
    assert len(set(sampled)) == len(sampled)


def test_completions_are_sampled_as_in_training_unless_told_and_the_record_says_how():
    asked = []

    class Asked(Engine):
        async def generate(self, request):
            asked.append((request.sampler.temperature, request.sampler.top_p, request.max_tokens))
            async for chunk in super().generate(request):
                yield chunk

    record = evaluated(Asked(), 1, "rollouts.temperature=0.7", "rollouts.max_tokens=12", "eval.greedy=true")
    assert sorted(asked) == [(0.0, 1.0, 12), (0.7, 1.0, 12)]
    assert (record.temperature, record.top_p) == (0.7, 1.0)
    asked.clear()
    chosen = ["eval.temperature=0.6", "eval.top_p=0.95", "eval.max_tokens=30"]
    record = evaluated(Asked(), 1, "rollouts.temperature=0.7", *chosen)
    assert asked == [(0.6, 0.95, 30)]
    assert (record.temperature, record.top_p) == (0.6, 0.95)


@pytest.mark.parametrize("version", [0, 4])
def test_an_engine_that_ends_meanwhile_gives_no_record(version):
    """Else the answers until then would be the accuracy, and no other engine would evaluate the version."""

    class Ending(Engine):
        failure = ""

        async def generate(self, request):
            if request.request_id.startswith("eval.hard.3."):
                self.failure = "the model's logits are not finite"
            if self.failure:
                raise EngineError(self.failure)
            async for chunk in super().generate(request):
                yield chunk

    engine = Ending()
    engine.weight_version = version
    with pytest.raises(ExceptionGroup) as caught:
        evaluated(engine, 40, slots=2)
    assert {type(error) for error in caught.value.exceptions} == {EngineError}


async def test_the_event_loop_goes_on_while_a_slow_store_is_asked_for_the_first_evaluation():
    class Slow(MemoryStore):
        def exists(self, key):
            time.sleep(0.5)
            return super().exists(key)

    evaluation = object.__new__(Evaluation)
    evaluation._config = SimpleNamespace(mixture={})
    evaluation._store, evaluation._engine, evaluation._slots = Slow(), Engine(), 2
    evaluation._sets, evaluation._newest_step = [held_out_set(2)], lambda: 4
    evaluation._report = lambda progress: None
    ticks = 0
    running = asyncio.create_task(evaluation.run(2))
    while not running.done():
        ticks += 1
        await asyncio.sleep(0.01)
    assert (await running).num_prompts == 2
    assert ticks > 20
