"""A rank of the trainer other than 0: computes its packs of every step, as rank 0 tells it. Started by rank 0."""

import argparse
import logging
import os
import signal
import sys
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.config import RunConfig
from pipelinerl_core.roles.learners import build_rank
from pipelinerl_core.roles.process import (
    configure_logging,
    die_with_parent,
    exit_codes,
    freeze_startup_objects,
    leave,
)
from pipelinerl_core.roles.rank_channel import join_ranks
from pipelinerl_core.roles.ranked_learner import RankLearner, serve
from pipelinerl_core.training.ranks import Ranks

logger = logging.getLogger(__name__)


@exit_codes
def main() -> int:
    """Command line of the role."""
    parser = argparse.ArgumentParser(description="A rank of the trainer; rank 0 starts it.")
    for name in ("rank", "size", "port", "parent-pid"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--seconds", type=float, required=True, help="longest wait for other ranks")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent_pid)
    configure_logging()
    for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 decides when all of them stop
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    store = TCPStore(
        arguments.host, arguments.port, arguments.size, timeout=timedelta(seconds=arguments.seconds),
        wait_for_workers=False,
    )  # fmt: skip
    channel = join_ranks(
        arguments.rank,
        arguments.size,
        store=store,
        device=torch.device(arguments.device),
        collective_seconds=arguments.seconds,
    )

    def build(config: RunConfig) -> tuple[RankLearner, PackBatcher]:
        built = build_rank(config, Ranks(arguments.rank, arguments.size))
        freeze_startup_objects()
        return built

    serve(channel, build)
    return 0


if __name__ == "__main__":
    code = main()
    if code:
        sys.exit(code)
    leave(code)
