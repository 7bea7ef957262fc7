"""The prompts of a mixture."""

from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.prompts.check import check

SETTINGS = [
    "mixture.short.prompts.lengths=[2]",
    "mixture.short.weight=3",
    "mixture.long.prompts.lengths=[8]",
    "mixture.long.weight=1",
]


def test_each_group_takes_the_next_prompt_of_its_part():
    config = load_config("quickstart", SETTINGS)
    source, order = build_source(config), config.mixture_order()
    alone = {name: build_source(part) for name, part in config.parts.items()}
    for group in range(40):
        part, index = order.turn(group)
        prompt = source.prompt(group)
        assert prompt.source == part
        assert (prompt.prompt_id, prompt.text) == (
            alone[part].prompt(index).prompt_id,
            alone[part].prompt(index).text,
        )
    assert {held_out_prompt.source: held_out_prompt.text.count("+") for held_out_prompt in source.held_out(3)} == {
        "short": 1,
        "long": 7,
    }


def test_the_check_before_the_start_names_the_part(tmp_path, prepared_model):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "{number}+1=", "answer": {number + 1}}}\n' for number in range(20)))
    own = ["mixture.own.prompts.kind=file", f"mixture.own.prompts.path={file}"]
    lines = check(load_config("quickstart", [*SETTINGS, *own]))
    assert lines[0].startswith("mixture.own: 15 different prompts to train on (15 rows), 4 held out")
