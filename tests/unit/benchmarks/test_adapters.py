"""`pipelinerl bench adapters` measures both contents of a version, and leaves nothing behind."""

import sys

from benchmarks import adapters
from tests.models import tiny_model


def test_both_contents_are_measured_and_nothing_is_left(tmp_path, shm, monkeypatch, capsys):
    tiny_model("qwen2", 0).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(adapters, "limit_threads", lambda threads: None)
    monkeypatch.setattr(sys, "argv", ["bench", "--model", str(tmp_path / "model"), "--rank", "2", "--versions", "2"])
    assert adapters.main() == 0
    _, _, _, _, whole, low_rank = capsys.readouterr().out.splitlines()
    assert whole.startswith("| `merged` | 0.07 |")
    assert low_rank.startswith("| `adapters` | 0.01 |")
    assert list(shm.iterdir()) == []
