"""Cores of one's own: who gets which, and what is refused."""

import os

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.host import own_cores
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.supervision import checks


def config(*overrides):
    return load_config("quickstart", ["placement.cores=own", *overrides])


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {4, 5, 6, 7, 8, 9, 10, 11})


@pytest.mark.usefixtures("eight_cores")
def test_the_trainer_has_the_first_cores_and_actors_the_next():
    settings = config("placement.actors=3", "placement.threads=2")
    roles = ("trainer", "actor-0", "actor-1", "actor-2")
    assert [own_cores(settings, role) for role in roles] == [[4, 5], [6, 7], [8, 9], [10, 11]]


def test_shared_cores_are_nobodys():
    assert own_cores(load_config("quickstart"), "trainer") is None


@pytest.mark.usefixtures("eight_cores")
def test_too_few_cores_are_refused_with_the_arithmetic_before_anything_starts(tmp_path):
    settings = config("placement.actors=2", "placement.threads=3", "tracking.mlflow_uri=none")
    arithmetic = r"\(1 trainer \+ placement\.actors=2\) x placement\.threads=3 = 9 cores, but this process may use 8"
    with pytest.raises(ConfigError, match=arithmetic) as raised:
        checks.check_all(settings, f"file://{tmp_path}")
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match=arithmetic):
        own_cores(settings, "actor-1")


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize("name", ["actor-1", "anna", "actor-", "hub"])
def test_a_role_without_a_place_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"no cores for '{name}', only for trainer and actor-0"):
        own_cores(config(), name)


def test_own_cores_are_refused_on_a_system_without_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    with pytest.raises(ConfigError, match=r"only Linux can\. Set placement\.cores=shared"):
        own_cores(config(), "trainer")
