"""`pipelinerl trace --gradient`: computes the step that trained a rollout again, with and without the rollout."""

import argparse
import json
import sys
from typing import Any

from pipelinerl_core.data.codec import decode_batch
from pipelinerl_core.data.trained import TrainedRows
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.roles.runtime.process import RUN, Arguments, limit_threads, run_main
from pipelinerl_core.roles.trainer.learners import open_learners
from pipelinerl_core.roles.trainer.own_code import load_stored_functions
from pipelinerl_core.roles.trainer.retrain import replay_steps, restore
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.history import counted_commit_keys, read_commit


def gradient_norms(url: str, step: int, group: int, rollout: int) -> dict[str, Any]:
    """Norms over all weights, before clipping, of the gradient of a step: of all its rows, without a rollout, and of
    the rollout alone, each row with the advantage and weight of the step.

    Each norm begins at the newest checkpoint before the step, so that no state is kept.

    Raises ConfigError if the step has not trained the rollout, or without a checkpoint before the step.
    """
    context = open_run(url)
    load_stored_functions(context)
    store, commits = context.store, counted_commit_keys(context.store)
    if step not in commits or step < 1:
        raise ConfigError(f"{url} has no trained step {step}")
    commit = read_commit(store, commits[step])
    rows = [row for batch in TrainedRows(store).batches(commit) for row in decode_batch(batch)]
    own = [row for row in rows if (row.rollout.group_id, row.rollout.rollout_index) == (group, rollout)]
    if not own:
        raise ConfigError(f"step {step} has not trained rollout {group}.{rollout}")
    with open_learners(url, context.config.trainer.ranks) as learners:
        learner = learners.build(context.config)
        norms = {}
        for name, chosen in (("all", rows), ("without", [row for row in rows if row not in own]), ("alone", own)):
            restore(store, learner, commits, step - 1)
            for _ in replay_steps(store, learner, commits, step - 1):
                pass
            norms[name] = learner.step(chosen)["train/grad_norm"]
    recorded = commit.metrics.get("train/grad_norm")
    return {"step": step, "rollout": f"{group}.{rollout}", "recorded": recorded, "gradient_norms": norms}


_ARGUMENTS: Arguments = {
    **RUN,
    **{f"--{name}": {"type": int, "required": True} for name in ("step", "group", "rollout")},
    "--json": {"action": "store_true"},
}


def main() -> int:
    """Command line of the tool."""
    return run_main(__doc__, _ARGUMENTS, _print)


def _print(arguments: argparse.Namespace) -> None:
    limit_threads(open_run(arguments.run).config.placement.threads)
    document = gradient_norms(arguments.run, arguments.step, arguments.group, arguments.rollout)
    norms = document["gradient_norms"]
    text = (
        f"gradient of step {arguments.step}: norm {norms['all']:.6g} with rollout {document['rollout']}, "
        f"{norms['without']:.6g} without it; {norms['alone']:.6g} of the rollout alone"
    )
    print(json.dumps(document) if arguments.json else text)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
