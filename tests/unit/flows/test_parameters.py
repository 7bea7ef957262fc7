"""The form of the train flow: the same keys and bounds as the configuration."""

import re
from typing import get_args

import pytest
from prefect.utilities.schema_tools import validate as check_schema
from pydantic import ValidationError

from pipelinerl.flows.actor_flow import actor
from pipelinerl.flows.compare_flow import compare, compared_run
from pipelinerl.flows.evaluate_flow import evaluate
from pipelinerl.flows.parameters import KEYS, Settings
from pipelinerl.flows.replay_flow import replay
from pipelinerl.flows.sweep_flow import sweep
from pipelinerl.flows.train_flow import train
from pipelinerl.flows.trainer_flow import trainer
from pipelinerl_core.algo.losses import LOSSES
from pipelinerl_core.comparison.plan import plan_sweep
from pipelinerl_core.config.load import fields, known_keys, preset_names
from pipelinerl_core.engine.load import ENGINES
from pipelinerl_core.ledger.schedules import SCHEDULES
from pipelinerl_core.models.resolve import load_config

EXAMPLES = {
    "steps": 20, "seed": 3, "actors": 2, "placement": "work_pools", "engine": "vllm", "concurrency": 32,
    "schedule": "april", "max_lag": 6, "groups_per_step": 4, "group_size": 4, "max_tokens": 32, "learning_rate": 2e-4,
    "loss": "dapo", "model": "/models/mine", "data": "rows.jsonl", "reward": "my.py:score", "environment": "",
    "experiment": "study", "chat_template": True, "gpu": "H100", "trainer_ranks": 4, "lora_rank": 16, "eval_steps": 5,
    "name": "my run", "tags": "a,team:b", "notes": "why: x = 3", "owner": "alice",
}  # fmt: skip


def refused(parameters, schema):
    """Paths of the values that the server refuses for a deployment."""
    return [error.json_path for error in check_schema(parameters, schema)]


def field_of(key):
    """The configuration's own field of a dotted key."""
    return dict(fields())[key]


def bounds(field):
    """Of a field, or of the number in a field that is auto or a number."""
    number = next(
        (argument.__metadata__[0] for argument in get_args(field.annotation) if hasattr(argument, "__metadata__")),
        field,
    )
    return {type(rule).__name__: repr(rule) for rule in number.metadata}


@pytest.mark.parametrize(("name", "kinds"), [("loss", LOSSES), ("engine", ENGINES), ("schedule", SCHEDULES)])
def test_the_form_offers_every_kind(name, kinds):
    offered = Settings.model_json_schema()["properties"][name]
    assert (offered["type"], offered["enum"]) == ("string", [*kinds, None])


@pytest.mark.parametrize("name", [name for name in KEYS if not KEYS[name].endswith((".kind", "prompts.path"))])
def test_a_field_has_the_bounds_and_choices_of_its_key(name):
    ours, theirs = Settings.model_fields[name], field_of(KEYS[name])
    assert bounds(ours) == bounds(theirs) or name == "seed"  # the configuration takes any
    choices = get_args(ours.annotation)[0]
    if get_args(choices):
        assert set(get_args(choices)) == set(get_args(theirs.annotation))
    assert ours.description


def test_the_server_refuses_keys_and_presets_that_do_not_exist():
    def accepts(schema, text):
        return re.search(schema["pattern"], text) is not None

    for flow in (train, compare, sweep):
        preset, overrides = (flow.parameters.properties[name] for name in ("preset", "overrides"))
        assert all(accepts(preset, name) for name in (*preset_names(), "mine.toml", "/work/mine"))
        assert not accepts(preset, "quickstrat")
        for key in known_keys():
            assert accepts(overrides["items"], f"{key.replace('<name>', 'my-part')}=1")
        for right in ("environment.options.game=Hangman", "reward.weights.a=2", 'loss={kind = "grpo"}', "seed=3"):
            assert accepts(overrides["items"], right)
        for uri in ("http://mlflow:5000", "postgresql://bob@h/db"):
            assert accepts(overrides["items"], f"tracking.mlflow_uri={uri}")
        logins = ("tracking.mlflow_uri=http://bob:p/w@mlflow", 'tracking={mlflow_uri = "https://bob:@mlflow"}')
        for wrong in ("eval.every=0", "steps=3", "trainer.steps", "trainer.step=3", "trainers.steps=3", *logins):
            assert not accepts(overrides["items"], wrong)


def test_every_field_has_a_key_and_reaches_the_configuration():
    assert set(Settings.model_fields) == set(KEYS) == set(EXAMPLES)
    config = load_config("quickstart", Settings(**EXAMPLES).overrides())
    for name, value in EXAMPLES.items():
        reached = config
        for part in KEYS[name].split("."):
            reached = getattr(reached, part)
        assert reached == (tuple(value.split(",")) if name == "tags" else value), name
    assert Settings().overrides() == ()


def test_data_is_a_file_or_a_data_set_of_the_hub():
    assert load_config("quickstart", Settings(data="rows.parquet").overrides()).prompts.kind == "file"
    hub = load_config("quickstart", Settings(data="openai/gsm8k").overrides())
    assert (hub.prompts.kind, hub.prompts.path) == ("huggingface", "openai/gsm8k")


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"placement": "sometimes"}, {"stepz": 3}, {"learning_rate": 0}])
def test_bad_values_are_refused(wrong):
    with pytest.raises(ValidationError):
        Settings(**wrong)


FLOWS = [train, compare, sweep, compared_run, evaluate, actor, trainer, replay]


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_every_parameter_of_every_flow_has_a_description(flow):
    properties = flow.parameters.model_dump()["properties"]
    assert [name for name, field in properties.items() if not field.get("description")] == []


def test_the_form_shows_each_field_with_the_type_of_its_values():
    schema = train.parameters.model_dump()["definitions"]["Settings"]["properties"]
    assert schema["steps"] == {
        "type": "integer",
        "minimum": 1,
        "title": "Steps",
        "description": "Optimizer steps of the run.",
    }
    assert schema["schedule"]["enum"] == ["pipeline", "conventional", "april", None]
    assert not [name for name, field in schema.items() if "anyOf" in field or "default" in field]


def test_the_server_refuses_a_sweep_whose_values_or_limit_cannot_be():
    schema = sweep.parameters.model_dump()
    good = {"grid": ["learner.lr=1e-6,3e-6", "seed=0,1"], "limit": 2, "target": 0.5}
    assert refused(good, schema) == []
    wrong = {"grid": ["learner.lrs=1,2"], "limit": 0, "target": 1.5, "preset": "quickstrat"}
    assert sorted(refused({**good, **wrong}, schema)) == ["$.grid[0]", "$.limit", "$.preset", "$.target"]
    assert refused({**good, "grid": []}, schema) == ["$.grid"]
    login = ["tracking.mlflow_uri=http://bob:S3cret@mlflow"]
    assert refused({**good, "grid": [*login, "seed=0,1"]}, schema) == ["$.grid[0]"]
    assert refused({"arms": {"a": login, "b": ["seed=0"]}}, compare.parameters.model_dump()) == ["$.arms.a[0]"]


def test_the_server_accepts_the_parameters_of_a_run_of_a_sweep():
    run = plan_sweep("quickstart", ["learner.lr=1e-6,3e-6"]).runs[0]
    config = run.config.model_dump(mode="json")
    given = {"run_url": "file:///r", "config": config, "labels": {}, "target": 0.0, "rewards": []}
    assert refused(given, compared_run.parameters.model_dump()) == []
    assert compared_run.validate_parameters(given)["config"] == run.config
