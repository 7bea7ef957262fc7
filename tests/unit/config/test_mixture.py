"""The mixture: the order of its parts, and its configuration."""

import random
from collections import Counter
from fractions import Fraction

import pytest

from pipelinerl_core.config import as_toml
from pipelinerl_core.config.interleave import Interleave
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config, load_config

PARTS = [
    "rollouts.max_tokens=64",
    "mixture.math.weight=2",
    "mixture.math.prompts.lengths=[2]",
    "mixture.guess.prompts.kind=environment",
    "mixture.guess.environment.path=builtin:guess",
]


def weights_at_random(seed):
    rng = random.Random(seed)
    choices = [rng.choice([rng.randint(1, 30), round(rng.random() + 0.001, 3)]) for _ in range(rng.randint(1, 8))]
    return {f"part{number}": weight for number, weight in enumerate(choices)}


@pytest.mark.parametrize("seed", range(40))
def test_no_count_is_a_whole_group_away_from_its_weight(seed):
    weights = weights_at_random(seed)
    order, counts = Interleave(weights), Counter()
    total = sum(Fraction(str(weight)) for weight in weights.values())
    for position in range(500):
        part, index = order.turn(position)
        assert index == counts[part], "the prompts of a part are taken in order, none left out"
        counts[part] += 1
        for name, weight in weights.items():
            assert abs(counts[name] - (position + 1) * Fraction(str(weight)) / total) < 1


@pytest.mark.parametrize("seed", range(10))
def test_the_order_is_the_same_from_any_position_on(seed):
    weights = weights_at_random(seed)
    order = Interleave(weights)
    turns = [order.turn(position) for position in range(300)]
    for start in (299, 0, 131, 250, 17):
        assert Interleave(weights).turn(start) == turns[start]


def test_the_order_of_round_weights_repeats_and_needs_no_memory_beyond_one_period():
    order = Interleave({"math": 0.5, "guess": 0.3, "gym": 0.2})
    first = ["math", "guess", "math", "gym", "math", "guess", "math", "guess", "math", "gym"]
    assert [order.turn(position).part for position in range(10)] == first
    assert order.turn(10**12 + 1) == ("guess", 3 * 10**11)
    assert len(order._parts) == 10


def test_a_part_has_its_own_sections_and_the_other_sections_of_the_run():
    config = load_config("quickstart", [*PARTS, "reward.timeout_seconds=9", "mixture.math.max_tokens=16"])
    math, guess = config.parts["math"], config.parts["guess"]
    assert (math.prompts.kind, math.prompts.lengths, math.environment.path) == ("sums", (2,), "")
    assert (guess.prompts.kind, guess.environment.path) == ("environment", "builtin:guess")
    assert (math.rollouts.max_tokens, guess.rollouts.max_tokens) == (16, 64)
    assert math.reward.timeout_seconds == guess.reward.timeout_seconds == 9
    assert not math.mixture
    assert load_config("quickstart", [*PARTS, "mixture.math.reward.workers=2"]).parts["math"].reward.workers == 2
    assert config.group_seconds == load_config("quickstart", [*PARTS, *PARTS[4:]]).group_seconds > 1200
    quickstart = load_config("quickstart")
    assert quickstart.parts == {"": quickstart}


def test_a_mixture_is_stored_and_read_back(tmp_path):
    config = load_config("quickstart", PARTS)
    assert build_config(config.model_dump(mode="json")) == config
    (tmp_path / "mine.toml").write_text(as_toml(config))
    assert load_config(str(tmp_path / "mine.toml")) == config


def test_a_list_of_tables_with_names_is_the_same_and_overrides_name_its_parts(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[[mixture]]\nname = "short"\nweight = 3\nprompts.lengths = [2]\n[[mixture]]\nname = "long"\n')
    config = load_config(str(file), ["mixture.long.weight=5"])
    assert {name: part.weight for name, part in config.mixture.items()} == {"short": 3, "long": 5}
    file.write_text("[[mixture]]\nweight = 3\n")
    with pytest.raises(ConfigError, match="mixture: table 1 needs a `name` of its own"):
        load_config(str(file))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("mixture.math.weigth=2", r"mixture.math.weigth: no such key; did you mean mixture.<name>.weight\?"),
        ("mixture.math.weight=0", "mixture.math.weight=0: input should be greater than 0"),
        ("mixture.math.prompts.tasks=[]", "mixture.math: tasks: no key of prompts.kind=sums"),
        ("mixture.math.reward.foo=2", "mixture.math: foo: no key of reward"),
        ("mixture.math.environment.foo=2", "mixture.math: foo: no key of environment"),
        ("mixture.math.prompts.kind=file", "mixture.math: path: field required"),
        ("mixture.guess.reward.kind=sums", "mixture.guess: environment.path scores its episodes"),
        ("mixture.math.max_tokens=65", "mixture.math.max_tokens=65 is above rollouts.max_tokens=64"),
        ("mixture.Math.weight=1", "mixture.Math: a name has lower-case letters"),
        ("eval.sets.math.lengths=[3]", "mixture.math and eval.sets.math have the same name"),
    ],
)
def test_a_mistake_in_a_part_is_one_line_that_names_the_part(setting, expected):
    with pytest.raises(ConfigError, match=f"^{expected}") as raised:
        load_config("quickstart", [*PARTS, setting])
    assert "\n" not in str(raised.value)
