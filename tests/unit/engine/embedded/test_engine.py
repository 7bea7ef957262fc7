"""What only the embedded engine promises: untouched KV bytes, exact determinism, streaming, loading.

Tests read the private decoder, table and slots: no public call shows KV bytes, slots and the type of the head.
"""

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from pipelinerl_core.algo import products
from pipelinerl_core.algo.parity import logprob_parity
from pipelinerl_core.config import RunConfig
from pipelinerl_core.engine.embedded import engine as engine_module
from pipelinerl_core.engine.embedded.decoder import PREFILL_TOKENS, prefill_batches
from pipelinerl_core.engine.embedded.engine import EmbeddedEngine
from pipelinerl_core.engine.embedded.load import load_engine
from pipelinerl_core.errors import EngineError
from pipelinerl_core.interfaces import WeightUpdate
from tests.builders import completion_of as finish
from tests.builders import engine_request, partial_completion_of
from tests.models import VOCAB_SIZE, reference_logprobs, tiny_model, weights_of

ask = partial(engine_request, max_tokens=20)


async def after_tokens(engine, count):
    while engine.stats().num_tokens < count:  # noqa: ASYNC110 - one turn is one step of the engine
        await asyncio.sleep(0)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def update_to(seed, version):
    return WeightUpdate(version=version, tensors=weights_of(tiny_model(seed=seed)), num_bytes=1)


@pytest.mark.parametrize(("kv", "is_untouched"), [("keep", True), ("recompute", False)])
async def test_a_swap_leaves_the_bytes_of_all_prefixes_alone_when_kv_is_kept(kv, is_untouched):
    engine = EmbeddedEngine(tiny_model(), slots=3, max_len=64, eos_token_ids=[], kv=kv)
    tasks = [asyncio.create_task(finish(engine, ask(f"r{i}", seed=i, max_tokens=30 + i))) for i in range(3)]
    await after_tokens(engine, 30)
    memory = engine._decoder.memory
    before = {layer: (memory.keys[layer].clone(), memory.values[layer].clone()) for layer in memory.keys}
    num_fed = engine._table.num_fed.copy()
    assert (num_fed > 10).all()
    await engine.swap(update_to(1, 1))
    for layer, (keys, values) in before.items():
        for slot, length in enumerate(num_fed):
            assert torch.equal(memory.keys[layer][slot, :, :length], keys[slot, :, :length]) is is_untouched
            assert torch.equal(memory.values[layer][slot, :, :length], values[slot, :, :length]) is is_untouched
    await asyncio.gather(*tasks)


async def test_a_turn_that_is_still_fed_at_a_swap_has_keys_of_the_new_weights_alone():
    engine = EmbeddedEngine(tiny_model(), slots=2, max_len=120, eos_token_ids=[])
    prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, 55).tolist()
    first = await finish(engine, replace(ask("first", prompt=prompt[:30], max_tokens=5), is_turn=True))
    history = [*prompt[:30], *first.token_ids.tolist(), *prompt[30:]]
    turn = asyncio.create_task(finish(engine, replace(ask("turn", prompt=history, max_tokens=3), is_turn=True)))
    for _ in range(6):
        await asyncio.sleep(0)
    assert 34 < engine._table.num_fed.max() < len(history)
    await engine.swap(update_to(1, 1))
    completion = await turn
    assert engine.stats().num_reused == 34
    assert [(span.version, span.start, span.end) for span in completion.weight_spans] == [(1, 0, 3)]
    expected = reference_logprobs({1: tiny_model(seed=1)}, history, completion)
    np.testing.assert_allclose(completion.rollout_logprobs, expected, atol=1e-5)


async def test_a_rest_frees_the_memory_of_all_keys_and_values():
    def num_bytes():
        memory = engine._decoder.memory
        return sum(tensor.nbytes for store in (memory.keys, memory.values) for tensor in store.values())

    engine = EmbeddedEngine(tiny_model(), slots=3, max_len=64, eos_token_ids=[])
    task = asyncio.create_task(finish(engine, ask("r", max_tokens=30)))
    await after_tokens(engine, 5)
    before = num_bytes()
    async with engine.resting():
        assert (before > 0, num_bytes()) == (True, 0)
        await asyncio.sleep(0.01)
        assert num_bytes() == 0
    assert num_bytes() == before
    assert len((await task).token_ids) == 30


async def test_a_turn_that_ends_in_a_rest_leaves_no_slot_whose_keys_are_gone():
    engine = EmbeddedEngine(tiny_model(), slots=3, max_len=64, eos_token_ids=[])
    turn = asyncio.create_task(finish(engine, replace(ask("turn", max_tokens=60), is_turn=True)))
    await after_tokens(engine, 3)
    async with engine.resting():
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
    assert not engine._kept
    completion = await finish(engine, ask("again", max_tokens=20))
    expected = reference_logprobs({0: tiny_model()}, (5, 6, 7), completion, recompute=True)
    np.testing.assert_allclose(completion.rollout_logprobs, expected, atol=1e-4)
    await engine.close()


def _separate(pairs):
    return [prefill_batches([pair])[0] for pair in pairs]


async def test_other_tasks_run_between_the_passes_that_compute_keys_again_after_a_rest(monkeypatch):
    monkeypatch.setattr(engine_module, "prefill_batches", _separate)
    engine = EmbeddedEngine(tiny_model(), slots=3, max_len=64, eos_token_ids=[])
    tasks = [asyncio.create_task(finish(engine, ask(f"r{i}", seed=i))) for i in range(3)]
    await after_tokens(engine, 10)
    passes, seen = [], []
    prefill = engine._decoder.prefill
    monkeypatch.setattr(engine._decoder, "prefill", lambda *batch: passes.append(prefill(*batch)))

    async def other():
        while len(passes) < 3:
            seen.append(len(passes))
            await asyncio.sleep(0)

    async with engine.resting():
        watching = asyncio.create_task(other())
        await asyncio.sleep(0)
    await watching
    assert {1, 2} <= set(seen)
    await asyncio.gather(*tasks)
    await engine.close()


async def test_other_tasks_but_no_step_run_between_the_passes_that_compute_keys_again_in_a_swap(monkeypatch):
    monkeypatch.setattr(engine_module, "prefill_batches", _separate)
    models = {version: tiny_model(seed=version) for version in (0, 1)}
    engine = EmbeddedEngine(tiny_model(), slots=4, max_len=64, eos_token_ids=[], kv="recompute")
    tasks = [asyncio.create_task(finish(engine, ask(f"r{i}", seed=i))) for i in range(3)]
    await after_tokens(engine, 10)
    passes, num_steps = [], {}
    prefill = engine._decoder.prefill
    monkeypatch.setattr(engine._decoder, "prefill", lambda *batch: passes.append(prefill(*batch)))
    swap = asyncio.create_task(engine.swap(update_to(1, 1)))
    while len(passes) < 3:
        num_steps[len(passes)] = engine.stats().num_steps
        if len(passes) == 1:
            tasks.append(asyncio.create_task(finish(engine, ask("new", seed=3))))
        await asyncio.sleep(0)
    await swap
    assert (list(num_steps), num_steps[1], len(tasks)) == ([0, 1, 2], num_steps[2], 4)
    for completion in await asyncio.gather(*tasks):
        expected = reference_logprobs(models, (5, 6, 7), completion, recompute=True)
        np.testing.assert_allclose(completion.rollout_logprobs, expected, atol=1e-4)


@pytest.mark.parametrize(("kv", "is_reused"), [("keep", False), ("recompute", True)])
async def test_a_later_turn_reuses_no_keys_of_older_weights(kv, is_reused):
    engine = EmbeddedEngine(tiny_model(), slots=2, max_len=64, eos_token_ids=[], kv=kv)
    first = asyncio.create_task(finish(engine, replace(ask("first"), is_turn=True)))
    await after_tokens(engine, 10)
    await engine.swap(update_to(1, 1))
    prompt = (5, 6, 7, *(await first).token_ids.tolist(), 8)
    completion = await finish(engine, replace(ask("second", prompt=prompt), is_turn=True))
    assert (engine.stats().num_reused > 0) is is_reused
    expected = reference_logprobs({1: tiny_model(seed=1)}, prompt, completion)
    np.testing.assert_allclose(completion.rollout_logprobs, expected, atol=1e-4)


async def test_a_prompt_that_is_fed_during_a_swap_is_fed_again_under_the_new_weights():
    """The trainer compares such rollouts with its weights, because all their tokens are of the newest version."""
    models = {version: tiny_model(seed=version) for version in (0, 1)}
    engine = EmbeddedEngine(tiny_model(), slots=4, max_len=64, eos_token_ids=[], deterministic=True)
    prompts = [tuple(index % VOCAB_SIZE for index in range(length)) for length in (2, 20, 30)]
    tasks = [
        asyncio.create_task(finish(engine, ask(f"r{i}", prompt=prompt, max_tokens=20, seed=i)))
        for i, prompt in enumerate(prompts)
    ]
    await after_tokens(engine, 10)  # of the first sequence; 11 tokens of the other prompts are fed
    await engine.swap(update_to(1, 1))
    completions = await asyncio.gather(*tasks)
    spans = [[span.version for span in completion.weight_spans] for completion in completions]
    assert spans == [[0, 1], [1], [1]]
    for prompt, completion in zip(prompts, completions, strict=True):
        logprob_parity(completion.rollout_logprobs, reference_logprobs(models, prompt, completion), "float32").check()


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_deterministic_results_do_not_depend_on_slot_company_or_interruption_bit_for_bit(family):
    def mine(prior=None):
        return ask("me", prompt=(1, 2, 3, 4, 5), max_tokens=16, seed=42, temperature=0.8, prior=prior)

    def others(count, seed):
        rng = np.random.default_rng(seed)
        return [
            ask(
                f"o{seed}-{i}",
                prompt=rng.integers(0, VOCAB_SIZE, rng.integers(1, 10)),
                max_tokens=int(rng.integers(1, 20)),
                seed=int(rng.integers(1 << 40)),
                top_p=float(rng.choice([0.7, 1.0])),
            )
            for i in range(count)
        ]

    async def scenario(num_before, interrupt_at=None):
        engine = EmbeddedEngine(tiny_model(family), slots=13, max_len=32, eos_token_ids=[], deterministic=True)
        requests = [*others(num_before, num_before), mine(), *others(3, 100 + num_before)]
        tasks = {request.request_id: asyncio.create_task(finish(engine, request)) for request in requests}
        if interrupt_at is not None:
            partial = await partial_completion_of(engine, replace(mine(), request_id="interrupted"), interrupt_at)
            assert interrupt_at <= len(partial.token_ids) < 16
            tasks["continued"] = asyncio.create_task(finish(engine, replace(mine(partial), request_id="continued")))
        await asyncio.gather(*tasks.values())
        return tasks["me" if interrupt_at is None else "continued"].result()

    alone = run(scenario(0))
    for other in (scenario(12), scenario(16), scenario(5, interrupt_at=7)):
        completion = run(other)
        assert completion.token_ids.tobytes() == alone.token_ids.tobytes()
        assert completion.rollout_logprobs.tobytes() == alone.rollout_logprobs.tobytes()


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_long_sequences_move_into_free_low_slots_and_draw_the_same_tokens(family):
    """Slots 0 .. 5 end after 4 to 9 tokens; 6 and 7 go on to 40 and 50, with other prompts, in other slots."""
    longs = [
        ask("l0", prompt=range(1, 12), max_tokens=40, seed=7, temperature=0.7),
        ask("l1", max_tokens=50, seed=8, top_p=0.8),
    ]

    async def main(requests):
        engine = EmbeddedEngine(tiny_model(family), slots=8, max_len=64, eos_token_ids=[])
        num_rows = spy_on_rows(engine)
        completions = await asyncio.gather(*(finish(engine, request) for request in requests))
        stats = engine.stats()
        assert (stats.running, stats.kv_usage, sorted(engine._free_slots)) == (0, 0, list(range(8)))
        return completions[-len(longs) :], num_rows

    shorts = [ask(f"s{i}", max_tokens=4 + i, seed=20 + i) for i in range(6)]
    (moved, num_rows), (alone, _) = run(main([*shorts, *longs])), run(main(longs))
    for completion, expected in zip(moved, alone, strict=True):
        assert completion.token_ids.tolist() == expected.token_ids.tolist()
        np.testing.assert_allclose(completion.rollout_logprobs, expected.rollout_logprobs, atol=1e-5)
    # From the fifth step on one sequence fewer runs in each. 7 of 8 rows are over three quarters, 6 of 8 are not:
    # those in slots 6 and 7 move to 0 and 1. So it goes on: 5 of 6 stay, 4 of 6 become 4 of 4, 3 of 4 become 3 of 3.
    # The long ones then run in slots 0 and 1 until the first has 40 tokens, and the second moves to slot 0.
    assert num_rows == [8] * 5 + [6] * 2 + [4] + [3] + [2] * 31 + [1] * 10


def test_nothing_moves_while_a_sequence_waits_for_a_slot_or_the_engine_is_deterministic():
    async def main(num_waiting, deterministic):
        engine = EmbeddedEngine(tiny_model(), slots=4, max_len=64, eos_token_ids=[], deterministic=deterministic)
        requests = [ask(f"s{i}", max_tokens=3, seed=i) for i in range(3)]
        requests += [ask("long", max_tokens=20, seed=9)]
        requests += [ask(f"w{i}", max_tokens=20, seed=i) for i in range(num_waiting)]
        tasks = [asyncio.create_task(finish(engine, request)) for request in requests]
        while not tasks[2].done():  # noqa: ASYNC110 - one turn is one step of the engine
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        slot = next(slot for slot, sequence in engine._in_slot.items() if sequence.request.request_id == "long")
        await asyncio.gather(*tasks)
        return slot

    assert run(main(0, False)) == 0
    assert run(main(3, False)) == 3  # the slots are filled again instead
    assert run(main(0, True)) == 3  # its step has one shape anyway


def test_a_sequence_that_has_moved_is_swapped_cancelled_and_continued_as_ever():
    async def main(shorts):
        engine = EmbeddedEngine(tiny_model(), slots=6, max_len=64, eos_token_ids=[])
        tasks = [asyncio.create_task(finish(engine, ask(f"s{i}", max_tokens=3, seed=i))) for i in range(shorts)]
        task = asyncio.create_task(partial_completion_of(engine, ask("me", max_tokens=30, seed=5), 20))
        await after_tokens(engine, 3 * shorts + 10)
        assert list(engine._in_slot) == [0]
        await engine.swap(update_to(1, 1))
        partial = await task
        await asyncio.gather(*tasks)
        return await finish(engine, ask("me", max_tokens=30, seed=5, prior=partial))

    moved, alone = run(main(5)), run(main(0))
    assert [(span.version, span.start, span.end) for span in moved.weight_spans] == [(0, 0, 10), (1, 10, 30)]
    assert moved.weight_spans == alone.weight_spans
    assert moved.token_ids.tolist() == alone.token_ids.tolist()
    np.testing.assert_allclose(moved.rollout_logprobs, alone.rollout_logprobs, atol=1e-5)


def spy_on_rows(engine):
    """A list that grows by the number of decoded rows of every step."""
    num_rows, decode = [], engine._decoder.decode

    def spied(token_ids_R, *arguments, **options):
        num_rows.append(len(token_ids_R))
        return decode(token_ids_R, *arguments, **options)

    engine._decoder.decode = spied
    return num_rows


def test_chunks_come_at_each_swap_and_at_the_end():
    async def main():
        engine = EmbeddedEngine(tiny_model(), slots=1, max_len=64, eos_token_ids=[])
        chunks = []

        async def consume():
            chunks.extend([chunk async for chunk in engine.generate(ask("a", max_tokens=20))])

        task = asyncio.create_task(consume())
        await after_tokens(engine, 10)
        await engine.swap(update_to(1, 3))
        await task
        return [(len(chunk.token_ids), chunk.weight_version) for chunk in chunks]

    assert run(main()) == [(10, 0), (10, 3)]


async def test_an_idle_engine_has_no_task():
    engine = EmbeddedEngine(tiny_model(), slots=1, max_len=64, eos_token_ids=[])
    await finish(engine, ask("a"))
    await asyncio.sleep(0.01)
    assert len(asyncio.all_tasks()) == 1
    num_steps = engine.stats().num_steps
    await asyncio.sleep(0.01)
    assert engine.stats().num_steps == num_steps == 20


async def test_a_long_prefill_is_split_and_gives_the_same_log_probabilities():
    model = tiny_model(max_position_embeddings=8192)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB_SIZE, length) for length in (1200, 2, 1100, 1150, 1, 1000, 40)]
    reference = {0: tiny_model(max_position_embeddings=8192)}
    engine = EmbeddedEngine(model, slots=7, max_len=1300, eos_token_ids=[])
    for prompt, completion in zip(
        prompts,
        (
            await asyncio.gather(
                *(finish(engine, ask(f"r{i}", prompt=prompt, max_tokens=4)) for i, prompt in enumerate(prompts))
            )
        ),
        strict=True,
    ):
        expected = reference_logprobs(reference, prompt, completion)
        np.testing.assert_allclose(completion.rollout_logprobs, expected, atol=1e-4)


async def test_a_step_admits_no_more_prompts_than_one_prefill_holds_and_every_copy(monkeypatch):
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 10)
    engine = EmbeddedEngine(tiny_model(), slots=8, max_len=64, eos_token_ids=[])
    prompts = [range(first, first + 9) for first in (0, 0, 0, 1, 2, 3)]  # 8 tokens each are prefilled
    tasks = [
        asyncio.create_task(finish(engine, ask(f"r{i}", prompt=prompt, seed=i))) for i, prompt in enumerate(prompts)
    ]
    running = []
    for step in range(1, 4):
        while engine.stats().num_steps < step:  # noqa: ASYNC110 - one turn is one step of the engine
            await asyncio.sleep(0)
        running.append(engine.stats().running)
    assert running == [4, 6, 6]
    for prompt, completion in zip(prompts, await asyncio.gather(*tasks), strict=True):
        expected = reference_logprobs({0: tiny_model()}, prompt, completion)
        np.testing.assert_allclose(completion.rollout_logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
async def test_a_group_is_prefilled_once_per_weight_version_and_samples_as_if_each_was(monkeypatch, family):
    """Twelve sequences in five slots: some begin together, others while a sequence with their prompt runs, or after
    a swap. Slots move meanwhile."""
    prompts = [(3, 1, 4, 1, 5, 9, 2, 6), (2, 7, 1, 8, 2, 8)]
    models = {version: tiny_model(family, seed=version) for version in (0, 1)}
    engine = EmbeddedEngine(tiny_model(family), slots=5, max_len=64, eos_token_ids=[])
    rows = []
    forward = engine._decoder._forward

    def counted(tokens_R, layout, prefill):
        rows.extend([] if prefill is None else [tuple(row) for row in prefill[1].tolist()])
        return forward(tokens_R, layout, prefill)

    monkeypatch.setattr(engine._decoder, "_forward", counted)
    asked = [(prompt, 3 + 5 * (number % 4)) for number, prompt in enumerate([prompts[0]] * 6 + [prompts[1]] * 6)]
    tasks = [
        asyncio.create_task(finish(engine, ask(f"r{i}", prompt=prompt, max_tokens=length, seed=i)))
        for i, (prompt, length) in enumerate(asked)
    ]
    await after_tokens(engine, 60)
    update = WeightUpdate(version=1, tensors=weights_of(models[1]), num_bytes=1)
    await engine.swap(update)
    completions = await asyncio.gather(*tasks)
    assert len(rows) < len(asked)
    stats = engine.stats()
    assert stats.num_prefilled == sum(len(prompt) - 1 for prompt, _ in asked)
    assert stats.num_prefilled - stats.num_reused == sum(len(prompts[row[0] == 2]) - 1 for row in rows)
    assert all(rows.count((*prompt[:-1], *[0] * pad)) <= 2 for prompt in prompts for pad in range(3))
    for (prompt, length), completion in zip(asked, completions, strict=True):
        assert len(completion.token_ids) == length
        if len(completion.weight_spans) == 1:  # else later tokens attend to keys of older weights
            difference = logprob_parity(
                completion.rollout_logprobs, reference_logprobs(models, prompt, completion), "float32"
            )
            difference.check()


def test_prefill_batches_hold_every_sequence_once_within_the_token_bound():
    lengths = [3000, 7, 0, 2000, 2000, PREFILL_TOKENS + 1, 5]
    sequences = [(slot, np.full(length, slot + 1, np.int32)) for slot, length in enumerate(lengths)]
    batches = prefill_batches(sequences)
    assert sorted(slot for slots, _ in batches for slot in slots) == [0, 1, 3, 4, 5, 6]  # nothing to store for slot 2
    for slots, token_ids in batches:
        assert len(slots) == 1 or token_ids.size <= PREFILL_TOKENS
        for slot, row in zip(slots, token_ids, strict=True):
            assert (row == slot + 1).sum() == lengths[slot]


@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
async def test_bfloat16_weights_with_float32_logits_stay_within_the_parity_bounds(head_dtype, monkeypatch):
    """In bfloat16 the head is not copied: a GPU's product has a float32 result, for which this product stands in."""
    if head_dtype == torch.bfloat16:
        monkeypatch.setattr(products, "has_mixed_product", lambda device: True)
        monkeypatch.setattr(products, "_mixed", lambda left, right: left.float() @ right.float())
    engine = EmbeddedEngine(tiny_model(scale=1.0).bfloat16(), slots=2, max_len=64, eos_token_ids=[])
    first = await finish(engine, ask("a"))
    assert engine._decoder._head_weight_VC.dtype == head_dtype
    await engine.swap(
        WeightUpdate(version=1, tensors=weights_of(tiny_model(seed=1, scale=1.0).bfloat16()), num_bytes=1)
    )
    for seed, completion in enumerate((first, await finish(engine, ask("b")))):
        expected = reference_logprobs({seed: tiny_model(seed=seed, scale=1.0)}, (5, 6, 7), completion)
        assert np.abs(completion.rollout_logprobs - expected).mean() < 0.02


async def test_an_engine_is_loaded_from_a_model_directory_with_its_end_tokens(tmp_path):
    model = tiny_model()
    model.generation_config.eos_token_id = [3, 4]
    model.save_pretrained(tmp_path)
    config = RunConfig.model_validate({"engine": {"concurrency": 4}, "rollouts": {"max_tokens": 60}})
    engine = load_engine(tmp_path, config, max_prompt_tokens=10)
    with pytest.raises(EngineError, match="max_len=70"):
        engine.generate(ask("long", max_tokens=68))
    completions = await asyncio.gather(*(finish(engine, ask(f"r{i}", seed=i, max_tokens=60)) for i in range(8)))
    assert {int(completion.token_ids[-1]) for completion in completions} >= {3, 4}
    assert {span.version for completion in completions for span in completion.weight_spans} == {0}


def test_a_missing_model_directory_is_an_engine_error(tmp_path):
    with pytest.raises(EngineError, match="no such model directory"):
        load_engine(tmp_path / "nowhere", RunConfig(), max_prompt_tokens=8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"max_position_embeddings": 32}, "max_position_embeddings=32"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_models_that_would_be_computed_wrongly_are_refused(settings, message):
    with pytest.raises(EngineError, match=message):
        EmbeddedEngine(tiny_model(**settings), slots=1, max_len=64, eos_token_ids=[])
