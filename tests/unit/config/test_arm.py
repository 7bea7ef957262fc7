"""Arms of a comparison, from the command line and from files."""

import pytest

from pipelinerl_core.config.arm import Arm, distinct, grid_arms, parse_arm, parse_grid, read_arms
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config


def test_an_arm_on_the_command_line_is_a_name_and_settings():
    arm = parse_arm("conventional-4: schedule.kind=conventional schedule.steps_per_phase=4")
    assert arm == Arm("conventional-4", ("schedule.kind=conventional", "schedule.steps_per_phase=4"))
    assert parse_arm("as-it-is:") == Arm("as-it-is", ())


def test_a_value_with_spaces_is_quoted():
    assert parse_arm("short: 'prompts.lengths=[2, 3]'").overrides == ("prompts.lengths=[2, 3]",)


@pytest.mark.parametrize("text", ["pipeline", "a b: x.y=1", "../up: x.y=1", ": x.y=1", "a: 'x.y=1"])
def test_malformed_text_of_an_arm_is_refused(text):
    with pytest.raises(ConfigError):
        parse_arm(text)


def test_a_file_has_a_table_per_arm_and_its_values_reach_the_configuration(tmp_path):
    path = tmp_path / "arms.toml"
    path.write_text(
        '[one]\nschedule.kind = "april"\nschedule.alpha = 1.5\n\n[two]\nengine.pace = false\n'
        "prompts.lengths = [2, 3]\n"
    )
    first, second = read_arms(str(path))
    assert (first.name, second.name) == ("one", "two")
    assert load_config("quickstart", first.overrides).schedule.alpha == 1.5
    config = load_config("quickstart", second.overrides)
    assert (config.engine.pace, config.prompts.lengths) == (False, (2, 3))


@pytest.mark.parametrize(("text", "word"), [("[one", "TOML"), ("trainer = 3", "not a table"), ("['a b']", "name")])
def test_a_file_without_arms_is_refused(tmp_path, text, word):
    path = tmp_path / "arms.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word):
        read_arms(str(path))


def test_a_grid_has_an_arm_for_each_combination_and_a_value_keeps_its_own_commas():
    keys = parse_grid(["loss.kind=grpo,dapo", "prompts.lengths=[2,3],[[4],5]", "tracking.notes='a,b',\"c,[\""])
    assert keys[1:] == [("prompts.lengths", ["[2,3]", "[[4],5]"]), ("tracking.notes", ["'a,b'", '"c,["'])]
    arms = grid_arms(keys[:2])
    assert [arm.overrides for arm in arms][1] == ("loss.kind=grpo", "prompts.lengths=[[4],5]")
    assert len(arms) == 4
    assert load_config("quickstart", [arms[0].overrides[1]]).prompts.lengths == (2, 3)


def test_a_comparison_needs_two_arms_of_different_names():
    arm = Arm("one", ())
    with pytest.raises(ConfigError, match="at least two"):
        distinct([arm])
    with pytest.raises(ConfigError, match="two arms are named one"):
        distinct([arm, Arm("one", ("seed=1",))])
