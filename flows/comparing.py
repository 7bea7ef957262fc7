"""What `compare` and `bench learning` share, from options to the result; Prefect is imported when all is checked."""

from collections.abc import Sequence
from typing import Any

from flows.console import answer
from pipelinerl_core.config.arm import Arm, parse_arm, read_arms
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.tracking.comparison_table import markdown
from tasks.checks import check_all
from tasks.comparison import Wanted, plan_comparison
from tasks.comparison_results import HTML_KEY
from tasks.runs import root_url


def split_source(source: str, overrides: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """(preset, overrides) of the arguments, of which the first may be a setting already."""
    return ("quickstart", (source, *overrides)) if "=" in source else (source, tuple(overrides))


def arms_of(texts: Sequence[str], path: str) -> tuple[Arm, ...]:
    """The arms of a file, then those of --arm."""
    return (*(read_arms(path) if path else ()), *map(parse_arm, texts))


def parse_seeds(text: str) -> tuple[int, ...]:
    """Example: "0,1,2"."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--seeds {text}: give whole numbers with commas, for example --seeds 0,1,2") from None


def carry_out(wanted: Wanted, root: str) -> dict[str, Any]:
    """Check everything that can be checked before anything starts, then run the flow; returns comparison.json."""
    plan = plan_comparison(wanted)
    first = plan.runs[0].config
    check_all(first, root_url(root))
    from flows.launch import run_comparison  # noqa: PLC0415 (imports Prefect, which takes seconds)

    arguments = {
        "arms": {arm.name: list(arm.overrides) for arm in wanted.arms},
        "preset": wanted.source,
        "overrides": wanted.overrides,
        "seeds": list(wanted.seeds),
        "target": wanted.target,
        "margin": wanted.margin,
        "budget_minutes": wanted.budget_minutes,
        "reference": wanted.reference,
        "name": wanted.name,
        "root": root,
    }
    return run_comparison(first, arguments)


def show(document: dict[str, Any], *, as_json: bool) -> None:
    """The result on stdout."""
    page = f"{document['url'].removeprefix('file://')}/{HTML_KEY}"
    answer(document, [markdown(document), "", f"page: {page}"], as_json=as_json)
