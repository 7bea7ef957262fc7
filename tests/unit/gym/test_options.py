"""Options and levels of the tasks of reasoning-gym; the page that lists them."""

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.rewards import gym as scorer

GYM = "prompts.kind=reasoning_gym"
OPTIONS_OF_CHAIN_SUM = (
    r"Options of chain_sum: min_terms \(int, 2\), max_terms \(int, 6\), min_digits \(int, 1\), max_digits \(int, 4\)"
)


def questions(*settings):
    source = build_source(load_config("quickstart", [GYM, *settings]))
    return [source.prompt(index).text.partition("problem: ")[2].partition(" =")[0] for index in range(20)]


def test_options_change_the_entries():
    two_digits = questions("prompts.options.chain_sum.max_terms=2", "prompts.options.chain_sum.max_digits=1")
    assert {len(question.split()) for question in two_digits} == {3}
    assert max(len(number) for question in two_digits for number in question.split()) == 1


def test_a_level_sets_several_options_and_single_options_replace_its_values():
    assert {len(question) for question in questions("prompts.levels.chain_sum=0")} == {len("1 + 2")}
    assert max(len(question.split()) for question in questions("prompts.levels.chain_sum=3")) == 9
    longer = questions("prompts.levels.chain_sum=0", "prompts.options.chain_sum.max_terms=4")
    assert {len(question.split()) for question in longer} == {3, 5, 7}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ["prompts.options.chain_sum.max_term=2"],
            rf"prompts.options.chain_sum.max_term: no such option; did you mean max_terms\? {OPTIONS_OF_CHAIN_SUM}",
        ),
        (
            ["prompts.options.chain_sum.max_terms=two"],
            rf'prompts.options.chain_sum.max_terms="two": input should be a valid integer. {OPTIONS_OF_CHAIN_SUM}',
        ),
        (["prompts.options.chain_sum.max_terms=true"], "prompts.options.chain_sum.max_terms=true: input should be"),
        (
            ["prompts.options.chain_sum.max_terms=1"],
            "prompts.options.chain_sum: reasoning-gym refuses these options: AssertionError: max_terms must be",
        ),
        (["prompts.options.gcd.max_terms=1"], "prompts.options.gcd: the task is not in prompts.tasks="),
        (["prompts.levels.chain_sum=99"], "prompts.levels.chain_sum=99: the task has levels 0 to 10$"),
        (['prompts.tasks=["acre"]', "prompts.levels.acre=1"], "prompts.levels.acre=1: the task has no levels"),
        (
            ['prompts.tasks=["composite"]', 'prompts.options.composite.datasets=[{name="x",weight=1,config={}}]'],
            "prompts.tasks=x: the scorer of this reasoning-gym task was not reviewed",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_option_is_one_line_that_lists_the_options(settings, expected):
    with pytest.raises(ConfigError, match=f"^{expected}") as raised:
        questions(*settings)
    assert "\n" not in str(raised.value)


def test_the_scorer_gets_the_options_of_the_task(monkeypatch):
    monkeypatch.setattr(scorer, "_GIVEN", {})
    scorer._dataset.cache_clear()
    scorer.prepare({"chain_sum": [{"max_terms": 3}, None], "gcd": [{}, 2]})
    assert scorer._dataset("chain_sum").config.max_terms == 3
    assert scorer._dataset("gcd").config.max_numbers == 4
    scorer._dataset.cache_clear()
