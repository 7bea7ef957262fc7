"""Schedules, or controls of the objective, compared: `compare` with arms/learning.toml or arms/controls.toml."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning_claims import claim_lines, claims
from benchmarks.run_peers import PEERS, own_arms, parse_peers, run_peers
from benchmarks.tuning import parse_rates, search_lines, tuned
from pipelinerl.flows.cli.comparing import carry_out
from pipelinerl.flows.cli.console import answer, exit_codes
from pipelinerl.flows.environment import set_defaults
from pipelinerl_core.comparison.figure import figure_title
from pipelinerl_core.comparison.plan import BUDGET_MINUTES, Plan, Wanted, parse_seeds, plan_comparison
from pipelinerl_core.comparison.results import SVG_KEY, Results
from pipelinerl_core.comparison.table import markdown
from pipelinerl_core.config.arm import Arm
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.storage.object_store import open_store

TARGETS = {"emulated": 0.45, "own-cores": 0.45, "shared": 0.5, "off-policy": 0.45}
"""Suite -> target accuracy, at which the learning curves of the suite are still steep."""
SHORT = "short"
CONTROLS = "off-policy"
"""The suite that compares the controls of the objective; the others compare schedules."""
SHORT_ARMS = ("pipeline", "conventional-1", "off", "ess-scaling")
RESULTS_PAGE = Path(__file__).resolve().parents[1] / "docs" / "results" / "schedules.md"


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark; prints a Markdown section, or comparison.json with the claims."""
    options = _parse(arguments)
    if options.write and not RESULTS_PAGE.is_file():
        raise ConfigError(f"--write: {RESULTS_PAGE} does not exist. Run the benchmark from a checkout")
    wanted = _wanted(options)
    peers = parse_peers(options.peers, _suite(options), options.overrides)
    if peers and options.suite == "emulated":
        raise ConfigError("--peers: other libraries run at real speed; --suite emulated does not. Set --suite shared")
    plan, tried = plan_tuned(wanted, options.rates, options.root)
    document = carry_out(plan, options.root)
    if peers:
        document = Results(plan, options.root, run_peers(peers, plan.wanted, options.root)).write([])
    document = {**document, "suite": options.suite, "claims": claims(document), "rates": tried}
    if options.write:
        _write(document)
    answer(document, [section(document)], as_json=options.json)


def plan_tuned(wanted: Wanted, rates: str, root: str) -> tuple[Plan, list[str]]:
    """The plan with every arm at its best learning rate of --rates, after the runs of the search, and what was tried.

    rates: empty: the plan as wanted, and no lines.
    """
    plan = plan_comparison(wanted)
    if not rates:
        return plan, []
    best, searches = tuned(wanted, parse_rates(rates), lambda search: carry_out(search, root))
    return plan_comparison(best), search_lines(searches)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks learning",
        description="Compare schedules by the time to the same held-out accuracy; with --suite off-policy, controls "
        "of the objective on data that is far off-policy.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of all arms")
    parser.add_argument("--suite", choices=[*TARGETS], default="emulated", help="default: %(default)s")
    parser.add_argument(
        "--short", action="store_true", help="two arms, one seed, a few steps; takes at most 5 minutes"
    )
    parser.add_argument("--arms", default="", help="names of the arms, separated by commas; default: all")
    parser.add_argument("--peers", default="", help=f"other libraries, separated by commas: {', '.join(PEERS)}")
    parser.add_argument("--seeds", default="", help="default: 0,1,2; with --short: 0")
    parser.add_argument(
        "--rates",
        default="",
        help="learning rates, separated by commas: every arm runs at the rate at which it reaches the target first, "
        "on a seed that is not reported; more rates are tried if the best is the lowest or the highest",
    )
    parser.add_argument("--target", type=float, help="held-out accuracy to reach; default: the target of the suite")
    parser.add_argument("--budget-minutes", type=float, default=BUDGET_MINUTES, help="default: %(default)g")
    parser.add_argument("--root", default="", help="path or URL below which runs are stored")
    parser.add_argument("--write", action="store_true", help="update docs/results/schedules.md and its figure")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args(arguments)


def _suite(options: argparse.Namespace) -> tuple[str, ...]:
    """Settings that all arms of the suite share."""
    suites = {arm.name: arm.overrides for arm in own_arms("suites")}
    return (*suites[options.suite], *(suites[SHORT] if options.short else ()))


def _wanted(options: argparse.Namespace) -> Wanted:
    suite = f"learning-{options.suite}" + (f"-{SHORT}" if options.short else "")
    return Wanted(
        source="quickstart",
        arms=_chosen(options),
        overrides=(*_suite(options), *options.overrides),
        seeds=parse_seeds(options.seeds or ("0" if options.short else "0,1,2")),
        target=TARGETS[options.suite] if options.target is None else options.target,
        budget_minutes=options.budget_minutes,
        name=suite,
    )


def _chosen(options: argparse.Namespace) -> tuple[Arm, ...]:
    """The arms of --arms, in the order of the file of the suite's arms."""
    arms = own_arms("controls" if options.suite == CONTROLS else "learning")
    known = [arm.name for arm in arms]
    short = [name for name in known if name in SHORT_ARMS]
    names = options.arms.split(",") if options.arms else short if options.short else known
    for name in names:
        if name not in known:
            raise ConfigError(f"--arms {name}: no such arm; there are {', '.join(known)}")
    return tuple(arm for arm in arms if arm.name in names)


def section(document: Mapping[str, Any]) -> str:
    """Heading, table and claims as Markdown."""
    lines = [f"* {line}" for line in [*claim_lines(document), *document["rates"]]]
    return "\n".join([f"### {figure_title(document)}", "", markdown(document), *(["", *lines] if lines else [])])


def _write(document: Mapping[str, Any]) -> None:
    """Replace the section between its marks in docs/results/schedules.md, and write the figure to docs/images/."""
    picture = RESULTS_PAGE.parents[1] / "images" / f"{document['name']}.svg"
    picture.write_bytes(open_store(document["url"]).get(SVG_KEY))
    text = f"{section(document)}\n\n![{figure_title(document)}](../images/{picture.name})"
    page = RESULTS_PAGE.read_text(encoding="utf-8")
    name = f"bench learning {document['suite']}"
    RESULTS_PAGE.write_text(replace_section(page, name, text), encoding="utf-8")


def replace_section(page: str, name: str, text: str) -> str:
    """The page with `text` between the comments <!-- name --> and <!-- /name -->, which are appended if missing."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, opening, rest = page.partition(start)
    _, is_closed, after = rest.partition(end)
    section = f"{start}\n{text.strip()}\n{end}"
    return before + section + after if opening and is_closed else f"{page.rstrip()}\n\n{section}\n"


if __name__ == "__main__":
    set_defaults()
    with exit_codes():
        main(sys.argv[1:])
