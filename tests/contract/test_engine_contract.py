"""What every engine must do; conftest.py builds the engines.

`build` is every engine; `seeded` those that draw the noise of a token from the seed of its request alone.
"""

import asyncio
import dataclasses
import itertools
from functools import partial

import numpy as np
import pytest

from pipelinerl_core.errors import EngineError, SwapError
from pipelinerl_core.interfaces import WeightUpdate
from pipelinerl_core.types import Completion, FinishReason, WeightSpan
from tests import models as testing_models
from tests.builders import engine_request, partial_completion_of
from tests.models import VOCAB_SIZE, forcing_weights, reference_logprobs, weights_of
from tests.waiting import until as wait_until

EOS = 3
PROMPT = [5, 6, 7, 13, 8]


def tiny_model(*arguments, **settings):
    """With heads of 32, the smallest that vLLM knows on a CPU."""
    return testing_models.tiny_model(*arguments, **({"hidden_size": 128} | settings))


ask = partial(engine_request, prompt=PROMPT)
until = partial(wait_until, pause=0)


def update_of(tensors, version):
    return WeightUpdate(version=version, tensors=tensors, num_bytes=sum(t.nbytes for t in tensors.values()))


async def finish(engine, request):
    """The completion of a request; checks on the way that the chunks add up to it."""
    chunks = [chunk async for chunk in engine.generate(request)]
    assert [chunk.completion is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert {chunk.request_id for chunk in chunks} == {request.request_id}
    completion = chunks[-1].completion
    num_prior = 0 if request.prior is None else len(request.prior.token_ids)
    versions = [v.version for v in completion.weight_spans for _ in range(v.start, v.end)]
    assert np.concatenate([c.token_ids for c in chunks]).tolist() == completion.token_ids[num_prior:].tolist()
    sent_logprobs = np.concatenate([c.rollout_logprobs for c in chunks])
    assert sent_logprobs.tolist() == completion.rollout_logprobs[num_prior:].tolist()
    bounds = [chunk.weight_version for chunk in chunks for _ in chunk.token_ids]
    assert all(bound <= version for bound, version in zip(bounds, versions[num_prior:], strict=True))
    assert completion.token_ids.dtype == np.int32
    assert completion.rollout_logprobs.dtype == np.float32
    assert len(completion.rollout_logprobs) == len(completion.token_ids)
    assert_spans_cover(completion)
    return completion


def assert_spans_cover(completion):
    spans = completion.weight_spans
    assert [0, *(s.end for s in spans)] == [*(s.start for s in spans), len(completion.token_ids)]
    assert all(s.start < s.end for s in spans)
    assert all(a.version < b.version for a, b in itertools.pairwise(spans))


# ---- tokens and log-probabilities --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "llama"])
async def test_log_probabilities_are_those_of_the_plain_forward_at_mixed_lengths_and_temperatures(build, family):
    untied = {"tied": family == "qwen2"}
    model, reference = tiny_model(family, **untied), {0: tiny_model(family, **untied)}
    rng = np.random.default_rng(0)
    requests = [
        ask(
            f"r{i}",
            prompt=rng.integers(0, VOCAB_SIZE, rng.integers(1, 30)).tolist(),
            max_tokens=int(rng.integers(1, 40)) if i % 2 else 1,
            temperature=float(rng.choice([0.5, 1.0, 1.7])),
            seed=i,
        )
        for i in range(20)
    ]
    engine = await build(model, slots=5, eos_token_ids=[EOS])
    completions = await asyncio.gather(*(finish(engine, request) for request in requests))
    assert engine.stats().num_tokens == sum(len(c.token_ids) for c in completions)
    await engine.close()
    for request, completion in zip(requests, completions, strict=True):
        expected = reference_logprobs(
            reference, request.prompt_token_ids, completion, temperature=request.sampler.temperature
        )
        np.testing.assert_allclose(completion.rollout_logprobs, expected, atol=1e-4)
        ends_with_eos = completion.token_ids[-1] == EOS
        assert EOS not in completion.token_ids[:-1]
        assert completion.finish_reason == (FinishReason.STOP if ends_with_eos else FinishReason.LENGTH)
        assert ends_with_eos or len(completion.token_ids) == request.max_tokens
    assert {c.finish_reason for c in completions} == {FinishReason.STOP, FinishReason.LENGTH}


async def test_equal_seeds_draw_equal_tokens_and_other_seeds_others(seeded):
    engine = await seeded(tiny_model())
    first, second, third = [await finish(engine, ask(seed=seed)) for seed in (1, 1, 2)]
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert first.token_ids.tolist() != third.token_ids.tolist()


async def test_temperature_0_takes_the_most_likely_token_beside_sampled_sequences(build):
    model = tiny_model()
    engine = await build(model)
    greedy, other, sampled = await asyncio.gather(
        finish(engine, ask("greedy", temperature=0.0, seed=5)),
        finish(engine, ask("other", temperature=0.0, seed=6)),
        finish(engine, ask("sampled", seed=5)),
    )
    await engine.close()
    narrow = await build(model)
    likely = await finish(narrow, ask("narrow", top_p=1e-6, seed=5))
    await narrow.close()
    assert greedy.token_ids.tolist() == other.token_ids.tolist() == likely.token_ids.tolist()
    assert sampled.token_ids.tolist() != greedy.token_ids.tolist()


async def test_top_p_draws_from_the_nucleus_and_records_its_probabilities(build):
    engine = await build(tiny_model())
    narrow, full = await asyncio.gather(
        finish(engine, ask("narrow", top_p=1e-6, seed=5)), finish(engine, ask("full", seed=5))
    )
    assert narrow.rollout_logprobs.tolist() == [0.0] * 24  # a nucleus of one token has probability 1
    np.testing.assert_allclose(full.rollout_logprobs, reference_logprobs({0: tiny_model()}, PROMPT, full), atol=1e-4)


# ---- swaps -------------------------------------------------------------------------------------------------------


async def test_tokens_before_a_swap_are_of_the_old_weights_and_all_later_tokens_of_the_new_weights(build):
    forced = 11
    untied = partial(tiny_model, "llama", tied=False)
    models = {0: untied(), 4: untied()}
    models[4].load_state_dict(forcing_weights(models[4], forced))
    engine = await build(untied(), slots=3)
    tasks = [asyncio.create_task(finish(engine, ask(f"r{i}", max_tokens=80 + i, seed=i))) for i in range(3)]
    await until(lambda: engine.stats().num_tokens >= 27, "27 tokens")
    report = await engine.swap(update_of(forcing_weights(models[4], forced), 4))
    assert engine.weight_version == 4
    completions = await asyncio.gather(*tasks)
    assert (report.version, report.num_running) == (4, 3)
    assert 0 < report.pause_seconds < 5
    assert report.num_bytes > 0
    for completion in completions:
        old, new = completion.weight_spans
        assert (old.version, old.start, new.version) == (0, 0, 4)
        assert (completion.token_ids[new.start :] == forced).all()
        assert (completion.token_ids[: old.end] != forced).any()
        expected = reference_logprobs(models, PROMPT, completion)
        np.testing.assert_allclose(completion.rollout_logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_log_probabilities_across_two_swaps_are_those_of_the_kv_policy(build, kv):
    models = {version: tiny_model(seed=version) for version in (0, 1, 2)}
    engine = await build(tiny_model(seed=0), slots=6, kv=kv)
    tasks = [
        asyncio.create_task(finish(engine, ask(f"r{i}", prompt=PROMPT[: 1 + i % 5], max_tokens=85 + i, seed=i)))
        for i in range(6)
    ]
    for version in (1, 2):
        wanted = engine.stats().num_tokens + 70
        await until(lambda n=wanted: engine.stats().num_tokens >= n, f"{wanted} tokens")
        await engine.swap(update_of(weights_of(models[version]), version))
    for index, completion in enumerate(await asyncio.gather(*tasks)):
        prompt = PROMPT[: 1 + index % 5]
        assert [span.version for span in completion.weight_spans] == [0, 1, 2]
        same = reference_logprobs(models, prompt, completion, recompute=kv == "recompute")
        other = reference_logprobs(models, prompt, completion, recompute=kv != "recompute")
        np.testing.assert_allclose(completion.rollout_logprobs, same, atol=1e-4)
        assert np.abs(completion.rollout_logprobs - other).max() > 0.01
    await asyncio.sleep(1.1)  # the limit of vLLM's slots is updated once a second
    assert engine.stats().slots == 6  # what a swap preempts says nothing of the size of the KV cache


async def test_a_rest_samples_nothing_loses_nothing_and_computes_the_keys_again_under_the_current_weights(build):
    models = {version: tiny_model(seed=version) for version in (0, 1)}
    engine = await build(tiny_model(seed=0), slots=4)
    tasks = [
        asyncio.create_task(finish(engine, ask(f"r{i}", prompt=PROMPT[: 2 + i % 3], max_tokens=60 + i, seed=i)))
        for i in range(5)
    ]
    await until(lambda: engine.stats().num_tokens >= 40, "40 tokens")
    await engine.swap(update_of(weights_of(models[1]), 1))
    wanted = engine.stats().num_tokens + 20
    await until(lambda: engine.stats().num_tokens >= wanted, "20 tokens of the new weights")
    async with engine.resting():
        swap = asyncio.create_task(engine.swap(update_of(weights_of(models[1]), 2)))
        await asyncio.sleep(0.05)  # vLLM sends the outputs of its last step after it has paused
        before = engine.stats()
        await asyncio.sleep(0.1)
        after = engine.stats()
        assert (after.num_tokens, after.running, after.running_seconds) == (
            before.num_tokens, 4, before.running_seconds,
        )  # fmt: skip
        assert not swap.done()
    await swap
    models[2] = models[1]
    for index, completion in enumerate(await asyncio.gather(*tasks)):
        assert len(completion.token_ids) == 60 + index
        prompt = PROMPT[: 2 + index % 3]
        newest = completion.weight_spans[-1]
        assert newest.version == 2
        expected = reference_logprobs(models, prompt, completion, recompute=True)[newest.start :]
        np.testing.assert_allclose(completion.rollout_logprobs[newest.start :], expected, atol=1e-4)


async def test_draining_finishes_running_sequences_before_the_swap_and_holds_back_the_waiting(build):
    engine = await build(tiny_model(), slots=2, kv="drain")
    tasks = [asyncio.create_task(finish(engine, ask(f"r{i}", max_tokens=10 + 10 * i, seed=i))) for i in range(4)]
    await until(lambda: engine.stats().running == 2, "two running")
    report = await engine.swap(update_of(weights_of(tiny_model(seed=1)), 1))
    assert report.num_running == 0
    versions = [[span.version for span in completion.weight_spans] for completion in await asyncio.gather(*tasks)]
    assert versions == [[0], [0], [1], [1]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda w: w | {"model.norm.weight": w["model.norm.weight"][:5]}, "model.norm.weight"),
        (lambda w: w | {"model.norm.weight": w["model.norm.weight"].double()}, "float64"),
        (lambda w: {k: v for k, v in w.items() if k != "model.norm.weight"}, "lacks 'model.norm.weight'"),
        (lambda w: w | {"model.norm.bias": w["model.norm.weight"]}, "model.norm.bias"),
        (lambda w: w | {"lm_head.weight": w["lm_head.weight"] + 1}, "tied"),
    ],
)
async def test_a_refused_swap_leaves_the_version_and_the_weights_of_running_sequences(build, damage, message):
    engine = await build(tiny_model())
    task = asyncio.create_task(finish(engine, ask(seed=3, max_tokens=60)))
    await until(lambda: engine.stats().num_tokens >= 5, "5 tokens")
    with pytest.raises(SwapError, match=message):
        await engine.swap(update_of(damage(weights_of(tiny_model(seed=1))), 7))
    assert engine.weight_version == 0
    completion = await task
    np.testing.assert_allclose(
        completion.rollout_logprobs, reference_logprobs({0: tiny_model()}, PROMPT, completion), atol=1e-4
    )
    assert completion.weight_spans == (WeightSpan(0, 0, 60),)


async def test_versions_never_decrease(build):
    engine = await build(tiny_model(), weight_version=5)
    with pytest.raises(SwapError, match="version 4, the engine has 5"):
        await engine.swap(update_of(weights_of(tiny_model()), 4))


@pytest.mark.parametrize("with_head", [True, False])
async def test_tied_weights_swap_with_and_without_the_name_of_the_head(build, with_head):
    weights = weights_of(tiny_model(seed=1))
    if not with_head:
        del weights["lm_head.weight"]
    engine = await build(tiny_model())
    await engine.swap(update_of(weights, 1))
    completion = await finish(engine, ask())
    expected = reference_logprobs({1: tiny_model(seed=1)}, PROMPT, completion)
    np.testing.assert_allclose(completion.rollout_logprobs, expected, atol=1e-4)


async def test_a_partial_update_leaves_the_other_weights_as_they_are(build):
    new, newest = weights_of(tiny_model(seed=1)), weights_of(tiny_model(seed=2))
    names = ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight")
    part = {name: newest[name] for name in names}
    engine = await build(tiny_model())
    await engine.swap(update_of(new, 1))
    with pytest.raises(SwapError, match="the update lacks"):
        await engine.swap(update_of(part, 2))
    await engine.swap(dataclasses.replace(update_of(part, 2), is_partial=True))
    completion = await finish(engine, ask())
    mixed = tiny_model()
    mixed.load_state_dict(new | part)
    np.testing.assert_allclose(
        completion.rollout_logprobs, reference_logprobs({2: mixed}, PROMPT, completion), atol=1e-4
    )


# ---- continuation -----------------------------------------------------------------------------------------------


async def test_a_cancelled_sequence_continues_from_its_tokens_under_the_new_weights(build):
    models = {version: tiny_model(seed=version) for version in (0, 1)}
    engine = await build(tiny_model())
    partial = await partial_completion_of(engine, ask(max_tokens=60, seed=9), 13)
    await engine.swap(update_of(weights_of(models[1]), 1))
    whole = await finish(engine, ask(max_tokens=60, seed=9, prior=partial))
    num_prior = len(partial.token_ids)
    assert (partial.finish_reason, whole.finish_reason) == (FinishReason.ABORT, FinishReason.LENGTH)
    assert 13 <= num_prior < 60
    assert whole.token_ids[:num_prior].tolist() == partial.token_ids.tolist()
    assert whole.rollout_logprobs[:num_prior].tolist() == partial.rollout_logprobs.tolist()
    assert whole.weight_spans == (WeightSpan(0, 0, num_prior), WeightSpan(1, num_prior, 60))
    expected = reference_logprobs(models, PROMPT, whole, recompute=True)  # another stay has another cache
    np.testing.assert_allclose(whole.rollout_logprobs, expected, atol=1e-4)


def test_a_cancelled_and_continued_sequence_draws_the_same_tokens_as_an_uninterrupted_run(seeded):
    async def uninterrupted():
        engine = await seeded(tiny_model())
        return await finish(engine, ask(max_tokens=40, seed=9))

    async def interrupted():
        engine = await seeded(tiny_model(), slots=2)
        partial = await partial_completion_of(engine, ask(max_tokens=40, seed=9), 13)
        other = await seeded(tiny_model(), slots=3)
        others = [finish(other, ask(f"o{i}", seed=20 + i)) for i in range(2)]
        whole, *_ = await asyncio.gather(finish(other, ask(max_tokens=40, seed=9, prior=partial)), *others)
        return partial, whole

    expected, (partial, whole) = seeded.run(uninterrupted()), seeded.run(interrupted())
    assert partial.finish_reason is FinishReason.ABORT
    assert 13 <= len(partial.token_ids) < 40
    assert whole.token_ids.tolist() == expected.token_ids.tolist()
    num_prior = len(partial.token_ids)
    assert whole.rollout_logprobs[:num_prior].tolist() == partial.rollout_logprobs.tolist()
    np.testing.assert_allclose(whole.rollout_logprobs, expected.rollout_logprobs, atol=1e-5)
    assert whole.weight_spans == (WeightSpan(0, 0, 40),)
    assert whole.finish_reason is FinishReason.LENGTH


async def test_a_continuation_keeps_the_versions_of_its_prior_and_waits_for_weights_that_are_new_enough(build):
    prior = Completion(
        token_ids=np.array([1, 2, 4], np.int32),
        rollout_logprobs=np.array([-1, -2, -3], np.float32),
        weight_spans=(WeightSpan(2, 0, 1), WeightSpan(6, 1, 3)),
    )
    engine = await build(tiny_model(), weight_version=5)
    task = asyncio.create_task(finish(engine, ask(max_tokens=6, prior=prior)))
    await finish(engine, ask("other"))  # does not wait behind it
    assert (engine.stats().running, engine.stats().waiting) == (0, 1)
    await engine.swap(update_of(weights_of(tiny_model()), 6))
    completion = await task
    assert completion.token_ids[:3].tolist() == [1, 2, 4]
    assert completion.rollout_logprobs[:3].tolist() == [-1, -2, -3]
    assert completion.weight_spans == (WeightSpan(2, 0, 1), WeightSpan(6, 1, 6))


# ---- pauses ------------------------------------------------------------------------------------------------------


async def quiet(engine):
    """Returns once an engine that was told to pause has come to rest; fails if it does not within 20 seconds."""
    for _ in range(1000):
        is_asked = any(task.get_name() == "vllm-pause" for task in asyncio.all_tasks())  # the core has not answered
        before = engine.stats()
        await asyncio.sleep(0.02)
        if not is_asked and engine.stats() == before:  # tokens, steps, KV and running_seconds among it
            return before
    raise AssertionError("never came to rest")


async def paused_after(engine, num_tokens):
    await until(lambda: engine.stats().num_tokens >= num_tokens, f"{num_tokens} tokens")
    engine.set_paused(True)


async def test_a_pause_samples_nothing_and_changes_nothing(build):
    engine = await build(tiny_model(), slots=2)
    requests = [ask(f"r{i}", max_tokens=60 + i, seed=i) for i in range(3)]
    tasks = [asyncio.create_task(finish(engine, request)) for request in requests]
    num_before = engine.stats().num_tokens
    for num_tokens in (5, 6, 20):
        await paused_after(engine, num_before + num_tokens)
        before = await quiet(engine)
        engine.set_paused(True)  # said again and again
        await asyncio.sleep(0.05)
        assert engine.stats() == before
        assert (before.running, before.waiting) == (2, 1)
        engine.set_paused(False)
        engine.set_paused(False)
    for completion in await asyncio.gather(*tasks):
        expected = reference_logprobs({0: tiny_model()}, PROMPT, completion)
        np.testing.assert_allclose(completion.rollout_logprobs, expected, atol=1e-4)
        assert completion.weight_spans == (WeightSpan(0, 0, len(completion.token_ids)),)


def test_a_pause_happens_at_once_and_changes_no_tokens(seeded):
    async def main(pauses):
        engine = await seeded(tiny_model(), slots=2)
        tasks = [asyncio.create_task(finish(engine, ask(f"r{i}", max_tokens=30 + i, seed=i))) for i in range(3)]
        for num_tokens in pauses:
            await paused_after(engine, num_tokens)
            before = engine.stats()
            assert await quiet(engine) == before
            engine.set_paused(False)
        return await asyncio.gather(*tasks)

    for undisturbed, paused in zip(seeded.run(main([])), seeded.run(main([5, 6, 20])), strict=True):
        assert paused.token_ids.tolist() == undisturbed.token_ids.tolist()
        assert paused.rollout_logprobs.tolist() == undisturbed.rollout_logprobs.tolist()


async def test_a_request_that_comes_in_a_pause_starts_after_the_pause(build):
    engine = await build(tiny_model())
    engine.set_paused(True)
    before = await quiet(engine)
    task = asyncio.create_task(finish(engine, ask()))
    await asyncio.sleep(0.05)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.num_steps) == (0, 1, before.num_steps)
    engine.set_paused(False)
    assert len((await task).token_ids) == 24


async def test_a_swap_in_a_pause_sets_the_version_of_later_tokens(build):
    models = {version: tiny_model(seed=version) for version in (0, 1, 2)}
    engine = await build(tiny_model(seed=0))
    task = asyncio.create_task(finish(engine, ask(max_tokens=80)))
    for version in (1, 2):
        await paused_after(engine, engine.stats().num_tokens + 9)
        report = await engine.swap(update_of(weights_of(models[version]), version))
        assert (report.version, report.num_running) == (version, 1)
        before = await quiet(engine)  # a swap does not end the pause
        await asyncio.sleep(0.05)
        assert engine.stats() == before
        engine.set_paused(False)
    completion = await task
    assert [span.version for span in completion.weight_spans] == [0, 1, 2]
    np.testing.assert_allclose(completion.rollout_logprobs, reference_logprobs(models, PROMPT, completion), atol=1e-4)


def test_a_swap_happens_at_once_whether_paused_or_not(seeded):
    async def main(is_paused):
        engine = await seeded(tiny_model(seed=0))
        task = asyncio.create_task(finish(engine, ask(max_tokens=40)))
        for version, num_tokens in ((1, 9), (2, 18)):
            await until(lambda n=num_tokens: engine.stats().num_tokens >= n, f"{num_tokens} tokens")
            engine.set_paused(is_paused)
            await engine.swap(update_of(weights_of(tiny_model(seed=version)), version))
            engine.set_paused(False)
        return await task

    completion, same = seeded.run(main(True)), seeded.run(main(False))
    assert completion.weight_spans == (WeightSpan(0, 0, 9), WeightSpan(1, 9, 18), WeightSpan(2, 18, 40))
    assert completion.token_ids.tolist() == same.token_ids.tolist()


async def test_a_sequence_that_is_cancelled_in_a_pause_frees_its_slot_and_goes_on_elsewhere(seeded):
    engine, other = await seeded(tiny_model()), await seeded(tiny_model())
    task = asyncio.create_task(partial_completion_of(engine, ask(seed=9), 7))
    await paused_after(engine, 7)
    partial = await task
    assert (engine.stats().running, engine.stats().kv_usage, len(partial.token_ids)) == (0, 0, 7)
    whole = await finish(other, ask(seed=9, prior=partial))
    engine.set_paused(False)
    fresh = await finish(engine, ask(seed=9))
    assert whole.token_ids.tolist() == fresh.token_ids.tolist()


async def test_a_paused_engine_can_be_closed(build):
    engine = await build(tiny_model())
    task = asyncio.create_task(finish(engine, ask(max_tokens=80)))
    await paused_after(engine, 3)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task


# ---- slots -------------------------------------------------------------------------------------------------------


async def test_no_more_run_than_there_are_slots_and_all_come_to_their_end(build):
    engine = await build(tiny_model(), slots=3)
    running = []

    async def finish_request(index):
        async for _ in engine.generate(ask(f"r{index}", prompt=[1], max_tokens=8, seed=index)):
            running.append(engine.stats().running)

    await asyncio.gather(*(finish_request(index) for index in range(12)))
    stats = engine.stats()
    assert max(running) <= 3
    assert (stats.num_tokens, stats.running, stats.waiting, stats.slots) == (96, 0, 0, 3)


async def test_slots_are_refilled_at_once_and_in_order_of_arrival(seeded):
    engine = await seeded(tiny_model(), slots=3)
    order = []

    async def finish_request(index):
        await finish(engine, ask(f"r{index}", prompt=[1], max_tokens=8, seed=index))
        order.append(index)

    await asyncio.gather(*(finish_request(index) for index in range(12)))
    stats = engine.stats()
    assert order == list(range(12))
    # 12 sequences of 8 tokens in 3 slots: 32 steps when no slot ever stands empty.
    assert stats.num_steps == 32
    assert (stats.num_tokens, stats.running, stats.waiting, stats.kv_usage) == (96, 0, 0, 0)


async def test_short_requests_do_not_starve_beside_a_long_request(build):
    engine = await build(tiny_model(), slots=2, max_len=250)
    long = asyncio.create_task(finish(engine, ask("long", prompt=[1], max_tokens=240)))
    shorts = [finish(engine, ask(f"s{i}", prompt=[1], max_tokens=4)) for i in range(10)]
    await asyncio.gather(*shorts)
    assert not long.done()
    await long


async def test_closing_a_generator_early_frees_its_slot_or_its_place_in_the_queue(build):
    engine = await build(tiny_model(), slots=1)
    running = asyncio.create_task(finish(engine, ask("running", max_tokens=80)))
    await until(lambda: engine.stats().num_tokens >= 2, "2 tokens")
    waiting = asyncio.create_task(finish(engine, ask("waiting")))
    await until(lambda: engine.stats().waiting == 1, "a waiting request")
    for task in (waiting, running):
        task.cancel()
        await asyncio.wait([task])
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    assert len((await finish(engine, ask("next"))).token_ids) == 24


async def test_running_seconds_integrate_running_over_time(build):
    engine = await build(tiny_model(), slots=2)
    loop = asyncio.get_running_loop()
    start = loop.time()
    await asyncio.gather(*(finish(engine, ask(f"r{i}", max_tokens=60)) for i in range(2)))
    busy_seconds, busy = loop.time() - start, engine.stats().running_seconds
    await asyncio.sleep(0.05)
    later = engine.stats().running_seconds
    assert 0.8 * 2 * busy_seconds < busy <= 2 * busy_seconds
    assert later == busy  # nothing runs while idle


# ---- refusals and ends -------------------------------------------------------------------------------------------

EOS_PRIOR = Completion(
    token_ids=np.array([1, EOS], np.int32),
    rollout_logprobs=np.array([-1, -2], np.float32),
    weight_spans=(WeightSpan(0, 0, 2),),
)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask(prompt=[]), "empty prompt"),
        (ask(max_tokens=0), "max_tokens=0 .* 0 tokens of the prior"),
        (ask(max_tokens=2, prior=EOS_PRIOR), "max_tokens=2 .* 2 tokens of the prior"),
        (ask(max_tokens=92), r"5 prompt tokens \+ max_tokens=92 .* max_len=96"),
        (ask(prompt=[1, VOCAB_SIZE]), r"token id 19, outside of \[0, 19\)"),
        (ask(prompt=[1, -1]), "token id -1"),
        (ask(temperature=-1.0), "temperature=-1.0"),
        (ask(top_p=0.0), "top_p=0.0"),
        (ask(prior=EOS_PRIOR), "end token 3"),
        (ask(prior=dataclasses.replace(EOS_PRIOR, token_ids=np.array([1, 2, 4], np.int32))), "cover the same tokens"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_at_once_and_no_other_request_fails(
    build, request_, message
):
    engine = await build(tiny_model(), eos_token_ids=[EOS])
    task = asyncio.create_task(finish(engine, ask("good", seed=1)))
    await until(lambda: engine.stats().running == 1, "the good request")
    with pytest.raises(EngineError, match=message):
        engine.generate(request_)
    with pytest.raises(EngineError, match="'good' is open already"):
        engine.generate(ask("good"))
    await task


async def test_the_longest_request_that_fits_is_served(build):
    assert len((await finish(await build(tiny_model()), ask(max_tokens=91))).token_ids) == 91


async def test_closing_the_engine_ends_running_and_waiting_generators(build):
    engine = await build(tiny_model(), slots=1)
    tasks = [asyncio.create_task(finish(engine, ask(f"r{i}", max_tokens=80))) for i in range(2)]
    await until(lambda: engine.stats().running == 1, "the first")
    await engine.close()
    await engine.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [EngineError, EngineError]
    with pytest.raises(EngineError, match="closed"):
        engine.generate(ask("late"))
    with pytest.raises(SwapError, match="closed"):
        await engine.swap(update_of(weights_of(tiny_model()), 1))


async def test_weights_that_give_no_numbers_end_the_engine_with_their_version(build):
    weights = weights_of(tiny_model())
    weights["model.norm.weight"][0] = float("nan")
    engine = await build(tiny_model())
    task = asyncio.create_task(finish(engine, ask(max_tokens=80)))
    await until(lambda: engine.stats().num_tokens >= 5, "5 tokens")
    await engine.swap(update_of(weights, 8))
    with pytest.raises(EngineError, match=r"weight version 8: .*not finite"):
        await task
    with pytest.raises(EngineError, match="weight version 8"):
        engine.generate(ask("late"))
