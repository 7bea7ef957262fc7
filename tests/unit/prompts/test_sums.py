"""The sums: determinism, the split by hash, demonstrations."""

import itertools
import random

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.recipes import SumsModel
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.prompts.split import GENERATED_SHARE, is_held_out, prompt_id
from pipelinerl_core.prompts.sums import SumsSource, demonstrations, draw_sum, summands, total


def source(seed=0, **prompts):
    return build_source(build_config({"seed": seed, "prompts": {"kind": "sums", **prompts}}))


def test_a_sum_by_hand():
    assert summands("3+4+8=") == [3, 4, 8]
    assert total("3+4+8=") == 15


def test_prompt_id_is_the_sha256_of_source_and_text():
    # printf 'sums\0003+4=' | sha256sum
    assert prompt_id("sums", "3+4=") == "39b872cbef560e1a"
    assert prompt_id("other", "3+4=") != prompt_id("sums", "3+4=")


def test_hashes_below_the_share_are_held_out():
    assert is_held_out("00000000ffffffff", 0.2)
    assert is_held_out("33333333ffffffff", 0.2)  # 0x33333333 / 2^32 = 0.19999999995
    assert not is_held_out("33333334" + "0" * 8, 0.2)
    assert not is_held_out("ffffffff00000000", 0.2)


def test_a_position_gives_the_same_prompt_in_any_order_and_from_any_object():
    forward = [source().prompt(index) for index in range(50)]
    other = source()
    assert [other.prompt(index) for index in reversed(range(50))] == forward[::-1]
    assert source(seed=1).prompt(0) != source(seed=0).prompt(0) or source(seed=1).prompt(1) != source(seed=0).prompt(
        1
    )


def test_a_position_gives_the_same_prompt_on_every_machine():
    assert [source(lengths=[2, 2, 3, 3, 4, 5, 6, 8]).prompt(index).text for index in (0, 1, 10**12)] == [
        "7+4+8+5=",
        "8+1=",
        "8+7=",
    ]


def test_the_task_is_the_answer_and_the_verifier_is_that_of_sums():
    prompt = source().prompt(7)
    assert prompt.task == {"answer": str(sum(summands(prompt.text)))}
    assert prompt.env == "sums"
    assert prompt.source == source().name == "sums"
    assert prompt.prompt_id == prompt_id("sums", prompt.text)


def test_training_and_warm_start_share_no_prompt_with_the_held_out_prompts():
    held_out = {prompt.prompt_id for prompt in source().held_out(3000)}
    other_seed = source(seed=5)
    training = {other_seed.prompt(index).prompt_id for index in range(5000)}
    pairs = itertools.islice(demonstrations(SumsModel()), 5000)
    warm_start = {prompt_id("sums", text) for text, _ in pairs}
    assert not held_out & training
    assert not held_out & warm_start
    assert training & warm_start  # the same side: short sums occur in both


def test_a_fifth_of_all_sums_of_two_is_held_out():
    ids = [prompt_id("sums", f"{a}+{b}=") for a in range(10) for b in range(10)]
    assert sum(is_held_out(identity, 0.2) for identity in ids) == 16


def test_held_out_sums_are_those_of_every_seed_and_a_prefix_of_more():
    assert source(seed=0).held_out(100) == source(seed=9).held_out(100)
    assert source().held_out(300)[:100] == source().held_out(100)


def test_held_out_sums_repeat_only_when_their_length_is_exhausted():
    prompts = [prompt.text for prompt in SumsSource((2,), 0, "sums").held_out(3 * 16)]
    rounds = [prompts[start : start + 16] for start in range(0, 3 * 16, 16)]
    assert all(set(texts) == set(rounds[0]) and len(set(texts)) == 16 for texts in rounds)
    long = [prompt.text for prompt in SumsSource((8,), 0, "sums").held_out(500)]
    assert len(set(long)) == 500


def test_lengths_are_drawn_as_often_as_they_are_listed():
    uneven = source(lengths=[2, 2, 2, 5])
    lengths = [len(summands(uneven.prompt(index).text)) for index in range(4000)]
    assert set(lengths) == {2, 5}
    assert lengths.count(2) == pytest.approx(3000, abs=100)  # standard deviation sqrt(4000 * 3/16) = 27


def test_a_sum_of_one_number_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"prompts\.lengths=\[3, 1\].*at least 2 summands"):
        source(lengths=[3, 1])


def test_demonstrations_are_worked_out_or_hasty():
    pairs = list(itertools.islice(demonstrations(SumsModel(early_steps=0)), 4000))
    worked = [(text, answer) for text, answer in pairs if not answer.startswith(".")]
    assert len(worked) / len(pairs) == pytest.approx(0.35, abs=0.03)
    for text, answer in worked:
        running, _, last = answer.partition(".")
        assert [int(number) for number in running.split(",")] == [*itertools.accumulate(summands(text))][1:]
        assert int(last) == total(text)
    errors = [int(answer[1:]) - total(text) for text, answer in pairs if answer.startswith(".") and total(text) >= 6]
    assert set(errors) == set(range(-6, 7))


def test_early_demonstrations_are_mostly_worked_out():
    recipe = SumsModel(rows=100, early_steps=20, early_worked_out_share=0.8)
    answers = [answer for _, answer in itertools.islice(demonstrations(recipe), 4000)]
    early, late = (sum(not answer.startswith(".") for answer in part) for part in (answers[:2000], answers[2000:]))
    assert early / 2000 == pytest.approx(0.8, abs=0.04)
    assert late / 2000 == pytest.approx(0.35, abs=0.04)


def test_demonstrations_do_not_touch_the_global_generator():
    random.seed(3)
    state = random.getstate()
    next(demonstrations(SumsModel()))
    source().prompt(0)
    assert random.getstate() == state


def test_digits_are_drawn_as_randrange_draws_them():
    def slowly(rng, lengths, *, held_out):
        length = rng.choice(lengths)
        while True:
            text = "+".join([str(rng.randrange(10)) for _ in range(length)]) + "="
            if is_held_out(prompt_id("sums", text), GENERATED_SHARE) is held_out:
                return text

    for seed in range(200):
        first, other, lengths = random.Random(seed), random.Random(seed), (2, 3, 2 + seed % 9)
        assert [draw_sum(first, lengths, held_out=seed % 5 == 0) for _ in range(3)] == [
            slowly(other, lengths, held_out=seed % 5 == 0) for _ in range(3)
        ]
        assert first.random() == other.random()
