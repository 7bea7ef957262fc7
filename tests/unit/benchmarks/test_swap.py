"""`pipelinerl bench swap` and `checkpoint` measure every stage, and leave nothing behind."""

import json
import sys

import pytest

from benchmarks import checkpoint, swap


@pytest.fixture
def run(shm, monkeypatch, capsys):
    def run(benchmark, *arguments):
        monkeypatch.setattr(benchmark, "limit_threads", lambda threads: None)
        monkeypatch.setattr(sys, "argv", ["bench", "--model", "tiny", "--dtype", "float32", *arguments, "--json"])
        assert benchmark.main() == 0
        assert list(shm.iterdir()) == []
        return json.loads(capsys.readouterr().out)

    return run


def test_both_contents_of_a_version_are_measured(run):
    whole, low_rank = run(swap, "--rank", "2", "--versions", "2")["rows"]
    assert (whole["content"], low_rank["content"]) == ("merged", "adapters")
    assert whole["bytes"] > 10 * low_rank["bytes"]
    assert whole.keys() == low_rank.keys()
    assert all(whole[f"{stage}_seconds"] > 0 for stage in swap.STAGES)


def test_every_part_of_a_checkpoint_is_measured(run):
    result = run(checkpoint, "--rounds", "1")
    assert result["parts"].keys() == set(checkpoint.PARTS)
    assert result["bytes"] > result["largest_file_bytes"] // 2
    assert all(part["cpu_seconds"] > 0 for part in result["parts"].values())
