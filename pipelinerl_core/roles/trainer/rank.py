"""A rank of the trainer other than 0: a process that executes rank 0's commands on its own packs of each step."""

import argparse
import os
import signal
import sys

import torch

from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.roles.runtime.process import Arguments, freeze_startup_objects, leave, run_main
from pipelinerl_core.roles.trainer.learners import build_rank
from pipelinerl_core.roles.trainer.rank_channel import join_ranks, translate_rank_errors
from pipelinerl_core.roles.trainer.rank_files import RankWriter
from pipelinerl_core.roles.trainer.ranked_learner import RankLearner, serve
from pipelinerl_core.roles.trainer.rendezvous import join_rendezvous, report_refusal
from pipelinerl_core.run.records import RendezvousRecord
from pipelinerl_core.training.ranks import Ranks

# Shorter than the collective timeout: rank 0 opens the rendezvous before it starts the other ranks.
_CONNECT_SECONDS = 60.0


_ARGUMENTS: Arguments = {
    **{f"--{name}": {"type": int, "required": True} for name in ("rank", "parent-pid")},
    "--run": {"default": "", "help": "URL of the run, whose checkpoints the rank writes its part of"},
    "--rendezvous": {"type": RendezvousRecord.model_validate_json, "required": True, "help": "RendezvousRecord"},
}


def _compute(arguments: argparse.Namespace) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 decides when all ranks stop
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rendezvous: RendezvousRecord = arguments.rendezvous
    ranks = Ranks(arguments.rank, rendezvous.size, rendezvous.per_node)
    device = torch.device(rendezvous.device)
    if device.type == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    with translate_rank_errors("connecting to the rendezvous"):
        store = join_rendezvous(rendezvous.where, ranks.size, min(rendezvous.seconds, _CONNECT_SECONDS))
    channel = join_ranks(ranks.rank, ranks.size, store=store, device=device, collective_seconds=rendezvous.seconds)

    def build(config: RunConfig) -> tuple[RankLearner, PackBatcher]:
        built = build_rank(config, ranks)
        freeze_startup_objects()
        return built

    try:
        serve(channel, build, RankWriter(arguments.run, store, ranks.rank).write)
    except ConfigError as error:
        report_refusal(store, str(error))
        raise


def main() -> int:
    """Command line of the role."""
    return run_main("A rank of the trainer; rank 0 starts it.", _ARGUMENTS, _compute)


if __name__ == "__main__":
    code = main()
    if code:
        sys.exit(code)
    leave(code)
