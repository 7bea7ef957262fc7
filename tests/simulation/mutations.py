"""`python -m tests.simulation.mutations`: which planted defects the simulation finds, and with which seed.

A defect is a branch that is always taken or never taken, chosen by a seed among the branches of the modules below, or
one of DEFECTS: defects that audits found, planted again.
"""

import argparse
import ast
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MODULES = (
    "ledger/ledger.py", "ledger/pool.py", "ledger/leases.py", "ledger/tokens.py", "run/history.py",
    "run/compaction.py", "data/compaction.py", "roles/trainer/committer.py", "roles/hub/recovery.py",
)  # fmt: skip


class Edit(NamedTuple):
    """A replacement of a text that occurs once in a module of pipelinerl_core, or in the simulated store."""

    module: str
    old: str
    new: str


_NO_DEFENCE = (
    Edit("run/history.py", "    missing = next((step for step in range(newest + 1) if step not in steps), None)\n",
         "    missing = None\n"),
    Edit("run/history.py", "    if missing is not None and missing > max(listed, default=-1):\n", "    if False:\n"),
    Edit("run/history.py", "default=-1) for _ in range(2))", "default=-1) for _ in range(1))"),
)  # fmt: skip
_FAILED_LISTING = Edit(
    "tests/simulation/store.py", '        self._begin("list", prefix)\n',
    '        try:\n            self._begin("list", prefix)\n        except StoreUnavailable:\n'
    "            return []\n",
)  # fmt: skip
DEFECTS: dict[str, tuple[Edit, ...]] = {
    "a failed listing is an empty listing (audit, 1)": (_FAILED_LISTING, *_NO_DEFENCE),
    "a takeover believes one listing (audit, 1c)": _NO_DEFENCE,
    "compaction deletes segments whose rows are in no object (audit, 5)": (
        Edit("data/compaction.py", "                unwritten |= {(fate.group_id, fate.attempt) for commit in part"
             " for fate in commit.fates}\n", "                pass\n"),
        Edit("data/compaction.py", "read_verified(store, entry.name, entry)", "store.get(entry.name)"),
    ),
    "the hub's start ends with a segment that is deleted meanwhile (audit, 5)": (
        Edit("roles/hub/recovery.py", "        except MissingObject as error:",
             "        except ZeroDivisionError as error:"),
    ),
    "the commits are listed before the claim (ADR 19)": (
        Edit("run/history.py", '    through = max(max(counted_commit_keys(store), default=-1) for _ in range(2))\n'
             '    claim = take_epoch(store, "trainer", through, arithmetic, is_claim=True)\n'
             "    keys = list_commits(store).keys()\n",
             '    through = max(max(counted_commit_keys(store), default=-1) for _ in range(2))\n'
             "    keys = list_commits(store).keys()\n"
             '    claim = take_epoch(store, "trainer", through, arithmetic, is_claim=True)\n'),
    ),
    "no check for a newer trainer after the write of a commit (ADR 19)": (
        Edit("run/history.py", "    # A trainer that claimed its epoch between check and write may have listed the"
             " commits before the write.\n    check_not_fenced(store, epoch)\n", ""),
    ),
    "no check for a newer trainer at all (ADR 19)": (
        Edit("run/history.py", "        if newer.role == epoch.role:\n", "        if False:\n"),
    ),
    "epoch numbers have two owners (ADR 19)": (
        Edit("run/history.py", ".encode(), create_only=True)", ".encode())"),
    ),
    "a trainer announces a commit before it writes it": (
        Edit("roles/trainer/committer.py", "        write_commit(self._store, self._epoch, commit)\n"
             "        self.newest = commit\n        self.counted[step] = commit_key(step, self._epoch.epoch)\n"
             "        self._announce(commit, is_last=is_last)\n",
             "        self.newest = commit\n        self.counted[step] = commit_key(step, self._epoch.epoch)\n"
             "        self._announce(commit, is_last=is_last)\n"
             "        write_commit(self._store, self._epoch, commit)\n"),
    ),
    "tokens are recorded with the last version of their rollout": (
        Edit("rollouts/runner.py", "            weight_spans=completion.weight_spans,\n",
             "            weight_spans=tuple(span._replace(version=completion.weight_spans[-1].version)"
             " for span in completion.weight_spans),\n"),
    ),
    "a group with one stale token is dropped although its tokens are masked": (
        Edit("ledger/order.py", '    if stale == "drop" and any(', "    if any("),
    ),
    "the filter takes groups of different rewards": (
        Edit("ledger/order.py", "    return config.rollouts.filter_zero_variance and len(set(summary.rewards)) == 1",
             "    return config.rollouts.filter_zero_variance and summary.ref.group_id % 3 == 0"),
    ),
    "rollouts are not continued": (
        Edit("roles/actor/log.py", "        if not lease.holders:", "        if True:"),
    ),
    "no version between the first and the last is evaluated": (
        Edit("run/evaluations.py", "if step > newest and config.evaluates(step)", "if False"),
        Edit("tests/simulation/run.py", '"on": other.choice(["own", "actors"])', '"on": "own"'),
    ),
    "rows of several groups of a write are those of the first": (
        Edit("roles/hub/arrivals.py", "            start += ref.num_rollouts\n", ""),
    ),
    "weights.keep is ignored": (
        Edit("run/versions.py", "    return {*ends, *versions[-keep:], *kept[-keep:], *due[-_KEPT_DUE:]}\n",
             "    return {*ends, *versions[-1:]}\n"),
    ),
    "leases never expire": (
        Edit("ledger/leases.py", "        if now <= self._none_late_until:\n", "        if True:\n"),
    ),
    "arrivals do not take the lock of the hub": (
        Edit("roles/hub/arrivals.py", "        with self._changed:\n            actor",
             "        if True:\n            actor"),
    ),
    "the memory of the hub has no bound": (
        Edit("roles/hub/rows.py", "        while self._sealed and (", "        while False and ("),
        Edit("roles/hub/rows.py", "        return (self._budget_bytes - self.used_bytes) /", "        return 1e9 /"),
    ),
    "a commit does not tell the hub the tokens of its groups (seed 22)": (
        Edit("ledger/ledger.py", "            pool.decide_by_commit(record, step)\n        recorded",
             "            pool.decide_by_commit(record.model_copy(update={'num_tokens': 0}), step)\n"
             "        recorded"),
    ),
}  # fmt: skip


def branches(module: str) -> list[ast.expr]:
    """The conditions of a module, in the order of its text."""
    tree = ast.parse((ROOT / "pipelinerl_core" / module).read_text())
    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.While | ast.IfExp)]
    tests += [test for node in ast.walk(tree) if isinstance(node, ast.comprehension) for test in node.ifs]
    return sorted(tests, key=lambda test: (test.lineno, test.col_offset))


def chosen_branches(number: int, seed: int) -> Iterator[tuple[str, tuple[Edit, ...]]]:
    """(description, edits) of branches that are always or never taken."""
    rng = random.Random(seed)
    everything = [(module, test) for module in MODULES for test in branches(module)]
    for module, test in rng.sample(everything, number):
        text = (ROOT / "pipelinerl_core" / module).read_text()
        lines = text.splitlines(keepends=True)
        starts = [sum(map(len, lines[: line - 1])) for line in (test.lineno, test.end_lineno or 0)]
        begin, end = starts[0] + test.col_offset, starts[1] + (test.end_col_offset or 0)
        value = rng.choice(["True", "False"])
        condition = " ".join(text[begin:end].split())
        yield (
            f"{module}:{test.lineno} `{condition}` is {value}",
            (Edit(module, text, text[:begin] + value + text[end:]),),
        )


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A copy of the project, as links; it keeps the compiled modules that no defect changes."""
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("pipelinerl_core", "tests"):
            shutil.copytree(ROOT / name, Path(temporary, name), copy_function=os.symlink,
                            ignore=shutil.ignore_patterns("__pycache__", "golden"))  # fmt: skip
        yield Path(temporary)


@contextlib.contextmanager
def planted(copy: Path, edits: tuple[Edit, ...]) -> Iterator[None]:
    """Inside, the copy has a defect."""
    paths = [
        copy / (edit.module if edit.module.startswith("tests/") else f"pipelinerl_core/{edit.module}")
        for edit in edits
    ]
    links = {path: path.readlink() for path in paths}
    try:
        for path, edit in zip(paths, edits, strict=True):
            text = path.read_text()
            assert text.count(edit.old) == 1, edit
            path.unlink()
            path.write_text(text.replace(edit.old, edit.new))
        yield
    finally:
        for path, original in links.items():
            path.unlink(missing_ok=True)
            path.symlink_to(original)


def first_failure(copy: Path, num_seeds: int, seconds: float) -> str:
    """Runs seeds 0, 1, ... of a copy of the project until a run fails."""
    command = [sys.executable, "-m", "tests.simulation", "--seeds", str(num_seeds), "--until-failure"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=copy, env=environment, text=True, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # fmt: skip

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.start()
    last = "fewer than 100 runs"
    assert process.stdout is not None
    for line in process.stdout:
        last = line.strip()[:160]
        if line.startswith(("seed ", "never: ")):  # the runs that have begun may take long
            break
    timer.cancel()
    end()
    process.wait()
    return last


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--branches", type=int, default=20, help="number of branches")
    parser.add_argument("--seed", type=int, default=5, help="which branches")
    parser.add_argument("--seeds", type=int, default=20_000, help="runs with each defect, at most")
    parser.add_argument("--seconds", type=float, default=3600.0, help="time for each defect, at most")
    parser.add_argument("--only", default="", help="defects whose description contains this text")
    chosen = parser.parse_args()
    with copied() as copy:
        for name, edits in [*DEFECTS.items(), *chosen_branches(chosen.branches, chosen.seed)]:
            if chosen.only in name:
                begun = time.monotonic()
                with planted(copy, edits):
                    result = first_failure(copy, chosen.seeds, chosen.seconds)
                sys.stdout.write(f"{name}: {result} ({time.monotonic() - begun:.0f} s)\n")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
