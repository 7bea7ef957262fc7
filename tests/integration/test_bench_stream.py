"""`bench stream` with small numbers: the counts are right. No figure is checked."""

import sys
import time

import pytest

from benchmarks import stream
from benchmarks.stream_actors import Cell
from benchmarks.stream_hub import HubUnderLoad, SimulatedTrainer

BUDGET = 1 << 20


def test_every_group_arrives_once_within_the_memory_of_a_hub_whose_trainer_stood_still():
    cell = Cell(
        num_actors=4, num_tokens=400, groups_per_step=30, num_leases=11, max_groups=120, writes_segments=True,
        hub_bytes=BUDGET,
    )  # fmt: skip
    with HubUnderLoad.open(cell) as load:
        trainer = SimulatedTrainer(load.hub_url(), load.token, cell.num_tokens)
        load.begin()
        row_bytes, deadline = [], time.monotonic() + 120
        while (live := load.live())["ready"] < 120:  # four times as many as fit: the others are in segments
            row_bytes.append(live["row_bytes"])
            assert time.monotonic() < deadline
            time.sleep(0.1)
        row_bytes.append(live["row_bytes"])
        assert 0 < max(row_bytes) <= BUDGET
        assert [trainer.take_step() for _ in range(4)] == [30] * 4
        assert trainer.take_step(wait_seconds=0) == 0
        trainer.close()
        assert load.finish() == (120, 0)
    assert len(trainer.seen) == len(trainer.latencies) == 120


def test_throughput_is_counted_from_the_groups_that_the_trainer_has_read():
    cell = Cell(num_actors=2, num_tokens=16, groups_per_step=8)
    row = stream.measure_cell(cell, 0.2, stall_seconds=0)
    assert row["groups"] % 8 == 0
    assert row["groups"] > 0
    assert row["refused"] == 0
    assert "p50_ms" not in row


def test_an_unknown_option_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_stream", "--only", "latency"])
    with pytest.raises(SystemExit) as caught:
        stream.main()
    assert caught.value.code == 2


def test_every_row_is_a_line_of_the_table_with_blanks_for_figures_that_the_row_lacks():
    result = {
        "rows": [
            {"what": "actors: 100", "groups_per_second": 4000.0, "hub_us": 200.0, "hub_mb": 150.0,
             "stalled_hub_mb": 1200.0},
            {"what": "segments: disk", "groups_per_second": 2000.0},
        ],
        "missing": ["S3: no rclone"],
        "load_average": 2.0, "cores": 2, "pyarrow": "25", "machine": "x86_64",
    }  # fmt: skip
    lines = stream.table(result).splitlines()
    assert lines[0].startswith("| groups of 8 x 512 | groups/s | p50, ms |")
    assert lines[2] == "| actors: 100 | 4,000 |  |  | 200 | 150 | 1,200 |"
    assert lines[3] == "| segments: disk | 2,000 |  |  |  |  |  |"
    assert lines[-1] == "not measured: S3: no rclone"
