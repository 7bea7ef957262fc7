"""What rank 0 computes without the other ranks leaves the channel to the heartbeats."""

import threading
from unittest.mock import Mock

from pipelinerl_core.roles.trainer import rank_channel
from pipelinerl_core.roles.trainer.rank_channel import RankChannel
from pipelinerl_core.roles.trainer.ranked_learner import RankedLearner


def test_rank_0_alone_scores_and_reads_weights_while_heartbeats_are_sent(monkeypatch):
    beats = threading.Semaphore(0)

    def send(self, rank, values, data):
        assert values == {"command": "beat"}
        beats.release()

    def beside_heartbeats(*_):
        for _ in range(2):
            assert beats.acquire(timeout=10)
        return []

    monkeypatch.setattr(rank_channel.dist, "new_group", Mock())
    monkeypatch.setattr(rank_channel, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(RankChannel, "_send", send)
    local = Mock(is_sharded=False, logprobs_of=beside_heartbeats, weights=beside_heartbeats, state=beside_heartbeats)
    channel = RankChannel(0, 2, 60.0)
    learner = RankedLearner(local, channel, Mock())
    assert learner.logprobs_of([]) == learner.state() == []
    learner.weights({})
    monkeypatch.setattr(RankChannel, "_send", Mock())
    channel.close()
