"""Models of runs in MLflow: which version is the champion, and that MLflow loads the weights of the run.

The runs are written object by object, with the weights of the quickstart's starting model; MLflow is a database file.
"""

import json
from dataclasses import replace

import mlflow
import pytest
import torch
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import _validate_logged_model_name
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelinerl.flows.cli.promote import promote as command
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.report.rollout_traces import log_traces
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.history import take_epoch
from pipelinerl_core.run.records import EvalRecord, eval_key
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.telemetry.datasets import run_datasets
from pipelinerl_core.telemetry.mlflow import MlflowTracker, tracking_uri
from pipelinerl_core.tools.export import export
from pipelinerl_core.tools.promote import (
    _NOT_IN_NAMES,
    HELD_OUT_TAG,
    RunModels,
    better,
    describe,
    mlflow_of,
    open_mlflow,
    promote,
)
from pipelinerl_core.weights.publish import WeightPublisher
from tests.builders import put_commit, put_run
from tests.models import publish
from tests.synthetic_run import put_record, text_of_ids
from tests.unit.report.test_rollout_traces import rollout_with_tool

NAME = "sums"
PROMPT = "3+4+8="


def figures(accuracy, low, high, measure="m"):
    return {"accuracy": accuracy, "low": low, "high": high, "num_prompts": 100, "measure": measure}


def test_a_better_model_has_an_interval_of_the_difference_above_0():
    champion = figures(0.50, 0.47, 0.53)
    # Difference 0.06; its lower half is the root of 0.04 ** 2 + 0.03 ** 2 = 0.05.
    assert better(figures(0.56, 0.52, 0.60), champion) == (
        True,
        "held-out accuracy 0.560 against 0.500, the 95 % interval of the difference begins at +0.010",
    )
    assert not better(figures(0.54, 0.50, 0.58), champion)[0], "0.04 - 0.05 < 0"
    assert not better(figures(0.40, 0.37, 0.43), champion)[0]


def test_models_with_other_prompts_or_without_an_interval_are_not_compared():
    own = figures(0.9, 0.8, 1.0)
    for other in (figures(0.1, 0.0, 0.2, measure="other"), {}, figures(0.1, None, None)):
        assert better(own, other) == (False, "not comparable: other held-out prompts, reward or sampling")
    assert better(figures(0.9, None, None), own) == (False, "no held-out accuracy with an interval")
    assert better({}, own)[0] is False


class World:
    """Runs of one root, in one MLflow database."""

    def __init__(self, root, model):
        self.root, self.model, self.uri = root, model, tracking_uri("", str(root))
        self.client = None

    def run(self, name, accuracies):
        """A run with one durable version per held-out accuracy of 100 prompts, as at the end of its train flow."""
        settings = [f"model.path={self.model}", f"trainer.steps={len(accuracies) - 1}", "eval.num_prompts=100"]
        config = load_config("quickstart", [*settings, f"tracking.register_as={NAME}"])
        store = open_store(f"file://{self.root}/{name}")
        tracker = MlflowTracker(self.uri, "pipelinerl", name, datasets=run_datasets(config))
        put_run(store, run_id=name, config=config, mlflow_uri=self.uri, mlflow_run_id=tracker.run_id)
        epoch = take_epoch(store, "trainer", -1)
        publisher = WeightPublisher(store, run_id=name, epoch=epoch.epoch, use_shm=False)
        weights = load_file(self.model / "model.safetensors")
        for step, accuracy in enumerate(accuracies):
            manifest = publish(publisher, step, weights, durable=True)
            put_commit(store, step, epoch.epoch, run_id=name, manifest=manifest, weights_digest=f"{name}{step}")
            put_record(store, eval_key(step), EvalRecord(
                version=step, accuracy=accuracy, low=accuracy - 0.05, high=accuracy + 0.05, num_prompts=100,
                mean_tokens=5.0, errors=0, seconds=1.0, finished_at=1.75e9 + step,
            ))  # fmt: skip
        end(store.url)
        tracker.close()
        self.client = open_mlflow(self.uri)
        return store.url


def end(url):
    """What the train flow does at its end."""
    models = models_of(open_run(url))
    models.log_ends()
    log_traces(models.uri, models.mlflow_run, [rollout_with_tool()], text_of_ids)


def models_of(run):
    follower = RunFollower(run.store)
    follower.refresh()
    return RunModels(run, follower)


@pytest.fixture(scope="module")
def world(tmp_path_factory, prepared_model):
    return World(tmp_path_factory.mktemp("runs"), prepared_model)


@pytest.fixture(scope="module")
def runs(world):
    """URLs of a run, and of a worse run that ended after it."""
    return world.run("good", [0.2, 0.6, 0.5]), world.run("bad", [0.2, 0.3])


def champion(world):
    return [(entry["version"], entry["origin"]["run_id"], entry["origin"]["step"])
            for entry in describe(world.client, NAME) if "champion" in entry["aliases"]]  # fmt: skip


@pytest.mark.slow
def test_a_worse_run_does_not_replace_the_champion(world, runs):
    assert champion(world) == [("1", "good", "1")]
    bad, good = describe(world.client, NAME)
    assert (bad["origin"]["run_id"], bad["aliases"]) == ("bad", [])
    assert bad["note"] == (
        "not champion: held-out accuracy 0.300 against 0.600, the 95 % interval of the difference begins at -0.371 "
        "(version 1)"
    )
    assert good["note"] == "champion: no champion before"
    assert good["origin"]["weights_digest"] == "good1"
    assert good["origin"]["run_url"] == runs[0]


@pytest.mark.slow
def test_the_run_has_its_best_and_its_last_version_with_metrics_dataset_and_a_trace(world, runs):
    client = world.client
    experiment = client.get_experiment_by_name("pipelinerl").experiment_id
    models = {model.name: model for model in client.search_logged_models([experiment])}
    assert {name: "mlflow.model.isExternal" in model.tags for name, model in models.items()} == {
        "good-v1": False, "good-v2": True, "bad-v1": False
    }  # fmt: skip
    best = models["good-v1"]
    (dataset,) = (note for note in run_datasets(open_run(runs[0]).config) if note.context == "eval")
    assert {(metric.key, metric.value, metric.dataset_digest) for metric in best.metrics} >= {
        ("eval/accuracy", 0.6, dataset.digest)
    }
    mlflow_run = client.get_run(best.source_run_id)
    assert {(output.model_id, output.step) for output in mlflow_run.outputs.model_outputs} == {
        (best.model_id, 1),
        (models["good-v2"].model_id, 2),
    }
    assert mlflow_run.data.tags.items() >= {"pipelinerl.best": "good-v1", "pipelinerl.last": "good-v2"}.items()
    (trace,) = client.search_traces(locations=[experiment], run_id=best.source_run_id)
    assert [span.name for span in trace.data.spans] == ["rollout", "turn 1", "environment", "turn 2", "reward"]
    assert (trace.data.spans[1].inputs, trace.data.spans[1].outputs) == ("Q", "call")
    assert trace.data.spans[0].attributes["versions"] == [3, 4]


@pytest.mark.slow
def test_the_end_of_the_run_may_be_repeated(world, runs):
    before = describe(world.client, NAME)
    end(runs[0])
    assert describe(world.client, NAME) == before


@pytest.mark.filterwarnings("ignore:.*Any type hint:UserWarning")  # when mlflow.pyfunc is imported
@pytest.mark.slow
def test_mlflow_loads_the_weights_and_its_greedy_tokens_are_those_of_the_export(world, runs, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", world.uri)
    export(runs[0], tmp_path / "export", "1")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    expected = model.generate(prompt, do_sample=False, max_new_tokens=20)[0, prompt.shape[1] :]
    loaded = mlflow.transformers.load_model(f"models:/{NAME}@champion")
    tokens = loaded(PROMPT, do_sample=False, max_new_tokens=20, return_tensors=True)[0]["generated_token_ids"]
    assert torch.equal(torch.tensor(tokens[prompt.shape[1] :]), expected)
    text = mlflow.pyfunc.load_model(f"models:/{NAME}@champion", model_config={"max_new_tokens": 20})
    assert text.predict([PROMPT]) == [tokenizer.decode(expected, skip_special_tokens=True)]


@pytest.mark.slow
def test_promote_moves_the_alias_and_rollback_moves_it_back(world, runs, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", world.uri)
    assert champion(world) == [("1", "good", "1")]
    command(runs[1], "last")  # its name is tracking.register_as
    assert capsys.readouterr().out.startswith("sums version 2: sums@champion\n  run       bad at ")
    assert champion(world) == [("2", "bad", "1")]
    assert describe(world.client, NAME)[0]["note"] == "champion: set by `pipelinerl promote`; before: version 1"
    command(name=NAME, rollback=True, as_json=True)
    entries = json.loads(capsys.readouterr().out)
    assert champion(world) == [("1", "good", "1")]
    assert (entries[0]["version"], entries[0]["note"]) == (
        "2", "champion was rolled back to version 1"
    )  # fmt: skip
    with pytest.raises(ConfigError, match="sums@champion named no other version before"):
        command(name=NAME, rollback=True)
    command(runs[0], "best", alias="serving")
    assert "sums version 1: sums@champion: sums@serving\n" in capsys.readouterr().out


@pytest.mark.slow
def test_wrong_versions_names_and_aliases_are_refused(world, runs):
    run = open_run(runs[0])
    with pytest.raises(ConfigError, match="good has no version '9'; the newest is 2"):
        promote(run, "9", NAME, "champion")
    for values in ({"name": ""}, {"name": "a/b"}, {"name": NAME, "alias": "v3"}, {"name": NAME, "alias": "latest"}):
        with pytest.raises(ConfigError, match=r"--name|--alias"):
            command(**values)
    with pytest.raises(ConfigError, match="no version of a registered model other"):
        describe(world.client, "other")
    with pytest.raises(ConfigError, match="there is no MLflow at"):
        open_mlflow("sqlite:////nowhere/mlflow.db")


@pytest.mark.slow
def test_another_sampling_is_another_measure(world, runs):
    run = open_run(runs[0])

    def other(section, **changes):
        own = getattr(run.config, section).model_copy(update=changes)
        return replace(run, config=run.config.model_copy(update={section: own}))

    as_training = other("eval", max_tokens=run.config.rollouts.max_tokens)
    variants = [
        (run, 1), (run, 2), (as_training, 2), (other("eval", max_tokens=7), 2), (other("rollouts", max_tokens=7), 2),
        (other("reward", weights={"right": 2.0}), 2), (run, 2),
    ]  # fmt: skip
    measures = [json.loads(models_of(own).log(step).tags[HELD_OUT_TAG])["measure"] for own, step in variants]
    assert measures[0] == measures[1] == measures[2] == measures[6]
    assert measures[3] == measures[4]  # of the same limit
    assert len(set(measures)) == 3


@pytest.mark.slow
def test_the_mlflow_of_a_copied_run_is_the_database_of_its_root_or_the_server_of_its_record(world, runs):
    run = open_run(runs[0])
    for recorded, expected in (("sqlite:////elsewhere/mlflow.db", world.uri), ("http://server:5000",) * 2):
        assert mlflow_of(replace(run, record=run.record.model_copy(update={"mlflow_uri": recorded}))) == expected


@pytest.mark.slow
def test_an_evaluation_on_fewer_prompts_is_no_challenger_and_a_deleted_model_has_no_origin(world, runs):
    before = describe(world.client, NAME)
    few = {"accuracy": 0.9, "low": 0.85, "high": 0.95, "num_prompts": 10}
    values = {"mean_tokens": 5.0, "errors": 0, "seconds": 1.0, "finished_at": 1.75e9}
    put_record(open_store(runs[1]), eval_key(0), EvalRecord(version=0, **few, **values))
    end(runs[1])
    assert describe(world.client, NAME) == before
    models = [models_of(open_run(runs[1])).log(step) for step in (0, 1)]
    measures = {json.loads(model.tags[HELD_OUT_TAG])["measure"] for model in models}
    assert len(measures) == 2
    world.client.delete_logged_model(models[1].model_id)
    entry = describe(world.client, NAME)[0]
    assert (entry["version"], entry["origin"], entry["held_out"]) == ("2", {}, {})


def test_the_id_of_a_run_of_a_sweep_becomes_a_name_that_mlflow_takes():
    run_id = "learner.lr-1e-3-s0-bd28957b"
    with pytest.raises(MlflowException):
        _validate_logged_model_name(run_id)
    _validate_logged_model_name(_NOT_IN_NAMES.sub("-", run_id))
