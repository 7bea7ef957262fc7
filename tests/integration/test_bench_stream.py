"""`bench stream` in miniature: that it counts right, and what it does without a peer. Never how fast it is."""

import sys
import time

import pytest

from pipelinerl_core.bench import stream, stream_peers
from pipelinerl_core.bench.stream_actors import Seal
from pipelinerl_core.bench.stream_hub import Cell, HubUnderLoad, SimulatedTrainer
from pipelinerl_core.bench.stream_table import markdown, table
from pipelinerl_core.errors import ConfigError

BUDGET = 1 << 20


def test_every_group_arrives_once_within_the_memory_of_a_hub_whose_trainer_stood_still():
    cell = Cell(
        num_actors=4, num_tokens=400, groups_per_step=30, num_leases=8, max_groups=120, seal=Seal.WRITE,
        overrides={"placement": {"hub_bytes": BUDGET}, "schedule": {"max_lag": 5}},
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
        counts = load.finish()
    assert (counts["groups"], counts["refused"]) == (120, 0)
    assert len(trainer.seen) == len(trainer.latencies) == 120


def test_throughput_is_counted_from_what_the_trainer_has_read():
    cell = Cell(num_actors=2, num_tokens=16, groups_per_step=8)
    found = stream.measure_throughput(cell, 0.2)
    assert found["groups"] % 8 == 0
    assert found["groups"] > 0
    assert found["refused"] == 0
    assert found["tokens_per_second"] == pytest.approx(found["groups_per_second"] * 8 * 16)


def test_json_lines_carry_every_group_in_order():
    found = stream_peers.measure_peer("jsonl", 16, 0.1)
    assert found["groups"] > 0


def test_a_peer_that_is_not_there_is_said_in_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(stream_peers, "_PACKAGES", tmp_path)
    with pytest.raises(ConfigError, match="make bench-peers"):
        stream_peers.find_redis_server()
    extent = stream.Extent(
        tokens=(16,),
        actors=(),
        seconds=0.1,
        samples=0,
        stalled_actors=0,
        stall_seconds=0,
        minutes=0,
        segment_groups=0,
    )
    result = stream.measure(extent, ["peers"])
    assert [peer["peer"] for peer in result["peers"]] == ["jsonl"]
    assert len(result["missing"]) == 1
    assert "not measured: Redis: no redis-server on PATH" in table(result)
    assert capsys.readouterr().err.count("\n") == 3


def test_an_unknown_part_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_stream", "--only", "latencies"])
    with pytest.raises(SystemExit) as caught:
        stream.main()
    assert caught.value.code == 2
    assert "no such part; there are throughput, latency" in capsys.readouterr().err


def test_every_figure_is_a_line_of_the_table():
    cells = [
        {"num_actors": num_actors, "num_tokens": num_tokens, "groups_per_second": speed, "hub_us": 200.0,
         "tokens_per_second": speed * 8 * num_tokens, "hub_cores": 0.9, "hub_rss_bytes": 2e8}
        for num_actors, num_tokens, speed in ((100, 512, 4000.0), (1, 4096, 1600.0), (100, 4096, 1500.0))
    ]  # fmt: skip
    result = {
        "throughput": cells,
        "latency": [{"num_tokens": 512, "p50_ms": 0.5, "p99_ms": 1.5, "max_ms": 3.0}],
        "memory": None,
        "peers": [{"peer": "redis", "num_tokens": 512, "groups_per_second": 2000.0}],
        "segments": [],
        "missing": ["S3: no rclone"],
        "load_average": 2.0, "cores": 2, "pyarrow": "25", "machine": "x86_64",
    }  # fmt: skip
    lines = markdown(result).splitlines()
    figures = "4,000 groups/s, 16.4 M tokens/s; hub 200 us per group, 0.90 cores, 200 MB"
    assert f"| 100 actors, groups of 8 x 512 | {figures} |" in lines
    assert sum("groups of 8 x 4,096" in line for line in lines) == 2
    assert any("p50 0.50, p99 1.50, max 3.0 ms" in line for line in lines)
    assert any(line.startswith("| Redis") and "ours is 2.0 with 100 actors times that" in line for line in lines)
    assert lines[-1] == "not measured: S3: no rclone"
