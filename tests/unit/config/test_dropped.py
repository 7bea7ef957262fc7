"""Keys that are gone: ignored in stored runs of an earlier version, refused in one line everywhere else."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl_core.config import RunConfig, known_keys, load_config, resume_config, stored_config
from pipelinerl_core.config.dropped import DROPPED
from pipelinerl_core.config.losses import GspoLoss, ReinforceLoss
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.report.advice import Evidence, advice
from pipelinerl_core.run.context import note_resume, open_run
from pipelinerl_core.run.records import RESUME_KEY, ResumeRecord
from pipelinerl_core.storage.object_store import open_store
from tests.builders import put_run
from tests.synthetic_run import put_record

ROOT = Path(__file__).parents[3]


def with_dropped(config: RunConfig) -> dict:
    """As an earlier version has stored it."""
    values = config.model_dump(mode="json")
    for key in DROPPED:
        section, _, name = key.partition(".")
        values[section][name] = True
    return values


def test_a_stored_configuration_is_read_without_them():
    config = load_config("quickstart")
    assert stored_config(with_dropped(config)) == config
    waited = Evidence(trainer_idle=0.4, actor_idle=0.1, delay_seconds=0.0, waits={"engine": 9.0}, spread=None)
    assert advice(waited, {}, with_dropped(config)) == advice(waited, {}, config.model_dump())
    assert advice(waited, {}, with_dropped(config))["advice"]


def test_any_other_unknown_key_of_a_stored_configuration_is_refused():
    with pytest.raises(ConfigError, match=r"placement\.hub_locale: no such key"):
        stored_config({"placement": {"hub_locale": True}})


def test_a_stored_run_and_its_resumes_are_opened_without_them(tmp_path):
    store = open_store(str(tmp_path))
    stored = with_dropped(load_config("quickstart"))
    put_run(store, code_version="0.1.0", config=stored)
    overrides = (*(f"{key}=false" for key in DROPPED), "trainer.pack_tokens=4096")
    put_record(store, RESUME_KEY, ResumeRecord(overrides=overrides, at=0.0))
    config = open_run(str(tmp_path)).config
    assert config == load_config("quickstart", ["trainer.pack_tokens=4096"])
    note_resume(store, ["placement.threads=2"])
    kept = ResumeRecord.model_validate_json(store.get(RESUME_KEY)).overrides
    assert kept == ("trainer.pack_tokens=4096", "placement.threads=2")


@pytest.mark.parametrize("key", DROPPED)
def test_an_override_of_one_is_refused_in_one_line(key):
    assert key not in known_keys()
    for load in (load_config, lambda _, overrides: resume_config(load_config("quickstart"), overrides)):
        with pytest.raises(ConfigError) as raised:
            load("quickstart", [f"{key}=true"])
        assert str(raised.value) == f"{key}: {DROPPED[key]}. Remove the key"


def test_the_command_line_and_a_file_end_with_exit_code_2(tmp_path):
    (tmp_path / "mine.toml").write_text("[placement]\nhub_local = true\n")
    for arguments in (["quickstart", "placement.hub_local=false"], [str(tmp_path / "mine.toml")]):
        command = [sys.executable, "-m", "pipelinerl.flows.cli", "train", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
        assert "placement.hub_local: dropped after 0.1.0: roles on the hub's host use Arrow Flight" in ended.stderr


def test_a_run_from_before_a_change_of_the_objective_keeps_its_objective():
    stored = load_config("quickstart", ["loss.kind=gspo"]).model_dump(mode="json")
    assert (stored_config(stored).loss.revision, stored_config(stored).loss.dual_clip) == (3, 3.0)
    stored["loss"] |= {"revision": 2, "clip_low": 3e-4, "clip_high": 4e-4}
    assert stored_config(stored).loss == GspoLoss(revision=2, clip_low=3e-4, clip_high=4e-4)
    del stored["loss"]["revision"], stored["loss"]["dual_clip"]
    assert (stored_config(stored).loss.revision, stored_config(stored).loss.dual_clip) == (1, 0.0)
    assert stored_config({}).loss == ReinforceLoss(revision=1)


@pytest.mark.parametrize("term", ["advantage=value", "kl_coefficient=0.1"])
def test_a_filter_that_is_refused_by_now_is_off_in_a_stored_run(term):
    stored = load_config("quickstart", [f"loss.{term}"]).model_dump(mode="json")
    stored["rollouts"]["filter_zero_variance"] = True
    assert not stored_config(stored).rollouts.filter_zero_variance
