"""Measure what rank 0 of the trainer does between two steps, while all ranks wait: CPU time by part.

Run: `python -m benchmarks trainer [--groups N] [--tokens N] [--ranks N] [--json]`. The rows are random; nothing is
sent or trained. Figures are medians over rounds. Release 0.1.0 did all parts between two steps; now the last four
are done while the ranks compute, or not at all.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from benchmarks import report
from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.data.codec import decode_batch, decode_rollouts, encode_batch, encode_rollouts, to_segment
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.roles.runtime.process import exit_codes, limit_threads
from pipelinerl_core.roles.trainer.rank_channel import RankChannel
from pipelinerl_core.roles.trainer.ranked_learner import RankedLearner, RankLearner
from tests.rollout_rows import build_group

_GROUP_SIZE = 8
_PACK_TOKENS = 16384
_NOW = ("read rows", "advantages, masks", "plan, rows of other ranks")
"""The parts that are still between two steps."""


class _Silent:
    """A channel to `size` ranks that sends nothing, and a learner that computes nothing."""

    version = 0
    is_sharded = False
    step_vectors = ()

    def __init__(self, size: int) -> None:
        self.size = size

    @contextmanager
    def command(self, name: str) -> Iterator[None]:
        yield

    def send(self, command: str, *, payloads: Sequence[object]) -> None:
        """Drop the command."""

    def step_packs(self, packs: Sequence[object]) -> dict[str, float]:
        """No step."""
        return {}


def measure(num_groups: int, num_tokens: int, ranks: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of each part of a step of `num_groups` groups, by name."""
    rollouts = {"max_tokens": num_tokens, "group_size": _GROUP_SIZE}
    config = build_config({"rollouts": rollouts, "trainer": {"groups_per_step": num_groups}})
    received = [
        encode_rollouts("bench", build_group(0, group_id=group_id, size=_GROUP_SIZE, num_tokens=num_tokens))
        for group_id in range(num_groups)
    ]
    silent, batcher = _Silent(ranks), PackBatcher(_PACK_TOKENS)
    learner = RankedLearner(cast(RankLearner, silent), cast(RankChannel, silent), batcher)
    seconds: dict[str, list[float]] = {}

    def timed(part: str, run: Callable[..., Any], *arguments: Any) -> Any:
        started = time.process_time()
        result = run(*arguments)
        seconds.setdefault(part, []).append(time.process_time() - started)
        return result

    for _ in range(rounds):
        groups = timed("read rows", list, map(decode_rollouts, received))
        rows = timed("advantages, masks", assemble_rows, 1, groups, config).rows
        timed("plan, rows of other ranks", learner.step, rows)
        timed("packs of one rank", list, batcher.rows(rows[::ranks]))
        batch = timed("encode the batch file", encode_batch, "", 1, rows)
        timed("read the batch file back", decode_batch, batch)
        shares = [[encode_batch("", 1, rows[rank::ranks])] for rank in range(1, ranks)]
        timed("compress the rows of other ranks", list, map(to_segment, shares))
    parts = {part: statistics.median(part_seconds) for part, part_seconds in seconds.items()}
    size = {"rollouts": num_groups * _GROUP_SIZE, "tokens": num_tokens, "ranks": ranks}
    return {**size, "seconds": parts, "now": sum(parts[part] for part in _NOW), **report.machine()}


def table(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    size = f"{result['rollouts']:,} rollouts of {result['tokens']:,} tokens, {result['ranks']} ranks"
    before = sum(result["seconds"].values())
    parts = {**result["seconds"], "between two steps": result["now"], "in 0.1.0": before}
    rows = [(part, f"{1000 * seconds:,.0f}") for part, seconds in parts.items()]
    ratio = f"{before / result['now']:.1f} times less"
    return "\n".join(
        [f"{size}: {ratio}; {report.conditions(result)}", "", *report.markdown(("part", "CPU ms"), rows), ""]
    )


@exit_codes
def main() -> int:
    """Command line of the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each completion")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    limit_threads(1)
    result = measure(options.groups, options.tokens, options.ranks, options.rounds)
    report.write(result, table, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
