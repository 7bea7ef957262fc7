"""Each kind has a section and a builder, and no other code compares the name of a kind."""

import re
from inspect import get_annotations
from pathlib import Path

import pytest

from pipelinerl_core.algo.losses import LOSSES
from pipelinerl_core.algo.losses.custom import custom
from pipelinerl_core.config.load import variants
from pipelinerl_core.engine.load import ENGINES
from pipelinerl_core.engine.support import SUPPORT
from pipelinerl_core.ledger.schedules import SCHEDULES
from pipelinerl_core.prompts.source import SOURCES
from pipelinerl_core.roles.trainer.learners import LEARNERS

ROOT = Path(__file__).parents[3]
BUILDERS = {
    "engine": ENGINES,
    "learner": LEARNERS,
    "schedule": SCHEDULES,
    "loss": {**LOSSES, "custom": custom},
    "prompts": SOURCES,
}
COMPARED = re.compile(
    r"(?:\b(?:engine|environment|learner|schedule|prompts|loss)\.kind|\.transport|\.advantage)\s*"
    r"(?:==|!=|in\b|not in\b)\s*[(\[{\"']"
)
OWN_PLACES = ("pipelinerl_core/config/losses.py", "pipelinerl_core/config/sections.py")  # advantages, transports


@pytest.mark.parametrize("section", BUILDERS)
def test_each_kind_has_a_builder_and_each_package_an_error(section):
    assert set(variants(section)) == set(BUILDERS[section])
    for kind, model in variants(section).items():
        package = getattr(model, "package", "")
        assert not package or f"{section}.kind={kind}" in model.install


def test_each_engine_can_be_tried_before_the_start():
    assert set(SUPPORT) == set(ENGINES)


@pytest.mark.parametrize("section", ["engine", "learner", "schedule"])
def test_a_kind_without_a_key_of_another_kind_has_it_as_a_trait(section):
    """Rules and memory sums read such a key of every kind."""
    kinds = variants(section)
    traits = {
        name
        for model in kinds.values()
        for name in get_annotations(model)
        if name not in model.model_fields
    }  # fmt: skip
    lacking = {(kind, name) for kind, model in kinds.items() for name in traits if not hasattr(model, name)
               and name not in model.model_fields}  # fmt: skip
    assert not lacking, "declare these as ClassVar in the section of the kind"


def test_no_code_compares_the_name_of_a_kind():
    folders = (ROOT / name for name in ("pipelinerl_core", "flows", "tasks"))
    comparisons = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in folders
        for path in folder.rglob("*.py")
        if str(path.relative_to(ROOT)) not in OWN_PLACES
        for line in path.read_text().splitlines()
        if COMPARED.search(line)
    ]
    assert comparisons == []
