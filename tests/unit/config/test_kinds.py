"""Each kind has traits and a builder, and no other code compares the name of a kind."""

import re
from pathlib import Path
from typing import get_args

import pytest

from pipelinerl_core.config.kinds import ENGINE_TRAITS, INSTALL, LEARNER_TRAITS, SCHEDULE_TRAITS, TRANSPORT_TRAITS
from pipelinerl_core.config.sections import EngineConfig, ScheduleConfig, WeightsConfig
from pipelinerl_core.config.training import LearnerConfig
from pipelinerl_core.engine.load import ENGINES
from pipelinerl_core.ledger.schedules import SCHEDULES
from pipelinerl_core.roles.trainer.learners import LEARNERS

ROOT = Path(__file__).parents[3]
SECTIONS = ((EngineConfig, ENGINE_TRAITS, ENGINES), (LearnerConfig, LEARNER_TRAITS, LEARNERS),
            (ScheduleConfig, SCHEDULE_TRAITS, SCHEDULES))  # fmt: skip
COMPARED = re.compile(
    r"(?:\b(?:engine|learner|schedule|prompts|loss)\.kind|\.transport|\.advantage)\s*"
    r"(?:==|!=|in\b|not in\b)\s*[(\[{\"']"
)
OWN_PLACE = "pipelinerl_core/config/losses.py"  # names the advantages that have traits


@pytest.mark.parametrize(
    ("section", "traits", "builders"), SECTIONS, ids=lambda value: getattr(value, "__name__", "")
)
def test_each_kind_has_traits_and_a_builder(section, traits, builders):
    kinds = get_args(section.model_fields["kind"].annotation)
    assert set(kinds) == set(traits) == set(builders)
    for kind in kinds:
        assert section(kind=kind).traits is traits[kind]
        package = getattr(traits[kind], "package", "")
        assert not package or f"kind={kind}" in INSTALL[package]


def test_each_transport_has_traits():
    assert set(get_args(WeightsConfig.model_fields["transport"].annotation)) == set(TRANSPORT_TRAITS)


def test_no_code_compares_the_name_of_a_kind():
    folders = (ROOT / name for name in ("pipelinerl_core", "flows", "tasks"))
    comparisons = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in folders
        for path in folder.rglob("*.py")
        if str(path.relative_to(ROOT)) != OWN_PLACE
        for line in path.read_text().splitlines()
        if COMPARED.search(line)
    ]
    assert comparisons == []
