"""The command line from outside: exit codes, one JSON document on stdout, one line on stderr."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prefect._internal.uuid7 import uuid7

from pipelinerl_core.errors import ConfigError, StoreError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.locate import LATEST_KEY, create_run, locate_run, new_run_id, remember_latest, run_url
from pipelinerl_core.storage.local import FileStore
from pipelinerl_core.storage.object_store import check_writable, open_store
from tests.synthetic_run import Shape, write_run

ROOT = Path(__file__).parents[3]


def pipelinerl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelinerl.flows.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)


@pytest.fixture
def refused(refusal):
    """A function: arguments of a command that must be refused -> the one line that the command prints."""

    def line(*arguments: str) -> str:
        (only,) = refusal(*arguments)
        return only

    return line


def test_a_full_disk_and_a_reader_that_leaves_are_no_traceback():
    command = [sys.executable, "-m", "pipelinerl.flows.cli", "config", "--keys"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, cwd=ROOT, check=False
        )
    assert ended.returncode == 1
    assert ended.stderr == "pipelinerl: PipelineRLError: the result cannot be written: No space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, cwd=ROOT, check=False
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_root_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    ended = pipelinerl("runs", "--root", str(tmp_path / "file"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "file is no directory" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_config_prints_toml_that_train_reads_back_to_the_same_settings(tmp_path):
    printed = pipelinerl("config", "quickstart", "trainer.steps=7").stdout
    (tmp_path / "mine.toml").write_text(printed)
    assert load_config(str(tmp_path / "mine.toml")) == load_config("quickstart", ["trainer.steps=7"])


def test_config_json_is_one_document_with_the_override():
    ended = pipelinerl("config", "quickstart", "trainer.steps=7", "--json")
    assert json.loads(ended.stdout)["trainer"]["steps"] == 7
    assert ended.returncode == 0


def test_config_keys_lists_every_setting_with_its_meaning():
    listed = {entry["key"]: entry for entry in json.loads(pipelinerl("config", "--keys", "--json").stdout)}
    assert listed["schedule.max_lag"]["default"] == "4"
    assert all(entry["meaning"] for entry in listed.values())
    assert all(entry["values"] for entry in listed.values() if entry["key"].endswith(".kind"))
    assert listed["prompts.kind"]["values"] == [
        "sums",
        "largest_number",
        "reasoning_gym",
        "environment",
        "file",
        "huggingface",
    ]
    text = pipelinerl("config", "--keys").stdout
    assert text.index("# with prompts.kind=file or huggingface:") < text.index("prompts.path = (required)")
    assert text.index("prompts.answer_column =") < text.index("# with prompts.kind=huggingface:")


def test_an_unknown_key_names_the_nearest_key(refused):
    assert "trainer.step: no such key; did you mean trainer.steps?" in refused(
        "train", "quickstart", "trainer.step=3"
    )


def test_an_unknown_preset_names_the_known_ones(refused):
    assert "quickstart" in refused("train", "quickstrat")


def test_an_unusable_root_is_refused_before_anything_starts(tmp_path, refused):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused("train", "quickstart", "--root", str(tmp_path / "file" / "runs"))


def test_an_unusable_root_is_named_by_its_option(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Set --to to a writable store"):
        check_writable(open_store((tmp_path / "file" / "runs").as_uri()), "--to")


def test_a_missing_model_directory_is_refused(tmp_path, refused):
    line = refused("train", "quickstart", f"model.path={tmp_path / 'none'}", "--root", str(tmp_path))
    assert "no such directory" in line
    assert "model.path" in line


def test_a_run_that_does_not_exist_is_refused(tmp_path, refused):
    for command in ("status", "resume", "report"):
        assert "no run at" in refused(command, "nosuch-12345678", "--root", str(tmp_path))


def test_report_writes_the_report_anew(tmp_path):
    write_run(open_store(str(tmp_path / "synthetic")), Shape(steps=2))
    for arguments in (["synthetic", "--root", str(tmp_path)], [str(tmp_path / "synthetic")]):
        ended = pipelinerl("report", *arguments)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.startswith("synthetic: 2 steps in ")
        assert ended.stdout.splitlines()[-1].split() == ["report", f"{tmp_path}/synthetic/report.html"]
    printed = pipelinerl("report", str(tmp_path / "synthetic"), "--json").stdout
    assert json.loads(printed) == json.loads((tmp_path / "synthetic" / "report.json").read_text())
    assert (tmp_path / "synthetic" / "report.html").stat().st_size > 10_000


TWO_ARMS = ("--arm", "keep: engine.kv=keep", "--arm", "drain: engine.kv=drain")


def test_compare_refuses_bad_input_with_one_line(refused):
    assert "at least two arms" in refused("compare")
    assert "arm b: engine.kvs: no such key" in refused("compare", "--arm", "a:", "--arm", "b: engine.kvs=keep")
    assert "--target 1.5" in refused("compare", *TWO_ARMS, "--target", "1.5")
    assert "seeds a" in refused("compare", *TWO_ARMS, "--seeds", "a")


def test_sweep_refuses_bad_input_with_one_line(refused):
    assert "nothing to sweep" in refused("sweep", "quickstart", "trainer.steps=4")
    assert "--deployment needs a Prefect server" in refused("sweep", "quickstart", "seed=0,1", "--deployment", "a/b")


def test_simulate_refuses_bad_input_with_one_line(tmp_path, refused):
    (tmp_path / "lengths.json").write_text("[]")
    preset = ("simulate", "math-7b-16gpu")
    assert "generate on 16 of 16 GPUs, so none trains" in refused(*preset, "placement.actors=16", "--gpus", "16")
    assert "none, or one below 1" in refused(*preset, "--lengths", str(tmp_path / "lengths.json"))
    assert "it may use 24.2 GB of A10" in refused(*preset, "placement.gpu=A10", "trainer.ranks=4")
    assert "--write and --figure need --sweep" in refused(*preset, "--write", "best.toml")
    assert "--calibrate needs a configuration" in refused("simulate", "latest", "--calibrate")


def test_help_of_a_command_answers_at_once_and_shows_an_example():
    for command in ("train", "resume"):
        begun = os.times()
        ended = pipelinerl(command, "--help")
        spent = os.times()
        seconds = spent.children_user + spent.children_system - begun.children_user - begun.children_system
        assert seconds < 3.0, "of CPU; one on an idle machine"
        assert "pipelinerl" in ended.stdout
        assert f"pipelinerl {command}" in ended.stdout


def test_no_help_imports_anything_heavy():
    program = (
        "import sys\nfrom typer.main import get_command\nfrom typer.testing import CliRunner\n"
        "import pipelinerl.flows.cli\n"
        "names = list(get_command(pipelinerl.flows.cli.app).commands)\n"
        "assert {'train', 'simulate', 'compare'} <= set(names)\n"
        "for arguments in (['--help'], *([name, '--help'] for name in names)):\n"
        "    assert CliRunner().invoke(pipelinerl.flows.cli.app, arguments).exit_code == 0, arguments\n"
        "heavy = ('prefect', 'mlflow', 'torch', 'pyarrow', 'transformers', 'psutil', 'numpy')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ended.stdout.strip() == "[]"


def test_config_refuses_an_alarm_query_that_no_run_can_answer(refused):
    line = refused("config", "quickstart", "tracking.alarm_query=select rewards from steps")
    assert line.startswith("pipelinerl: tracking.alarm_query: SQL: ")


def test_version_names_the_release_and_the_commit():
    assert re.fullmatch(r"pipelinerl \d+\.\d+\.\d+(\+[0-9a-f]{7})?\n", pipelinerl("--version").stdout)


def test_init_writes_a_file_that_train_reads_and_refuses_to_overwrite_the_file(tmp_path, refused):
    file = tmp_path / "mine.toml"
    assert str(file) in pipelinerl("init", str(file), "trainer.steps=7").stdout
    assert load_config(str(file)) == load_config("quickstart", ["trainer.steps=7"])
    assert "exists already" in refused("init", str(file))
    assert "must end in .toml" in refused("init", str(tmp_path / "mine"))
    assert "no such preset" in refused("init", str(tmp_path / "other.toml"), "quickstrat")


def completions(*words: str, root: Path | None = None) -> list[str]:
    """What bash offers for the last word."""
    asked = {"_PIPELINERL_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["pipelinerl", *words])}
    environment = {**os.environ, **asked, "COMP_CWORD": str(len(words)), "PIPELINERL_ROOT": str(root or "")}
    command = [
        sys.executable,
        "-c",
        "import sys; sys.argv[0] = 'pipelinerl'; import pipelinerl.flows.cli as c; c.main()",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    return ended.stdout.split()


def test_the_shell_completes_presets_keys_values_and_runs(tmp_path):
    make_run(tmp_path, "quickstart-1a2b3c4d")
    assert completions("train", "quick") == ["quickstart"]
    assert completions("train", "quickstart", "schedule.max_") == ["schedule.max_lag="]
    assert completions("train", "quickstart", "engine.kind=") == ["engine.kind=embedded", "engine.kind=vllm"]
    assert completions("status", "quick", root=tmp_path) == ["quickstart-1a2b3c4d"]


# ---- runs under a root ----------------------------------------------------------------------------------------


def make_run(root: Path, run_id: str) -> str:
    url = run_url(str(root), run_id)
    create_run(url, load_config("quickstart", ["trainer.steps=7"]), flow_run_id="f", mlflow=None)
    remember_latest(url)
    return url


def test_a_run_is_found_by_id_latest_path_and_url(tmp_path):
    url = make_run(tmp_path, "quickstart-1a2b3c4d")
    for run in ("quickstart-1a2b3c4d", "latest", str(tmp_path / "quickstart-1a2b3c4d"), url):
        assert locate_run(run, str(tmp_path)) == url


def test_latest_is_the_run_that_was_started_or_resumed_last(tmp_path):
    first = make_run(tmp_path, "a-1")
    second = make_run(tmp_path, "b-2")
    assert locate_run("latest", str(tmp_path)) == second
    remember_latest(first)
    assert locate_run("latest", str(tmp_path)) == first


def test_in_a_root_where_another_user_was_last_each_user_has_an_own_latest(tmp_path, monkeypatch):
    first, second = make_run(tmp_path, "a-1"), make_run(tmp_path, "b-2")
    put = FileStore.put

    def put_own(store, key, *arguments, **options):
        if key == LATEST_KEY:
            raise StoreError("cannot write latest.json: Operation not permitted")
        put(store, key, *arguments, **options)

    monkeypatch.setattr(FileStore, "put", put_own)
    monkeypatch.setattr("pipelinerl_core.run.locate.user_name", lambda: "alice")
    remember_latest(first, "alice@host")
    assert locate_run("latest", str(tmp_path)) == first
    with pytest.raises(StoreError):
        remember_latest(second)


def test_an_id_cannot_leave_the_root(tmp_path):
    for run in ("..", "a b", "*"):
        with pytest.raises(ConfigError):
            locate_run(run, str(tmp_path))


def test_run_json_is_written_once_and_the_first_record_counts(tmp_path):
    url = make_run(tmp_path, "a-1")
    again = create_run(url, load_config("quickstart", ["trainer.steps=9"]), flow_run_id="g", mlflow=None)
    assert again.config.trainer.steps == 7
    assert again.record.flow_run_id == "f"


def test_a_retry_of_a_flow_run_has_the_same_run_id_and_files_give_their_name():
    flow_run = "0a1b2c3d-4e5f-6789-abcd-ef0123456789"
    assert new_run_id("lr sweep 3", flow_run) == "lr-sweep-3-23456789"
    assert new_run_id("quickstart", flow_run) == "quickstart-23456789"
    assert new_run_id("/etc/My Model_v2.toml", flow_run) == "my-model-v2-23456789"


def test_flow_runs_that_the_scheduler_creates_at_the_same_time_have_runs_of_their_own():
    assert len({new_run_id("nightly", str(uuid7())) for _ in range(100)}) == 100


def test_status_of_a_run_that_has_not_begun_is_one_json_document(tmp_path):
    url = make_run(tmp_path, "a-1")
    ended = pipelinerl("status", "a-1", "--root", str(tmp_path), "--json")
    document = json.loads(ended.stdout)
    assert (document["run_id"], document["step"], document["steps"]) == ("a-1", 0, 7)
    assert document["url"] == url
    assert open_store(url).list("commits") == []


def test_status_of_a_stopped_run_has_the_errors_with_which_its_roles_ended(tmp_path):
    make_run(tmp_path, "a-1")
    (logs := tmp_path / "a-1" / "logs").mkdir()
    (logs / "trainer.log").write_text("2026-11-30 16:00:00,000 INFO x: step 3\nEngineError: out of memory\n")
    (logs / "hub.log").write_text("2026-11-30 16:00:00,000 INFO x: the hub ends\n")
    document = json.loads(pipelinerl("status", "a-1", "--root", str(tmp_path), "--json").stdout)
    assert document["last_errors"] == {"trainer": "EngineError: out of memory"}
    text = pipelinerl("status", "a-1", "--root", str(tmp_path)).stdout
    assert "trainer ended with: EngineError: out of memory\nmore: pipelinerl logs a-1\n" in text


def test_runs_lists_the_runs_of_a_root(tmp_path):
    make_run(tmp_path, "a-1")
    listed = json.loads(pipelinerl("runs", "--root", str(tmp_path), "--json").stdout)
    assert [(run["run_id"], run["state"], run["steps"]) for run in listed["runs"]] == [("a-1", "stopped", 7)]
    assert "a-1" in pipelinerl("runs", "--root", str(tmp_path)).stdout
    assert "no runs yet" in pipelinerl("runs", "--root", str(tmp_path / "none")).stdout
