"""Measure whether a study ranks arms as fresh runs do: rank correlation of held-out accuracy (docs/what-if.md).

Run: pipelinerl bench study [--seeds 0,1,2] [--root DIR] [--json] [KEY=VALUE ...]. For each seed: a recorded
quickstart, a study of ARMS, and a fresh run of every arm. An interrupted benchmark continues with the same root.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelinerl_core.bench import report
from pipelinerl_core.comparison.whatif.plan import RECORDED, parse_study_arm
from pipelinerl_core.errors import PipelineRLError

ARMS = (
    "learner.lr=6.7e-5",
    "learner.lr=6e-4",
    "loss.kind=ppo",
    "loss.kind=grpo",
    "loss.kind=cispo",
    "loss.kind=gspo",
    "learner.clip_norm=0.03",
    "learner.final_lr_share=1.0",
)
"""Among them a third and three times the learning rate of the preset."""
_RESAMPLES = 2000
_RUN_SECONDS = 3600.0


def main() -> None:
    """Print a table, or one JSON document with --json."""
    parser = argparse.ArgumentParser(prog="pipelinerl bench study", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2", help="seeds, separated by commas")
    parser.add_argument("--root", default="./runs-study", help="directory of the runs")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of every run")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    result = measure(seeds, Path(options.root), options.settings)
    report.write(result, table, as_json=options.json)


def measure(seeds: Sequence[int], root: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Accuracy of every arm in the studies and in fresh runs, per seed, and their rank correlation."""
    arms = {arm.name: arm.overrides for arm in map(parse_study_arm, ARMS)}
    studied: dict[str, list[float]] = {name: [] for name in (RECORDED, *arms)}
    fresh: dict[str, list[float]] = {name: [] for name in studied}
    held = dict.fromkeys(studied, 0)
    for seed in seeds:
        for name in studied:
            place = root / f"s{seed}" / name
            shared = (*settings, f"seed={seed}")
            fresh[name].append(_trained(place, (*shared, *arms.get(name, ())))["eval_last"])
        document = _study(root / f"s{seed}" / RECORDED)
        for name, one in document["arms"].items():
            studied[name].append(one["accuracy"][-1]["accuracy"])
            held[name] += one["limit"] is None
    names = list(studied)
    means = [np.array([np.mean(values[name]) for name in names]) for values in (studied, fresh)]
    low, high = bootstrap(*means)
    return {
        "seeds": list(seeds),
        "settings": list(settings),
        "arms": {
            name: {"settings": list(arms.get(name, ())), "studied": studied[name], "fresh": fresh[name],
                   "within_limit": held[name]}
            for name in names
        },
        "spearman": spearman(*means),
        "low": low,
        "high": high,
    }  # fmt: skip


def spearman(first_N: NDArray[np.float64], second_N: NDArray[np.float64]) -> float:
    """Rank correlation (Spearman 1904): Pearson's correlation of the ranks, mean ranks for ties; nan if all tie."""
    first_rank_N, second_rank_N = _ranks(first_N), _ranks(second_N)
    if np.ptp(first_rank_N) == 0 or np.ptp(second_rank_N) == 0:
        return float("nan")
    return float(np.corrcoef(first_rank_N, second_rank_N)[0, 1])


def bootstrap(first_N: NDArray[np.float64], second_N: NDArray[np.float64]) -> tuple[float, float]:
    """95 % percentile interval of `spearman` over resampled arms; resamples without spread are left out."""
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, len(first_N), len(first_N)) for _ in range(_RESAMPLES)]
    found = np.array([spearman(first_N[index], second_N[index]) for index in drawn])
    low, high = np.nanpercentile(found, [2.5, 97.5])
    return float(low), float(high)


def _ranks(values_N: NDArray[np.float64]) -> NDArray[np.float64]:
    below = (values_N[:, None] > values_N[None, :]).sum(axis=1)
    equal = (values_N[:, None] == values_N[None, :]).sum(axis=1)
    ranks: NDArray[np.float64] = below + (equal + 1) / 2
    return ranks


def _trained(place: Path, settings: Sequence[str]) -> Mapping[str, Any]:
    """The report of the run at `place`, trained or resumed if it has none."""
    known = sorted(place.glob("*/run.json"))
    done = place / "latest.json"
    reports = [path.parent / "report.json" for path in known]
    if reports and reports[0].exists() and done.exists():
        found: Mapping[str, Any] = json.loads(reports[0].read_text())
        return found
    place.mkdir(parents=True, exist_ok=True)
    return _pipelinerl(*(("resume", "latest") if known else ("train", "quickstart", *settings)), place=place)


def _study(place: Path) -> Mapping[str, Any]:
    flags = [text for arm in ARMS for text in ("--arm", arm)]
    return _pipelinerl("study", "latest", *flags, place=place)


def _pipelinerl(*arguments: str, place: Path) -> Mapping[str, Any]:
    command = [sys.executable, "-m", "pipelinerl.flows.cli", *arguments, "--root", str(place), "--json"]
    sys.stderr.write(f"{place}: {' '.join(arguments[:2])}\n")
    with (place / "bench.log").open("ab") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, timeout=_RUN_SECONDS, check=False)
    if done.returncode != 0:
        raise PipelineRLError(f"{' '.join(arguments)} ended with code {done.returncode}; see {place}/bench.log")
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


def table(result: Mapping[str, Any]) -> str:
    """The result as text."""
    num = len(result["seeds"])
    rows = [f"{'arm':<24} {'studied':>8} {'fresh':>8}  within its limit"]
    for name, one in result["arms"].items():
        studied, fresh = np.mean(one["studied"]), np.mean(one["fresh"])
        rows.append(f"{name:<24} {studied:8.3f} {fresh:8.3f}  {one['within_limit']} of {num}")
    interval = f"{result['low']:.2f} to {result['high']:.2f}, bootstrap over arms"
    return "\n".join([*rows, f"Spearman {result['spearman']:.2f} ({interval})"])


if __name__ == "__main__":
    main()
