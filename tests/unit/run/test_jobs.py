"""What a train flow is handed: a configuration that is parsed, and nothing that is written yet."""

import pytest

from pipelinerl_core.errors import BrokenRecord, ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.report.run_list import list_runs, run_table
from pipelinerl_core.run.context import note_resume, open_run, planned_steps
from pipelinerl_core.run.jobs import new_job, resume_job
from pipelinerl_core.run.locate import create_run, run_url
from pipelinerl_core.run.records import RESUME_KEY
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.training.optimizer import learning_rate
from tests.builders import put_commit, put_epoch
from tests.synthetic_run import Shape, write_run


@pytest.fixture
def url(tmp_path):
    created = run_url(str(tmp_path), "quickstart-1a2b3c4d")
    create_run(created, load_config("quickstart", ["trainer.steps=7"]), flow_run_id="f", mlflow=None)
    return created


def test_a_new_job_has_the_configuration_of_its_preset_and_overrides(tmp_path):
    job = new_job("quickstart", ["trainer.steps=7"], str(tmp_path))
    assert job.config == load_config("quickstart", ["trainer.steps=7"])
    assert (job.preset, job.overrides, job.root, job.run) == ("quickstart", ("trainer.steps=7",), str(tmp_path), None)


def test_a_resume_changes_the_run_only_at_its_start(tmp_path, url):
    job = resume_job("quickstart-1a2b3c4d", ["trainer.ranks=2"], str(tmp_path))
    assert (job.config.trainer.steps, job.config.trainer.ranks) == (7, 2)
    assert job.run is not None
    assert job.run.config == job.config
    assert not open_store(url).exists(RESUME_KEY)
    note_resume(job.run, job.overrides)
    assert open_run(url).config == job.config


ZERO, TORCH = ("learner.kind=deepspeed", "learner.zero_stage=2"), ("learner.kind=torch",)


@pytest.mark.parametrize(
    ("first", "resumes"),
    [((), (ZERO, TORCH, ("learner.kind=deepspeed",))), (ZERO, (TORCH, ("learner.kind=deepspeed",)))],
)
def test_resumes_with_other_learners_can_follow_each_other(tmp_path, first, resumes):
    created = run_url(str(tmp_path), "kinds")
    create_run(created, load_config("quickstart", first), flow_run_id="f", mlflow=None)
    for overrides in resumes:
        job = resume_job(created, overrides, str(tmp_path))
        note_resume(job.run, job.overrides)
        assert open_run(created).config == job.config


def test_a_resume_with_other_settings_is_refused(tmp_path, url):
    with pytest.raises(ConfigError, match="a resume can change only"):
        resume_job(url, ["seed=9"], str(tmp_path))


def test_more_steps_keep_the_learning_rates_of_the_steps_before_and_the_run_says_the_new_number(tmp_path, url):
    store = open_store(url)
    for step in range(8):
        put_commit(store, step, metrics={"reward/mean": 0.5})
    put_epoch(store, 1, adopted_through=-1)
    before = open_run(url).config
    job = resume_job(url, ["trainer.steps=20"], str(tmp_path))
    rates = [[learning_rate(step, config.learner, config.trainer.steps) for step in range(1, 8)]
             for config in (before, job.config)]  # fmt: skip
    assert rates[0] == rates[1]
    learner = job.config.learner
    assert learning_rate(20, learner, 20) == pytest.approx(learner.peak_lr * learner.final_lr_share)
    assert run_table(list_runs(open_store(str(tmp_path))))[1].split()[4] == "7/7"
    note_resume(job.run, job.overrides)
    assert (open_run(url).config, planned_steps(store, open_run(url).record)) == (job.config, 20)
    assert run_table(list_runs(open_store(str(tmp_path))))[1].split()[4] == "7/20"
    again = resume_job(url, ["trainer.steps=30"], str(tmp_path))
    assert again.config.learner.decay_steps == 7


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.steps=3", "step 7 is committed already. Set at least 7"),
        ("learner.decay_steps=3", "a resume cannot change the decay"),
    ],
)
def test_steps_that_the_run_cannot_have_are_refused(tmp_path, url, override, says):
    for step in range(8):
        put_commit(open_store(url), step)
    put_epoch(open_store(url), 1)
    with pytest.raises(ConfigError, match=says):
        resume_job(url, [override], str(tmp_path))


@pytest.mark.parametrize("value", ["20", "20.0", "2e1", "20 # more"])
def test_a_number_of_steps_is_stored_as_a_number(tmp_path, url, value):
    job = resume_job(url, [f"trainer.steps={value}"], str(tmp_path))
    assert job.overrides == ("trainer.steps=20",)
    note_resume(job.run, job.overrides)
    assert planned_steps(open_store(url), open_run(url).record) == 20


def test_more_steps_with_a_rate_of_0_are_refused(tmp_path):
    created = run_url(str(tmp_path), "zero")
    create_run(created, load_config("quickstart", ["learner.final_lr_share=0"]), flow_run_id="f", mlflow=None)
    put_commit(open_store(created), 0)
    put_commit(open_store(created), 1)
    put_epoch(open_store(created), 1)
    with pytest.raises(ConfigError, match="the learning rate is 0 after step"):
        resume_job(created, ["trainer.steps=999"], str(tmp_path))
    assert resume_job(created, ["trainer.steps=2"], str(tmp_path)).config.trainer.steps == 2


@pytest.mark.parametrize("damaged", ["epochs/000001.json", "commits/00000002"])
def test_a_resume_of_a_damaged_run_is_refused_before_anything_starts(tmp_path, damaged):
    store = open_store(run_url(str(tmp_path), "synthetic"))
    write_run(store, Shape(steps=2))
    key = next(key for key in store.list(damaged.partition("/")[0]) if key.startswith(damaged))
    store.put(key, b'{"cut off')
    with pytest.raises(BrokenRecord, match=key):
        resume_job(store.url, [], str(tmp_path))
