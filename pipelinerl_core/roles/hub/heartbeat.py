"""Builds hub.json: address and heartbeat of the hub, and the current state of the run."""

import os
import socket
import time
from collections import deque
from dataclasses import asdict

import numpy as np
import psutil

from pipelinerl_core.config import RunConfig
from pipelinerl_core.ledger import Ledger
from pipelinerl_core.roles.hub.service import Hub
from pipelinerl_core.run.hub_status import process_mark
from pipelinerl_core.run.records import HubRecord

# Window over which the generation speed is measured.
_SPEED_SECONDS = 10.0


class HubRecordBuilder:
    """Builds hub.json."""

    def __init__(self, hub: Hub, config: RunConfig, url: str, certificate: str = "") -> None:
        """`url`: address for clients; `certificate`: PEM that TLS clients trust, empty without TLS."""
        self._hub = hub
        self._config = config
        self._url = url
        self._certificate = certificate
        self._process_started_at = psutil.Process().create_time()
        self._process_mark = process_mark(os.getpid())
        self._sampled: deque[tuple[float, dict[str, int]]] = deque()

    def record(self, state: str) -> HubRecord:
        """The current content of hub.json; `state` is run, drain, stopped or done."""
        live = self._hub.read(_summary)
        live["state"] = state
        live["steps"] = self._config.trainer.steps
        live["tokens_per_second"] = self._speed(live)
        live["metrics"] = self._hub.step_metrics
        pauses = list(self._hub.swap_pauses)
        live["swap_pause_seconds"] = float(np.median(pauses)) if pauses else None
        live["swap_pause_seconds_max"] = max(pauses, default=None)
        live["num_swaps"] = self._hub.num_swaps
        live["row_bytes"] = self._hub.row_bytes
        return HubRecord(
            url=self._url,
            certificate=self._certificate,
            boot_id=self._hub.boot_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_started_at=self._process_started_at,
            process=self._process_mark,
            beat=time.time(),
            live=live,
        )

    def _speed(self, live: dict[str, object]) -> float:
        """Tokens sampled per second, measured over the last _SPEED_SECONDS."""
        actors = live["actors"]
        assert isinstance(actors, dict)
        now, sampled = time.monotonic(), {name: actor["num_sampled"] for name, actor in actors.items()}
        self._sampled.append((now, sampled))
        while now - self._sampled[0][0] > _SPEED_SECONDS:
            self._sampled.popleft()
        begun, _ = self._sampled[0]
        first: dict[str, int] = {}  # a restarted hub hears of actors that have sampled long before
        for _, numbers in self._sampled:
            first = {**numbers, **first}
        grown = sum(number - first[name] for name, number in sampled.items())
        return grown / (now - begun) if now > begun else 0.0


def _summary(ledger: Ledger) -> dict[str, object]:
    actors = {
        str(actor): {
            "engine_version": sample.engine_version,
            "running": sample.running,
            "waiting": sample.waiting,
            "concurrency": sample.concurrency,
            "leases": ledger.num_leased_by(actor),
            "num_tokens": sample.num_tokens,
            "num_sampled": sample.num_sampled,
            "heard_at": sample.at,
        }
        for actor, sample in ledger.actor_reports.samples.items()
        if not ledger.is_gone(actor)
    }
    return {
        "step": max(0, ledger.committed_step),
        "newest_version": ledger.newest_version,
        "ready": ledger.num_ready,
        "leased": ledger.num_leased,
        "queued": ledger.num_queued,
        "reserved": ledger.num_reserved,
        "next_group_id": ledger.next_group_id,
        "tokens": ledger.tokens(),
        "lengths": {name: asdict(lengths) for name, lengths in ledger.lengths().items()},
        "actors": actors,
    }
