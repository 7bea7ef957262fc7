"""What is vLLM's own: stale prefixes, engine cores that die, processes that must not stay behind. Real vLLM."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import psutil
import pytest

from pipelinerl_core.errors import EngineError, SwapError
from pipelinerl_core.interfaces import WeightUpdate
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.types import FinishReason, Sampler, WeightSpan
from pipelinerl_core.weights.broadcast import WeightBroadcaster, read_group
from tests.builders import completion_of as finish
from tests.builders import engine_request
from tests.models import VOCAB_SIZE, reference_logprobs, tiny_model, weights_of
from tests.processes import is_running
from tests.vllm_cores import LONGEST, START_SECONDS, VLLMBuilder
from tests.waiting import until, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning"
    ),  # vLLM leaves its ZeroMQ context open
]

PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB_SIZE, 70)]


def model(seed=0):
    return tiny_model("qwen2", seed, hidden_size=128)


ask = partial(engine_request, prompt=PROMPT)


def update(seed, version):
    tensors = weights_of(model(seed))
    return WeightUpdate(version=version, tensors=tensors, num_bytes=1)


@pytest.fixture
def start(tmp_path):
    """Starts an engine on a core of its own; `await start(slots=..., ...)`. All are closed at the end."""
    from pipelinerl_core.engine.vllm.core import CoreSettings, VLLMCore
    from pipelinerl_core.engine.vllm.engine import VLLMEngine
    from pipelinerl_core.engine.vllm.weights import StagedWeights

    model().save_pretrained(tmp_path / "model")

    async def _start(*, slots=8, kv_bytes=2**26, stream_interval=4, max_len=256, **parallel):
        settings = CoreSettings(
            model=str(tmp_path / "model"),
            dtype="float32",
            max_len=max_len,
            max_sequences=slots,
            seed=0,
            kv_bytes=kv_bytes,
            block_size=32,
            stream_interval=stream_interval,
            **parallel,
        )
        core = VLLMCore(settings)
        await core.start()
        engine = VLLMEngine(
            core,
            StagedWeights(settings.model),
            slots=slots,
            max_len=max_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(),
        )
        await engine.open()
        return engine

    return _start


@pytest.fixture
def shared(vllm_cores):
    """As `start`, on a core that tests share: `await shared(model(), slots=..., max_len=...)`, `shared.run(...)`."""
    return VLLMBuilder(vllm_cores, max_sequences=64, stream_interval=4)


def engine_cores():
    """Processes of vLLM below this one."""
    return [child for child in psutil.Process().children(recursive=True) if _is_vllm(child)]


def _is_vllm(process):
    try:
        return process.name().startswith("VLLM") or "spawn_main" in " ".join(process.cmdline())
    except psutil.Error:
        return False


async def sampled(engine, num_tokens):
    await until(lambda: engine.stats().num_tokens >= num_tokens, f"{num_tokens} tokens", START_SECONDS, pause=0.001)


def kill_engine_core():
    for process in engine_cores():
        with contextlib.suppress(psutil.NoSuchProcess):  # a worker goes with its core
            process.send_signal(signal.SIGKILL)


def check(completion, models, prompt=PROMPT):
    """Its log-probabilities are those of its versions; each stay in an engine core prefills anew."""
    expected = reference_logprobs(models, prompt, completion)
    np.testing.assert_allclose(completion.rollout_logprobs, expected, atol=1e-3)


def test_a_prefix_of_old_weights_is_served_without_the_salt_and_never_with_the_salt(shared):
    async def main():
        engine = await shared(model(), slots=8, max_len=LONGEST)
        core = engine._keeper.core
        await finish(engine, ask("fill", max_tokens=2))
        await engine.swap(update(1, 1))

        async def first_logprob(name, salt):
            stay = core.generate(
                name, PROMPT, max_tokens=1, sampler=Sampler(temperature=1.0, top_p=1e-6), stop_token_ids=[], salt=salt
            )
            stay_full = core.generate(
                name + "f", PROMPT, max_tokens=1, sampler=Sampler(), stop_token_ids=[], salt=salt
            )
            _ = [output async for output in stay]
            return [output async for output in stay_full][-1]

        stale = await first_logprob("stale", "w0")
        fresh = await finish(engine, ask("fresh", max_tokens=1))
        await engine.close()
        return stale, fresh

    stale, fresh = shared.run(main())
    check(fresh, {1: model(1)})
    row = _first_row(model(1))
    assert abs(stale.logprobs[0] - row[stale.token_ids[0]]) > 0.01


def _first_row(of):
    import torch

    with torch.no_grad():
        return torch.log_softmax(of(torch.tensor([PROMPT])).logits[0, -1].float(), dim=-1).tolist()


def test_thousands_of_short_requests(shared):
    async def main():
        engine = await shared(model(), slots=64, max_len=LONGEST)
        rng = np.random.default_rng(1)
        requests = [
            ask(f"r{i}", prompt=rng.integers(0, VOCAB_SIZE, 3).tolist(), max_tokens=int(rng.integers(1, 6)))
            for i in range(3000)
        ]
        completions = await asyncio.gather(*(finish(engine, request) for request in requests))
        stats = engine.stats()
        await engine.close()
        return requests, completions, stats

    requests, completions, stats = shared.run(main())
    assert [len(c.token_ids) for c in completions] == [r.max_tokens for r in requests]
    assert stats.num_tokens == sum(r.max_tokens for r in requests)
    assert (stats.running, stats.waiting) == (0, 0)


@pytest.mark.campaign
@pytest.mark.parametrize("parallel", ["tensor_parallel", "data_parallel"])
def test_a_model_on_two_workers_swaps_in_all_of_them_at_once(start, parallel):
    async def main():
        engine = await start(slots=8, **{parallel: 2})
        tasks = [asyncio.create_task(finish(engine, ask(f"r{i}", max_tokens=180))) for i in range(8)]
        await sampled(engine, 80)
        await engine.swap(update(1, 1))
        completions = await asyncio.gather(*tasks)
        await engine.close()
        return completions

    models = {0: model(0), 1: model(1)}
    completions = asyncio.run(main())
    for completion in completions:
        check(completion, models)
    versions = [[span.version for span in completion.weight_spans] for completion in completions]
    # One that had no token yet, in the slower of two engine cores, was sent back and began under the new weights.
    assert versions.count([0, 1]) >= 4
    assert all(sequence_versions in ([0, 1], [1]) for sequence_versions in versions)


@pytest.mark.campaign
def test_weights_come_from_the_trainers_memory_and_from_a_file_when_they_are_lost(shared, tmp_path):
    """weights.transport=nccl, over gloo: join, a broadcast in mid-sequence, the death of what received it."""
    store = open_store(f"file://{tmp_path}/run")
    broadcaster = WeightBroadcaster(
        store, epoch=1, workers_per_actor=1, host="127.0.0.1", deadline_seconds=60, on_gpu=False
    )
    tensors = {name: parameter.detach() for name, parameter in model(1).named_parameters()}

    async def main():
        engine = await shared(model(), slots=4, max_len=LONGEST)
        tasks = [asyncio.create_task(finish(engine, ask(f"r{i}", max_tokens=180))) for i in range(6)]
        assert broadcaster.ensure_group({"actor-0": engine.group}, tensors) is False
        group = read_group(store, broadcaster.number)
        await engine.join(dataclasses.replace(group, port=1, deadline_seconds=30), 1)  # no store listens on the port
        await sampled(engine, 30)
        await engine.join(group, group.first_ranks["actor-0"])
        await until(
            lambda: broadcaster.ensure_group({"actor-0": engine.group}, tensors), "the broadcast group", START_SECONDS
        )
        assert broadcaster.number == group.number
        await sampled(engine, 60)
        sending = asyncio.create_task(asyncio.to_thread(broadcaster.send, tensors))
        report = await engine.swap(
            WeightUpdate(version=1, tensors={}, num_bytes=1, group=group.number, broadcast_index=1)
        )
        await sending
        await sampled(engine, 100)
        kill_engine_core()
        await until(lambda: engine.needs_weights, "the loss of the weights", START_SECONDS)
        assert (engine.group, engine.weight_version) == (0, 1)
        assert not any(task.done() for task in tasks)  # nothing is sampled by the weights of the model directory
        with pytest.raises(SwapError, match="the engine is in 0"):
            await engine.swap(WeightUpdate(version=2, tensors={}, num_bytes=1, group=group.number))
        await engine.swap(update(1, 1))
        completions = await asyncio.gather(*tasks)
        await engine.close()
        return report, completions

    report, completions = shared.run(main())
    broadcaster.close()
    assert (report.version, report.num_running) == (1, 4)
    for completion in completions:
        assert len(completion.token_ids) == 180
        assert {span.version for span in completion.weight_spans} <= {0, 1}
        # The end was sampled by the new core, which had prefilled all before it with version 1.
        as_one = dataclasses.replace(completion, weight_spans=(WeightSpan(1, 0, 180),))
        expected = reference_logprobs({1: model(1)}, PROMPT, as_one)
        np.testing.assert_allclose(completion.rollout_logprobs[-30:], expected[-30:], atol=1e-3)
    assert [span.version for span in completions[0].weight_spans] == [0, 1]


@pytest.mark.campaign  # every start has another seed: tests/unit/engine/vllm/test_settings.py
def test_a_restarted_engine_core_draws_other_noise(start):
    async def main():
        engine = await start()
        completions = [await finish(engine, ask("first", max_tokens=40))]
        kill_engine_core()
        await until(lambda: engine._keeper.num_deaths == 1 or engine._keeper.core.is_dead, "the death", START_SECONDS)
        completions.append(await finish(engine, ask("second", max_tokens=40)))
        await engine.close()
        return completions

    first, second = asyncio.run(main())
    assert len(first.token_ids) == len(second.token_ids) == 40
    assert first.token_ids.tolist() != second.token_ids.tolist()
    check(second, {0: model()})


def test_sequences_outlive_their_engine_core_and_keep_their_tokens(shared):
    async def main():
        engine = await shared(model(), slots=4, max_len=LONGEST)
        await engine.swap(update(1, 1))
        tasks = [asyncio.create_task(finish(engine, ask(f"r{i}", max_tokens=180))) for i in range(6)]
        await sampled(engine, 60)
        before = engine.stats()
        kill_engine_core()
        completions = await asyncio.gather(*tasks)
        report = await engine.swap(update(2, 2))
        after = engine.stats()
        await engine.close()
        return before, completions, report, after

    before, completions, report, after = shared.run(main())
    assert before.running == 4
    assert [c.finish_reason for c in completions] == [FinishReason.LENGTH] * 6
    assert [len(c.token_ids) for c in completions] == [180] * 6
    for completion in completions:
        assert {span.version for span in completion.weight_spans} == {1}  # the new core has the last good weights
        check(completion, {1: model(1)})
    assert after.num_tokens == 6 * 180  # nothing that had arrived was sampled again
    assert report.version == 2


@pytest.mark.parametrize("dies", [True, False])
def test_a_core_that_fails_in_a_swap_comes_back_on_the_old_weights_and_takes_the_new_ones_next_time(shared, dies):
    """A worker that cannot load weights fails the swap, but its core lives."""

    async def main():
        engine = await shared(model(), slots=4, max_len=LONGEST)
        await engine.swap(update(1, 1))
        tasks = [asyncio.create_task(finish(engine, ask(f"r{i}", max_tokens=180))) for i in range(4)]
        await sampled(engine, 40)
        core = engine._keeper.core
        pause = core.pause

        async def fail_after_pause(*, clear_cache):
            await pause(clear_cache=clear_cache)
            core.pause = pause
            if not dies:
                raise EngineError("out of memory")
            kill_engine_core()

        core.pause = fail_after_pause
        with pytest.raises(SwapError, match="no swap to version 2"):
            await engine.swap(update(2, 2))
        assert engine.weight_version == 1
        await engine.swap(update(2, 2))
        completions = await asyncio.gather(*tasks)
        await engine.close()
        return completions

    models = {1: model(1), 2: model(2)}
    for completion in shared.run(main()):
        assert [span.version for span in completion.weight_spans][-1] == 2
        expected = reference_logprobs(models, PROMPT, completion)
        assert len(completion.token_ids) == 180
        settled = completion.weight_spans[0].end
        np.testing.assert_allclose(completion.rollout_logprobs[:settled], expected[:settled], atol=1e-3)


def test_an_engine_core_that_keeps_dying_ends_the_engine_with_its_reason(shared):
    async def main():
        engine = await shared(model(), slots=2, max_len=LONGEST)

        async def no_start():
            raise EngineError("no memory")

        engine._keeper.core.start = no_start
        task = asyncio.create_task(finish(engine, ask("a", max_tokens=180)))
        await sampled(engine, 8)
        kill_engine_core()
        with pytest.raises(EngineError, match="could not be restarted: no memory"):
            await task
        with pytest.raises(EngineError, match="could not be restarted"):
            engine.generate(ask("b"))
        await engine.close()

    shared.run(main())


@pytest.mark.campaign
def test_a_cache_that_is_too_small_for_all_slots_takes_fewer_and_loses_nothing(start):
    async def main():
        engine = await start(slots=16, kv_bytes=2**20, stream_interval=4)
        tasks = [asyncio.create_task(finish(engine, ask(f"r{i}", max_tokens=180))) for i in range(32)]
        fewest = 16
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.05)
            fewest = min(fewest, engine.stats().slots)
        completions = [task.result() for task in tasks]
        await engine.close()
        return fewest, completions

    fewest, completions = asyncio.run(main())
    assert fewest < 16
    assert [len(c.token_ids) for c in completions] == [180] * 32
    for completion in completions[:4]:
        check(completion, {0: model()})


_ORPHAN = """
import asyncio, sys
from pipelinerl_core.engine.vllm.core import CoreSettings, VLLMCore

async def main():
    settings = CoreSettings(
        model=sys.argv[1], dtype="float32", max_len=64, max_sequences=2, seed=0, kv_bytes=2**24
    )
    core = VLLMCore(settings)
    await core.start()
    print("up", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_no_process_of_vllm_outlives_a_killed_actor(tmp_path):
    model().save_pretrained(tmp_path / "model")
    script = tmp_path / "orphan.py"
    script.write_text(_ORPHAN)
    parent = subprocess.Popen([sys.executable, script, tmp_path / "model"], stdout=subprocess.PIPE, env=os.environ)
    assert parent.stdout.readline() == b"up\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len([child for child in children if _is_vllm(child)]) >= 2  # the engine core and its worker
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(is_running(child) for child in children), f"the end of {children}", 120)
