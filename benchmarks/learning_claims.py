"""The claims of `python -m benchmarks learning` about the schedules: ratios between named arms of a comparison.

`document` is comparison.json. A ratio is left out if one of its arms was not run.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pipelinerl_core.comparison.analysis import ratio, spread
from pipelinerl_core.comparison.table import ratio_text

PIPELINE, ONE_STEP, APRIL, SYNCHRONOUS = "pipeline", "conventional-1", "april", "synchronous"
_CONVENTIONAL = "conventional-"
_COSTS = ("step_seconds", "engine_cpu_seconds", "trainer_cpu_seconds")
_CORES = 2
"""Number of cores that the shared-cores bound assumes."""


def claims(document: Mapping[str, Any]) -> dict[str, Any]:
    """The name of the best conventional arm, and ratios, differences and shares as spreads over the seeds."""
    arms = document["arms"]
    best = best_conventional(arms)
    return {
        "best_conventional": best,
        "sooner_than_best_conventional": _ratio(arms, best, PIPELINE, "time_to_target_seconds"),
        "sooner_than_one_step_a_phase": _ratio(arms, ONE_STEP, PIPELINE, "time_to_target_seconds"),
        "rollouts_of_one_step_a_phase": _ratio(arms, PIPELINE, ONE_STEP, "rollouts_per_second"),
        "april_rollouts_of_synchronous": _ratio(arms, APRIL, SYNCHRONOUS, "rollouts_per_second"),
        "ess_less_than_best_conventional": _difference(arms, best, PIPELINE, "ess_mean"),
        "share_of_bound_own_cores": _share_of_bound(document, lambda engine, trainer: max(engine, trainer)),
        "share_of_bound_shared_cores": _share_of_bound(document, lambda engine, trainer: (engine + trainer) / _CORES),
    }


def best_conventional(arms: Mapping[str, Any]) -> str | None:
    """The conventional arm with the shortest mean time to the target among those that reached it with every seed."""
    times = {
        name: entry["time_to_target_seconds"]["mean"]
        for name, entry in arms.items()
        if name.startswith(_CONVENTIONAL) and None not in entry["time_to_target_seconds"]["by_seed"].values()
    }
    return min(times, key=lambda name: times[name]) if times else None


def claim_lines(document: Mapping[str, Any]) -> list[str]:
    """The claims as sentences; ratios without a value are left out."""
    claim_values = claims(document)
    target, best = document["target"], claim_values["best_conventional"]
    sentences = [
        (
            "sooner_than_best_conventional",
            f"pipeline reaches {target:g} {{}} times sooner than {best}, the best of them",
        ),
        ("sooner_than_one_step_a_phase", f"pipeline reaches {target:g} {{}} times sooner than {ONE_STEP}"),
        ("rollouts_of_one_step_a_phase", f"pipeline trains {{}} times the rollouts per second of {ONE_STEP}"),
        ("april_rollouts_of_synchronous", "april trains {} times the rollouts per second of its synchronous twin"),
    ]
    if best == ONE_STEP:
        del sentences[1]  # the same ratio
    lines = [text.format(ratio_text(claim_values[key])) for key, text in sentences if _known(claim_values[key])]
    lines += _bound_lines(claim_values)
    less = claim_values["ess_less_than_best_conventional"]
    if _known(less):
        lines.append(f"pipeline has a mean ESS {less['mean']:.3f} lower than {best}")
    return lines


def _bound_lines(claim_values: Mapping[str, Any]) -> list[str]:
    """Sentences that compare the pipeline's speed with upper bounds; emulated runs have no bound."""
    texts = {
        "share_of_bound_own_cores": "with one core per role, a step takes at least the longer of the two CPU times: "
        "pipeline reaches {} of that speed",
        "share_of_bound_shared_cores": f"on {_CORES} shared cores, a step takes at least the sum of the CPU times "
        f"divided by {_CORES}: pipeline reaches {{}} of that speed",
    }
    return [text.format(ratio_text(claim_values[key])) for key, text in texts.items() if _known(claim_values[key])]


def _share_of_bound(document: Mapping[str, Any], bound: Callable[[float, float], float]) -> dict[str, Any] | None:
    """Lower bound of the seconds per step of the pipeline, divided by the measured seconds, per seed."""
    entry = document["arms"].get(PIPELINE)
    if entry is None or entry["emulated"]:
        return None
    steps, engines, trainers = (entry[key]["by_seed"] for key in _COSTS)
    known = [seed for seed in steps if None not in (steps[seed], engines.get(seed), trainers.get(seed))]
    return spread({int(seed): bound(engines[seed], trainers[seed]) / steps[seed] for seed in known})


def _known(claim: Mapping[str, Any] | None) -> bool:
    return claim is not None and claim["mean"] is not None


def _ratio(arms: Mapping[str, Any], name: str | None, other: str, figure: str) -> dict[str, Any] | None:
    if name is None or name not in arms or other not in arms:
        return None
    return ratio(arms[name], arms[other], figure)


def _difference(arms: Mapping[str, Any], name: str | None, other: str, figure: str) -> dict[str, Any] | None:
    """name - other, per seed."""
    if name is None or name not in arms or other not in arms:
        return None
    left, right = arms[name][figure]["by_seed"], arms[other][figure]["by_seed"]
    return spread({int(seed): left[seed] - right[seed] for seed in left if None not in (left[seed], right.get(seed))})
