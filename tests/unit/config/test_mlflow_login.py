"""The login of an MLflow URI: in MLflow's own variables, and nowhere else."""

import os

import pytest

from pipelinerl_core.comparison.plan import Wanted, plan_comparison
from pipelinerl_core.config.arm import Arm
from pipelinerl_core.config.mlflow_login import LOGIN_VARIABLES
from pipelinerl_core.config.sections import TrackingConfig
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.jobs import new_job
from pipelinerl_core.supervision.role_commands import role_environment


@pytest.fixture
def login(monkeypatch):
    """A function that returns, and forgets, the login of MLflow that this process has taken from a URI."""
    for name in LOGIN_VARIABLES:
        monkeypatch.setenv(name, "")

    def taken():
        values = tuple(os.environ[name] for name in LOGIN_VARIABLES)
        os.environ.update(dict.fromkeys(LOGIN_VARIABLES, ""))
        return values

    return taken


@pytest.mark.parametrize(
    ("given", "kept", "expected"),
    [
        ("http://bob:hunter2@mlflow:5000", "http://mlflow:5000", ("bob", "hunter2")),
        ("https://bob:a%40b:c/@d@mlflow/path", "https://mlflow/path", ("bob", "a@b:c/@d")),
        ("HTTP://bob@mlflow", "HTTP://mlflow", ("bob", "")),
        ("http://mlflow:5000", "http://mlflow:5000", ("", "")),
        ("postgresql://u:p@h/db", "postgresql://u:p@h/db", ("", "")),
        ("sqlite:////tmp/a@b.db", "sqlite:////tmp/a@b.db", ("", "")),
    ],
)
def test_the_login_of_a_server_is_in_no_configuration_and_no_override(given, kept, expected, login, monkeypatch):
    assert load_config("quickstart", [f"tracking.mlflow_uri={given}"]).tracking.mlflow_uri == kept
    assert login() == expected
    for text in (given, f'"{given}"'):
        assert new_job("quickstart", [f"tracking.mlflow_uri={text}", "seed=3"], "").overrides[1] == "seed=3"
        job = new_job("quickstart", [f"tracking.mlflow_uri={text}"], "")
        assert job.overrides == (f"tracking.mlflow_uri={kept}",)
        assert job.config.tracking.chosen_uri == kept
        assert login() == expected
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    assert TrackingConfig().chosen_uri == kept
    assert login() == expected


def test_a_comparison_keeps_no_login(login):
    setting = "tracking.mlflow_uri=http://bob:hunter2@mlflow"
    arms = (Arm("one", (setting,)), Arm("two", ("learner.lr=1e-5",)))
    plan = plan_comparison(Wanted(source="quickstart", arms=arms, overrides=(setting,)))
    assert "hunter2" not in repr(plan)
    assert login() == ("bob", "hunter2")


def test_roles_do_not_get_the_login(login):
    TrackingConfig(mlflow_uri="http://bob:hunter2@mlflow")
    assert "hunter2" not in role_environment(1, "token").values()
