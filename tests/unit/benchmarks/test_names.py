"""`python -m benchmarks NAME`: names, arms and pages exist."""

import importlib.util

import pytest

from benchmarks import learning
from benchmarks.__main__ import NAMES, main
from benchmarks.run_peers import own_arms
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config


def test_every_name_is_a_module():
    assert len(NAMES) == 14
    assert all(importlib.util.find_spec(f"benchmarks.{name}") for name in NAMES)


def test_an_unknown_benchmark_is_refused(capsys):
    assert main(["engines"]) == 2
    assert "bench engines: no such benchmark; there are: age, checkpoint, demo" in capsys.readouterr().err


@pytest.mark.parametrize(("suite", "first"), [("emulated", "pipeline"), ("off-policy", "off, ess-scaling")])
def test_learning_names_its_arms_when_an_arm_is_unknown(suite, first):
    with pytest.raises(ConfigError, match=f"no such arm; there are {first}"):
        learning.main(["--suite", suite, "--arms", "pipelin"])


def test_the_results_page_of_the_learning_benchmark_exists():
    assert learning.RESULTS_PAGE.is_file()


def test_every_arm_is_a_valid_configuration_with_every_suite():
    suites = {arm.name: arm.overrides for arm in own_arms("suites")}
    assert suites.keys() == {"emulated", "own-cores", "shared", "off-policy", "short"}
    for arm in own_arms("learning"):
        for name in ("emulated", "own-cores", "shared"):
            assert load_config("quickstart", [*suites[name], *suites["short"], *arm.overrides]).schedule.max_lag == 8
    for arm in own_arms("controls"):
        assert load_config("quickstart", [*suites["off-policy"], *arm.overrides]).schedule.max_lag == 16
