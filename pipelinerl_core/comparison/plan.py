"""The plan of a comparison or a sweep: its runs, their names, and which runs are complete.

A run is named <arm>-s<seed>-<digest of the run's configuration, of the user's files and of the library versions>, so
that the same command finds the same runs, and a changed setting, reward or row creates new runs.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from pipelinerl_core import __version__
from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.arm import Arm, distinct, grid_arms, parse_grid
from pipelinerl_core.config.mlflow_login import SETTING, without_logins
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.models.paths import builtin_recipe, seeded_path
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.evaluations import has_passed, next_to_evaluate
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.history import is_complete as is_trained
from pipelinerl_core.run.local_files import own_files
from pipelinerl_core.run.locate import plain_name, run_url
from pipelinerl_core.run.records import REPORT_JSON_KEY, RUN_KEY, EvalRecord, eval_key
from pipelinerl_core.run.user_code import local_code_digests
from pipelinerl_core.run.versions import durable_versions
from pipelinerl_core.storage.object_store import open_store

MARGIN = 0.07
"""A run is stopped when its training reward exceeds the target by MARGIN: held-out accuracy lags behind reward."""
_MORE = 0.05
"""A run that is below the target when it is stopped continues to a training reward that is higher by this."""
_NEVER = 1e9
"""A training reward that no run reaches; finite, because Prefect stores it as JSON."""
_MOST_NAME = 60
"""Characters of an arm in the name of a run."""
BUDGET_MINUTES = 50.0
# For runs to a target: durable weights every few steps, so that accuracy can be measured after the run; the user's
# settings override this.
_DEFAULTS = ("weights.durable_every=5", "weights.keep=0", "eval.subset=0", "eval.max_seconds=1800")
_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The arguments of a comparison or a sweep."""

    source: str
    """Preset or TOML file."""
    arms: tuple[Arm, ...]
    overrides: tuple[str, ...] = ()
    """Settings that apply to all arms."""
    seeds: tuple[int, ...] = (0, 1, 2)
    target: float = 0.5
    """Held-out accuracy; measures the time until each arm reaches the target. 0: each run ends at its last step."""
    margin: float = MARGIN
    budget_minutes: float = BUDGET_MINUTES
    reference: str = ""
    """Name of the arm that the other arms are compared with; empty: the first arm."""
    name: str = ""
    """Name of the comparison; empty: the name of the preset."""
    grid: tuple[str, ...] = ()
    """A sweep: the texts that the arms and the seeds come from."""
    limit: int = 1
    """Most runs at the same time."""
    deployment: str = ""
    """Prefect deployment that carries out each run; empty: the process of the flow run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One arm with one seed."""

    arm: str
    seed: int
    config: RunConfig
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A checked comparison."""

    wanted: Wanted
    name: str
    reference: str
    digest: str
    """Digest of arms, target, margin and reference. Seeds and budget are excluded: more seeds extend a comparison."""
    runs: tuple[PlannedRun, ...]
    """Ordered by seed, so that a budget leaves out whole seeds."""

    @property
    def key(self) -> str:
        """Key of the comparison below the root."""
        return f"comparisons/{self.name}-{self.digest}"

    def rewards_to_stop(self) -> list[float]:
        """Training rewards at which a run is stopped and evaluated, one after the other until it reaches the target.

        No run reaches the last of them: such a run continues to its last step. Empty without a target.
        """
        if not self.wanted.target:
            return []
        first = self.wanted.target + self.wanted.margin
        return [*(first + _MORE * more for more in range(math.ceil((1 - first) / _MORE))), _NEVER]


def plan_comparison(wanted: Wanted) -> Plan:
    """Resolve and check every configuration. Raises ConfigError for the first wrong value."""
    least = 1 if wanted.grid else 2
    arms = distinct((Arm(arm.name, without_logins(arm.overrides)) for arm in wanted.arms), least)
    wanted = replace(wanted, arms=arms, overrides=without_logins(wanted.overrides))
    _check_no_seed(wanted)
    reference = wanted.reference or arms[0].name
    if reference not in [arm.name for arm in arms]:
        raise ConfigError(f"--reference {reference}: no such arm; there are {', '.join(arm.name for arm in arms)}")
    if not 0 <= wanted.target <= 1:
        raise ConfigError(f"--target {wanted.target:g}: accuracy lies between 0 and 1. Set --target 0.5")
    if wanted.limit < 1:
        raise ConfigError(f"--limit {wanted.limit}: no run could start. Set --limit 1 or more")
    if not 0 <= wanted.margin <= 1:
        raise ConfigError(
            f"--margin {wanted.margin:g}: below 0, runs would stop below the target. Set --margin from 0 to 1"
        )
    if not wanted.budget_minutes > 0:
        raise ConfigError(f"--budget-minutes {wanted.budget_minutes:g}: not above 0. Set --budget-minutes 50")
    seeds = checked_seeds(wanted.seeds)
    configs = {arm.name: _resolved(wanted, arm) for arm in arms}
    contents = {arm: {**local_code_digests(config), **own_files(config)} for arm, config in configs.items()}
    runs = [_planned(arm, config, contents[arm], seed) for seed in seeds for arm, config in configs.items()]
    resolved = {arm: _planned(arm, config, contents[arm], 0).run_id for arm, config in configs.items()}
    known: dict[str, str] = {}
    for arm, run_id in resolved.items():
        if (other := known.setdefault(run_id.rpartition("-")[2], arm)) != arm:
            raise ConfigError(f"arms {other} and {arm} have the same settings. Remove one of them")
    return Plan(
        wanted=wanted,
        name=plain_name(wanted.name or wanted.source),
        reference=reference,
        digest=digest_of([resolved, wanted.target, wanted.margin, reference]),
        runs=tuple(runs),
    )


def _check_no_seed(wanted: Wanted) -> None:
    texts = [*wanted.overrides, *(text for arm in wanted.arms for text in arm.overrides)]
    if not wanted.grid and any(text.partition("=")[0].strip() == "seed" for text in texts):
        raise ConfigError("seed: every arm has the seeds of --seeds. Set --seeds, for example --seeds 0,1,2")


def plan_sweep(
    source: str,
    grid: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    target: float = 0.0,
    name: str = "",
    limit: int = 1,
    deployment: str = "",
) -> Plan:
    """The plan of a sweep. Raises ConfigError.

    grid: texts "section.key=v1,v2": an arm for each combination; "seed=0,1,2" are the seeds of every arm. overrides:
    further settings of all arms. The other arguments are those of `Wanted`.
    """
    if any(text.startswith(SETTING) and "," in text for text in grid):
        raise ConfigError("tracking.mlflow_uri: one server for all runs. Give one URL, without a comma")
    grid = without_logins(grid)
    keys = parse_grid(grid)
    if all(len(values) == 1 for _, values in keys):
        raise ConfigError("nothing to sweep: give several values, for example learner.lr=1e-6,3e-6 or seed=0,1,2")
    shared = [f"{key}={values[0]}" for key, values in keys if len(values) == 1]
    axes = [(key, values) for key, values in keys if len(values) > 1 and key != "seed"]
    seeds = dict(keys).get("seed") or [str(load_config(source, [*overrides, *shared]).seed)]
    wanted = Wanted(
        source=source,
        arms=grid_arms(axes) if axes else (Arm(plain_name(name or source), ()),),
        overrides=(*overrides, *shared),
        seeds=parse_seeds(",".join(seeds)),
        target=target,
        budget_minutes=math.inf,
        name=name,
        grid=tuple(grid),
        limit=limit,
        deployment=deployment,
    )
    return plan_comparison(wanted)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Example: "0,1,2". Raises ConfigError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"seeds {text}: set whole numbers separated by commas, for example 0,1,2") from None


def checked_seeds(seeds: Sequence[int]) -> Sequence[int]:
    """The seeds. Raises ConfigError if there is no seed, a duplicate, or a seed outside 0 to 2**63 - 1."""
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0 or max(seeds) >= 2**63:
        given = ",".join(map(str, seeds))
        raise ConfigError(f"seeds {given}: give different whole numbers from 0 to 2**63 - 1, for example 0,1,2")
    return seeds


def _resolved(wanted: Wanted, arm: Arm) -> RunConfig:
    """The configuration of an arm, before a seed is set."""
    try:
        defaults = _DEFAULTS if wanted.target else ()
        config = load_config(wanted.source, [*defaults, *wanted.overrides, *arm.overrides])
        builtin_recipe(config.model.path)  # raises ConfigError for an unknown built-in model
    except ConfigError as error:
        raise ConfigError(f"arm {arm.name}: {error}") from None
    if wanted.target and config.eval.num_prompts == 0:
        raise ConfigError(f"arm {arm.name}: eval.num_prompts=0, but arms are compared by accuracy. Set it to 1000")
    return config


def _planned(arm: str, config: RunConfig, contents: Mapping[str, str], seed: int) -> PlannedRun:
    """An arm with a seed; the seed decides prompts, sampling and the starting weights of a built-in model.

    contents: digests of the user's files.
    """
    model = config.model.model_copy(update={"path": seeded_path(config.model.path, seed)})
    config = config.model_copy(update={"model": model, "seed": seed})
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", arm).strip(".-")[:_MOST_NAME] or "arm"
    return PlannedRun(arm=arm, seed=seed, config=config, run_id=f"{name}-s{seed}-{_run_digest(config, contents)}")


def _run_digest(config: RunConfig, contents: Mapping[str, str]) -> str:
    """8 hex digits over the resolved configuration, the user's files and the versions of the numeric libraries."""
    versions = {"pipelinerl": __version__, **{name: version(name) for name in _LIBRARIES}}
    return digest_of([config.model_dump(mode="json"), versions, *([dict(contents)] if contents else [])])


def digest_of(values: Any) -> str:
    """8 hex digits over JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def accuracies_of(evals: Mapping[int, EvalRecord]) -> dict[int, float]:
    """Version -> held-out accuracy; without the versions whose completions all failed."""
    known = {step: record.known_accuracy for step, record in evals.items()}
    return {step: accuracy for step, accuracy in known.items() if accuracy is not None}


def is_complete(store: ObjectStore, config: RunConfig, target: float) -> bool:
    """Whether a run has a report, and either has reached the target or is trained to its last step and evaluated."""
    if not store.exists(RUN_KEY) or not store.exists(REPORT_JSON_KEY):
        return False
    steps = config.trainer.steps
    if not target:
        return is_trained(store, steps) and (config.eval.num_prompts == 0 or store.exists(eval_key(steps)))
    follower = RunFollower(store)
    follower.refresh()
    evaluated = {**dict.fromkeys(follower.evals, -math.inf), **accuracies_of(follower.evals)}
    if has_passed(evaluated, target):
        return True
    last, versions = follower.last, durable_versions(follower.commits.values())
    return last is not None and last.step >= steps and next_to_evaluate(versions, evaluated, target) is None


def incomplete_runs(plan: Plan, root: str) -> list[PlannedRun]:
    """The runs of the plan that are not complete, in order."""
    target = plan.wanted.target
    return [run for run in plan.runs if not is_complete(open_store(run_url(root, run.run_id)), run.config, target)]


def names_of(runs: Iterable[PlannedRun]) -> list[str]:
    """The distinct arms of runs, in order."""
    return list(dict.fromkeys(run.arm for run in runs))
