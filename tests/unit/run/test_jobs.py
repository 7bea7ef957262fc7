"""What a train flow is handed: a configuration that is parsed, and nothing that is written yet."""

import pytest

from pipelinerl_core.errors import BrokenRecord, ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.context import note_resume, open_run
from pipelinerl_core.run.jobs import new_job, resume_job
from pipelinerl_core.run.locate import create_run, run_url
from pipelinerl_core.run.records import RESUME_KEY
from pipelinerl_core.storage.object_store import open_store
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
    note_resume(job.run.store, job.overrides)
    assert open_run(url).config == job.config


def test_a_resume_with_other_settings_is_refused(tmp_path, url):
    with pytest.raises(ConfigError, match="a resume can change only"):
        resume_job(url, ["trainer.steps=9"], str(tmp_path))


@pytest.mark.parametrize("damaged", ["epochs/000001.json", "commits/00000002"])
def test_a_resume_of_a_damaged_run_is_refused_before_anything_starts(tmp_path, damaged):
    store = open_store(run_url(str(tmp_path), "synthetic"))
    write_run(store, Shape(steps=2))
    key = next(key for key in store.list(damaged.partition("/")[0]) if key.startswith(damaged))
    store.put(key, b'{"cut off')
    with pytest.raises(BrokenRecord, match=key):
        resume_job(store.url, [], str(tmp_path))
