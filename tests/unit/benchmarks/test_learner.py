"""`bench learner` in miniature: that it measures what it says. Never how fast it is."""

import json

import torch

from benchmarks import learner
from benchmarks.learner_memory import CONTESTANTS, measure
from benchmarks.learner_memory import table as memory_table
from benchmarks.learner_rounds import BareLoop, measure_fill, measure_workload
from pipelinerl_core.batching.assemble import assemble_rows
from tests.unit.benchmarks.learner_case import MINI


def test_contestants_take_turns_on_the_same_tokens():
    workload = measure_workload(MINI, 2, with_trl=False)
    assert (workload["num_rollouts"], workload["rounds"]) == (8, 2)
    assert list(workload["tokens_per_second"]) == ["learner", "learner, prompts not shared", "bare loop"]
    assert all(speed > 0 for speed in workload["tokens_per_second"].values())
    assert workload["learner_over"].keys() == {"learner, prompts not shared", "bare loop"}
    groups = MINI.groups()
    assert workload["num_tokens"] == sum(
        len(r.prompt_token_ids) + r.num_tokens - 1 for group in groups for r in group
    )


def test_the_bare_loop_trains():
    rows = assemble_rows(1, MINI.groups(), MINI.config()).rows
    bare = BareLoop(MINI, rows)
    before = [parameter.detach().clone() for parameter in bare._model.parameters()]
    bare()
    assert all(not torch.equal(a, b) for a, b in zip(before, bare._model.parameters(), strict=True))


def test_filled_packs_are_full_and_sorted_ones_pad_less():
    for pair in zip(*[iter(measure_fill())] * 2, strict=True):
        assert [row["packing"] for row in pair] == ["sorted", "filled"]
        assert pair[1]["pack_fill"] >= 0.95 > pair[0]["pack_fill"]
        assert pair[1]["attention_slots_per_token"] > pair[0]["attention_slots_per_token"]


def test_the_memory_table_has_a_line_for_each_type():
    rows = measure(16, 512, 8)
    assert [(row["dtype"], row["way"]) for row in rows] == [
        (d, w) for d in ("float32", "bfloat16") for w in CONTESTANTS
    ]
    assert all(row["extra_bytes"] > 0 for row in rows)
    assert [line[:9] for line in memory_table(rows, 16)[-2:]] == ["| float32", "| bfloat1"]


def test_the_table_says_that_trl_is_not_installed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(learner, "_PACKAGES", tmp_path)
    monkeypatch.setattr(learner.sys, "path", list(learner.sys.path))
    monkeypatch.setattr(learner.importlib.util, "find_spec", lambda name: None)
    learner.main(["--workloads"])
    assert "attention slots" in capsys.readouterr().out
    learner.main(["--workloads", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["trl"] == "not installed: run `make bench-peers`"
    result["workloads"] = [measure_workload(MINI, 1, with_trl=False)]
    assert "| TRL | not installed: run `make bench-peers` |  |  |" in learner.table(result)


def test_wrong_numbers_are_bad_input(capsys):
    assert learner.main(["--rounds", "0"]) == 2
    assert capsys.readouterr().err == "--rounds and --memory-tokens must be at least 1\n"
