"""The file of reward.function is stored with the run, and the stored copy is the one that counts."""

import hashlib
import re
import subprocess

import pytest

from pipelinerl_core.errors import ChecksumMismatch, ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.context import TOKEN_VARIABLE, open_run
from pipelinerl_core.run.locate import create_run, run_url
from pipelinerl_core.run.mlflow_run import run_tags
from pipelinerl_core.run.user_code import code_commits, local_code, stored_code, warn_of_changed_code

CODE = "def score(text):\n    return 1.0\n"
SHA256 = hashlib.sha256(CODE.encode()).hexdigest()


def settings(function):
    return load_config("quickstart", [f"reward.function={function}"])


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    return create_run(run_url(str(tmp_path), "r"), settings("mine.py:score"), flow_run_id="f", mlflow=None)


def test_the_stored_copy_is_read_whatever_happens_to_the_local_file(run, tmp_path, caplog):
    assert run.store.get(f"code/{SHA256}.py").decode() == CODE
    warn_of_changed_code(run)
    assert caplog.messages == []
    changed = CODE.replace("1.0", "2.0")
    (tmp_path / "mine.py").write_text(changed)
    assert stored_code(open_run(run.store.url)) == CODE
    warn_of_changed_code(run)
    (line,) = caplog.messages
    assert "mine.py" in line
    assert SHA256 in line
    assert hashlib.sha256(changed.encode()).hexdigest() in line
    (tmp_path / "mine.py").unlink()
    warn_of_changed_code(run)
    assert len(caplog.messages) == 1


def test_the_commit_of_the_users_own_repository_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    assert code_commits(settings("mine.py:score")) == {}
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for arguments in (("init", "-q"), ("add", "mine.py"), (*who, "commit", "-q", "-m", "reward")):
        subprocess.run(["git", *arguments], check=True, capture_output=True)
    run = create_run(run_url("runs", "r"), settings("mine.py:score"), flow_run_id="f", mlflow=None)
    (commit,) = run.record.commits.values()
    assert re.fullmatch("[0-9a-f]{40}", commit)
    assert run_tags(run.config, run.record.commits)["mlflow.source.git.commit"] == commit
    (tmp_path / "mine.py").write_text(CODE.replace("1.0", "2.0"))
    assert code_commits(settings("mine.py:score")) == {"": f"{commit}-dirty"}
    subprocess.run(["git", "checkout", "-q", "mine.py"], check=True)
    (tmp_path / "new.py").write_text(CODE)
    assert code_commits(settings("mine.py:score")) == {"": commit}
    assert code_commits(settings("new.py:score")) == {"": f"{commit}-dirty"}, "git does not track the file"
    assert code_commits(settings("json:loads")) == {}


def test_a_changed_copy_is_refused(run):
    run.store.put(f"code/{SHA256}.py", b"def score(text): return 9\n")
    with pytest.raises(ChecksumMismatch, match=SHA256):
        stored_code(run)


def test_nothing_is_stored_without_a_file(tmp_path):
    for name, config in (("module", settings("a.module:score")), ("verifier", load_config("quickstart"))):
        run = create_run(run_url(str(tmp_path), name), config, flow_run_id="f", mlflow=None)
        assert run.record.code == {}
        assert stored_code(run) is None
        assert run.store.list("code") == []


def test_a_missing_file_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="no such file in"):
        local_code(settings(f"{tmp_path}/none.py:score"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.function=score"], "names no function"),
        (["reward.function=mine.py"], "names no function"),
        (["reward.function=mine.txt:a-b"], "names no function"),
        (["reward.function=mine.py:score", "reward.kind=sums"], "both choose the verifier"),
        (["reward.weights.correct=1"], "reward.function"),
        (["reward.network=true"], "reward.function"),
        (["reward.function=mine.py:score", 'reward.environment=["PIPELINERL_TOKEN"]'], "cannot get"),
        (["reward.function=mine.py:score", "reward.weights.correct=nan"], "a finite number"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config("quickstart", overrides)


@pytest.mark.parametrize("token", ["abc\n", "pässword"])
def test_a_token_that_no_connection_can_send_is_one_line(run, monkeypatch, token):
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(ConfigError, match=f"{TOKEN_VARIABLE}: must be one line of printable ASCII"):
        open_run(run.store.url)
