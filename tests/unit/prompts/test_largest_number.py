"""Prompts that ask for the largest number: determinism, the split by hash, the answer."""

from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.prompts.split import GENERATED_SHARE, is_held_out


def source(seed=0):
    return build_source(build_config({"seed": seed, "prompts": {"kind": "largest_number"}}))


def test_a_position_gives_the_same_prompt_on_every_machine():
    prompts = [source().prompt(index) for index in (0, 1)]
    assert [prompt.text for prompt in prompts] == [
        "Pick the largest number: 79, 74, 15",
        "Pick the largest number: 84, 49, 32",
    ]
    assert source(seed=1).prompt(0) != prompts[0]


def test_the_answer_is_the_largest_of_three_different_numbers_and_the_verifier_is_last_number():
    for prompt in [*map(source().prompt, range(100)), *source().held_out(100)]:
        numbers = [int(number) for number in prompt.text.removeprefix("Pick the largest number: ").split(", ")]
        assert len(set(numbers)) == 3
        assert all(10 <= number <= 99 for number in numbers)
        assert prompt.task == {"answer": str(max(numbers))}
        assert prompt.env == "last_number"


def test_the_hash_of_a_prompt_decides_whether_the_prompt_is_held_out():
    training, held_out = [source().prompt(index) for index in range(500)], source(seed=3).held_out(500)
    assert not any(is_held_out(prompt.prompt_id, GENERATED_SHARE) for prompt in training)
    assert all(is_held_out(prompt.prompt_id, GENERATED_SHARE) for prompt in held_out)


def test_held_out_prompts_differ_and_are_the_same_for_every_seed():
    held_out = source(seed=0).held_out(2000)
    assert len({prompt.prompt_id for prompt in held_out}) == 2000
    assert source(seed=1).held_out(2000) == held_out
    assert source().held_out(0) == []
