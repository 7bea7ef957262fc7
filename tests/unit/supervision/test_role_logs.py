"""Logs of roles: their form, their size, what is counted in them, and how they are read."""

import io
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from pipelinerl.flows.cli.logs import logs
from pipelinerl.tasks import run_watch
from pipelinerl_core.errors import ConfigError, StoreError
from pipelinerl_core.roles.runtime.monitor import RoleMonitor, log_as
from pipelinerl_core.run.context import OUTER_TEMPORARY_VARIABLE, log_directory, open_run
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision import log_copies, role_logs, role_problems
from pipelinerl_core.supervision.log_copies import copied_log, read_copies
from pipelinerl_core.supervision.role_logs import RoleLog, digest_rows, follow, tail
from pipelinerl_core.supervision.role_problems import MAX_LINES, RoleProblems
from pipelinerl_core.supervision.supervise import RoleFailed, supervise_role
from pipelinerl_core.telemetry.log_lines import RoleFormatter, level_of
from tests.synthetic_run import Shape, write_run
from tests.waiting import wait_for

SECRET = "S3cretTokenOfTheRun"


def logged(formatter, log):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("pipelinerl_core.roles.trainer.main")
    logger.addHandler(handler)
    log(logger)
    return stream.getvalue()


def failing(logger):
    try:
        raise ValueError(f"bad token {SECRET}")
    except ValueError:
        logger.exception("step failed at %s", "https://user:pass@host/x")


def test_a_json_line_has_role_time_and_place_and_no_secret():
    facts = {"epoch": 4}
    identity = {"run": "r-1", "role": "trainer", "name": "trainer"}
    formatter = RoleFormatter(as_json=True, identity=identity, facts=facts, secrets=(SECRET, ""))
    facts["step"] = 7
    (line,) = logged(formatter, failing).splitlines()
    entry = json.loads(line)
    assert entry["time"][10] == "T"
    assert entry["time"].endswith("Z")
    assert {**identity, "epoch": 4, "step": 7, "level": "ERROR"}.items() <= entry.items()
    assert entry["message"] == "step failed at https://[redacted]@host/x"
    assert "ValueError: bad token [redacted]" in entry["exception"]
    assert SECRET not in line
    assert level_of(line) == "ERROR"


def test_a_text_line_differs_only_in_redacted_secrets():
    text = logged(RoleFormatter(secrets=(SECRET,)), lambda log: log.warning("token %s, max_tokens 80", SECRET))
    assert text.endswith(" WARNING pipelinerl_core.roles.trainer.main: token [redacted], max_tokens 80\n")
    assert level_of(text) == "WARNING"


HOSTILE = "\x1b[2J\x9b31m\r\n2026-11-21 03:00:00,123 INFO root: all is well\u2028\u202e"


def test_control_characters_and_line_breaks_are_escaped():
    text = logged(RoleFormatter(), lambda log: log.warning("group 3: %s, Grüße, 質問", HOSTILE))
    assert text.count("\n") == 1
    assert text.removesuffix("\n").isprintable()
    assert "\\x1b[2J\\x9b31m\\r\\n2026-11-21 03:00:00,123 INFO root: all is well\\u2028\\u202e, Grüße, 質問" in text


def test_a_traceback_keeps_its_lines_and_none_of_them_looks_like_another_event():
    def fail(log):
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            log.exception("step 3 failed")

    event, *trace = logged(RoleFormatter(), fail).removesuffix("\n").split("\n")
    assert event.endswith("step 3 failed")
    assert trace[0] == "  Traceback (most recent call last):"
    assert trace[-2].startswith("  ValueError: \\x1b[2J")
    assert all(line.isprintable() and level_of(line) == "" for line in trace)
    line = logged(RoleFormatter(as_json=True), fail)
    assert json.loads(line)["exception"].splitlines()[0] == "Traceback (most recent call last):"


def test_the_form_of_a_role_is_taken_from_its_configuration(capsys):
    root = logging.getLogger()
    before, handler = root.handlers[:], logging.StreamHandler(sys.stderr)
    root.handlers[:] = [handler]
    try:
        monitor = RoleMonitor("hub", "hub", "r-1")
        monitor.facts["step"] = 3
        log_as(monitor, "json", SECRET)
        root.warning("told %s", SECRET)
    finally:
        root.handlers[:] = before
    entry = json.loads(capsys.readouterr().err)
    assert (entry["run"], entry["role"], entry["step"], entry["message"]) == ("r-1", "hub", 3, "told [redacted]")


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("2026-11-21 03:00:00,123 ERROR pipelinerl_core: x", "ERROR"),
        ("(EngineCore pid=12) WARNING 11-21 03:00:00 [core.py:1] slow", "WARNING"),
        ("Traceback (most recent call last):", "ERROR"),
        ("an ERROR in the middle of a sentence", ""),
        ("INFO: hello", ""),
    ],
)
def test_the_level_of_a_line_is_read_from_its_form(line, level):
    assert level_of(line) == level


def write(path, number, level="INFO", start=0):
    with path.open("a") as log:
        for index in range(start, start + number):
            log.write(f"2026-11-21 03:00:00,000 {level} role: line {index:06d}\n")


def test_a_log_is_cut_during_writing_and_every_line_is_counted(tmp_path):
    log = RoleLog(tmp_path / "actor-0.log", 4000)
    with log.open() as stream:  # the child's descriptor, which stays open through the cuts
        for index in range(1000):
            stream.write(f"2026-11-21 03:00:00,000 {'WARNING' if index % 10 == 0 else 'INFO'} r: {index}\n".encode())
            stream.flush()
            log.look()
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4200
    digest = log.count()
    assert (digest.num_lines, digest.num_warnings, digest.num_errors) == (1000, 100, 0)
    assert digest.last_problem.endswith("r: 990")
    assert log.last_lines(1)[0].endswith("r: 999")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor-0.log", "actor-0.log.1"]


def test_lines_of_an_earlier_start_are_counted_by_that_start(tmp_path):
    path = tmp_path / "hub.log"
    write(path, 5, "ERROR")
    log = RoleLog(path, 1 << 20)
    with log.open():
        write(path, 2, "WARNING")
    assert (log.count().num_warnings, log.count().num_errors) == (2, 0)
    (row,) = digest_rows(tmp_path)
    assert (row["role"], row["lines"], row["warnings"], row["errors"]) == ("hub", 7, 2, 5)


def test_a_supervised_role_that_writes_too_much_stays_small_and_is_quoted_without_secrets(tmp_path):
    program = (
        "import os, sys, time\n"
        "for index in range(20):\n"
        "    print('x' * 99, flush=True)\n"
        "end = time.monotonic() + 60\n"
        "while not os.path.exists(sys.argv[1]) and time.monotonic() < end:\n"
        "    time.sleep(0.01)\n"
        "print('2026-11-21 03:00:00,000 ERROR r: see https://u:pw@host'); sys.exit(7)"
    )
    path = tmp_path / "logs" / "role.log"
    with pytest.raises(RoleFailed, match=r"see https://\[redacted\]@host") as caught:
        supervise_role(
            [sys.executable, "-I", "-S", "-c", program, f"{path}.1"], env=dict(os.environ), log=RoleLog(path, 2000),
            max_restarts=0, stop=threading.Event(), name="role",
        )  # fmt: skip
    assert "pw@" not in str(caught.value)
    assert path.with_name("role.log.1").exists()


def test_roles_are_chosen_by_name_or_kind(tmp_path, capsys):
    def roles(role):
        logs(url, role, 1, follow=False, as_json=True)
        return list(json.loads(capsys.readouterr().out)["roles"])

    write_run(open_store(str(tmp_path / "r-1")), Shape(steps=2))
    url = f"file://{tmp_path}/r-1"
    with pytest.raises(ConfigError, match="no logs at"):
        roles("")
    (tmp_path / "r-1" / "logs").mkdir()
    for name in ("actor-0", "actor-1", "hub"):
        write(tmp_path / "r-1" / "logs" / f"{name}.log", 1)
    assert roles("actor") == ["actor-0", "actor-1"]
    assert roles("actor-1") == ["actor-1"]
    with pytest.raises(ConfigError, match=r"--role act: no log of this role.*actor-0, actor-1, hub"):
        roles("act")


def test_the_tail_is_the_last_lines_and_reads_only_the_end_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(role_logs, "TAIL_BYTES", 200)
    write(tmp_path / "hub.log", 1000)
    assert [line[-6:] for line in tail(tmp_path / "hub.log", 2)] == ["000998", "000999"]
    assert tail(tmp_path / "hub.log", 0) == []
    assert tail(tmp_path / "removed.log", 5) == []


def test_following_gives_whole_lines_through_a_cut_and_new_logs(tmp_path, monkeypatch):
    log = tmp_path / "hub.log"
    write(log, 3)

    def append(text):
        with log.open("a") as stream:
            stream.write(text)

    def cut():
        os.truncate(log, 0)
        write(log, 1, start=7)
        write(tmp_path / "actor-0.log", 1)

    steps = iter([lambda: append("2026 half"), lambda: append(" and half\n"), cut])
    monkeypatch.setattr(role_logs, "time", SimpleNamespace(sleep=lambda seconds: next(steps)()))  # one each round
    followed = follow(tmp_path, pause_seconds=0.01)
    lines = [next(followed) for _ in range(3)]
    assert lines[0] == ("hub", "2026 half and half")
    assert {(name, line[-6:]) for name, line in lines[1:]} == {("hub", "000007"), ("actor-0", "000000")}


def test_the_command_prints_each_line_with_its_role_or_one_document(tmp_path, capsys):
    write_run(open_store(str(tmp_path / "r-1")), Shape(steps=2))
    directory = tmp_path / "r-1" / "logs"
    directory.mkdir()
    write(directory / "hub.log", 30)
    write(directory / "trainer.log", 1, "WARNING")
    url = f"file://{tmp_path}/r-1"
    logs(url, "", 2, follow=False, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["hub", "hub", "trainer"]
    logs(url, "trainer", 2, follow=False, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert list(document["roles"]) == ["trainer"]
    assert document["roles"]["trainer"]["warnings"] == 1
    with pytest.raises(ConfigError, match="--follow does not end"):
        logs(url, "", 2, follow=True, as_json=True)


def test_the_flow_run_keeps_a_table_of_the_logs_of_the_roles_even_after_a_failure(tmp_path, monkeypatch):
    write_run(open_store(str(tmp_path / "r-1")), Shape(steps=2))
    (tmp_path / "r-1" / "logs").mkdir()
    write(tmp_path / "r-1" / "logs" / "trainer.log", 3, "ERROR")
    kept = {}
    for name in ("create_progress_artifact", "update_progress_artifact", "create_markdown_artifact"):
        monkeypatch.setattr(run_watch, name, MagicMock())
    monkeypatch.setattr(run_watch, "create_table_artifact", lambda rows, key, **_: kept.update({key: rows}))
    run = open_run(f"file://{tmp_path}/r-1")
    tracker = MagicMock(logged=None)
    with pytest.raises(RuntimeError), run_watch.RunWatch(run, tracker):
        raise RuntimeError("the trainer failed")
    (row,) = kept["synthetic-logs"]
    assert (row["role"], row["host"], row["errors"]) == ("trainer", socket.gethostname(), 3)
    assert [call.args[0] for call in tracker.close.call_args_list] == ["FAILED"]


def test_warnings_and_errors_of_a_role_reach_the_log_of_its_supervisor_with_its_name(tmp_path, caplog):
    program = (
        "import sys\n"
        "stamp = '2026-11-21 03:00:00,000'\n"
        "print(stamp, 'INFO r: all is well')\n"
        "print(stamp, 'WARNING r: slow: https://u:pw@host')\n"
        "sys.stdout.flush()\n"
        "raise KeyError('no such row')"
    )
    log = RoleLog(tmp_path / "trainer.log", 1 << 20, RoleProblems("trainer").add)
    with pytest.raises(RoleFailed):
        supervise_role(
            [sys.executable, "-I", "-S", "-c", program], env=dict(os.environ), log=log,
            max_restarts=0, stop=threading.Event(), name="trainer",
        )  # fmt: skip
    shown = [(record.levelname, record.getMessage()) for record in caplog.records if record.levelno > logging.INFO]
    assert shown == [
        ("WARNING", "trainer: r: slow: https://[redacted]@host"),
        ("ERROR", "trainer: KeyError: 'no such row'"),
    ]


def test_repeated_warnings_are_shown_once_and_others_are_bounded_in_rate(caplog, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(role_problems, "time", SimpleNamespace(monotonic=lambda: now))
    problems = RoleProblems("actor-3")

    def warn(text):
        caplog.clear()
        problems.add(f"2026-11-21 03:00:00,000 WARNING r: {text}\n")
        return [record.getMessage() for record in caplog.records]

    assert warn("group 17 took 3.5 s") == ["actor-3: r: group 17 took 3.5 s"]
    assert not any(warn(f"group {number} took {number / 7} s") for number in range(1000))
    assert warn("another") == ["actor-3: r: another (1000 more lines before are only in its log)"]
    assert sum(len(warn("x" * length)) for length in range(1, 100)) == MAX_LINES - 2
    now += 61.0
    assert warn("y") == [f"actor-3: r: y ({99 - MAX_LINES + 2} more lines before are only in its log)"]
    assert warn("group 17 took 3.5 s") == []
    now += 600.0
    assert warn("group 18 took 9.5 s") == [
        "actor-3: r: group 18 took 9.5 s (1 more lines before are only in its log)"
    ]
    entry = {"time": "2026-11-21T03:00:00.000Z", "level": "ERROR", "logger": "r", "message": "step 3 failed"}
    caplog.clear()
    problems.add(json.dumps({**entry, "exception": "Traceback ...\nValueError: no"}) + "\n")
    assert [record.getMessage() for record in caplog.records] == ["actor-3: r: step 3 failed: ValueError: no"]


def test_of_a_traceback_that_vllm_logs_line_by_line_only_the_exception_is_shown(caplog):
    problems = RoleProblems("actor-0")
    start = "(Worker pid=13295) ERROR 11-30 09:17:30 [multiproc_executor.py:1063] "
    lines = (
        "WorkerProc hit an exception.", "Traceback (most recent call last):", '  File "a.py", line 10, in execute',
        "    output = func(*args)", "             ^^^^", *(f'  File "b.py", line {n}, in call' for n in range(10)),
        "RuntimeError: Unsupported CPU attention configuration: head_dim=16", "",
    )  # fmt: skip
    for line in lines:
        problems.add(f"{start}{line}\n")
    assert [record.getMessage() for record in caplog.records] == [
        "actor-0: WorkerProc hit an exception.",
        "actor-0: RuntimeError: Unsupported CPU attention configuration: head_dim=16",
    ]


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A run whose store is no directory; its logs are below the temporary directory of the host."""
    monkeypatch.setenv(OUTER_TEMPORARY_VARIABLE, str(tmp_path))
    store = open_store(f"memory://{tmp_path.name}/r-1")
    write_run(store, Shape(steps=2))
    run = open_run(store.url)
    return replace(run, token=SECRET)


def copy_log(run, host, name, text, monkeypatch):
    """As the supervisor of a role on a host does."""
    path = log_directory(run.store.url, run.run_id) / f"{name}.log"
    log = RoleLog(path, 1 << 20)
    with monkeypatch.context() as on_host:
        on_host.setattr("socket.gethostname", lambda: host)
        with copied_log(run, name, log):
            path.write_text(text)
            log.count()
    path.unlink()


def test_the_last_lines_of_a_role_are_read_on_a_host_that_reaches_only_the_store(remote, monkeypatch, capsys):
    lines = [f"2026-11-21 03:00:00,000 WARNING role: line {number} of {SECRET}" for number in range(600)]
    copy_log(remote, "gpu-1", "trainer", "\n".join(lines) + "\nhttps://u:pw@host\n", monkeypatch)
    (copy,) = read_copies(remote.store)
    assert (copy.name, copy.host, copy.num_lines, copy.num_warnings) == ("trainer", "gpu-1", 601, 600)
    assert time.time() - copy.at < 60
    assert len(copy.last_lines) == 500
    assert copy.last_lines[-2:] == (lines[-1].replace(SECRET, "[redacted]"), "https://[redacted]@host")
    copy_log(remote, "gpu-2", "trainer", "line on gpu-2\n", monkeypatch)
    write(log_directory(remote.store.url, remote.run_id) / "hub.log", 1)
    logs(remote.store.url, "", 2, follow=False, as_json=False)
    hub, place, last = capsys.readouterr().out.splitlines()
    assert hub.startswith("hub | 2026")
    assert re.fullmatch(r"--- trainer: host gpu-2, copied [-\d]+ [:\d]+; 1 older: --role trainer", place)
    assert last == "trainer | line on gpu-2"
    logs(remote.store.url, "trainer", 1, follow=False, as_json=False)
    assert [line for line in capsys.readouterr().out.splitlines() if not line.startswith("---")] == [
        "trainer | https://[redacted]@host",
        "trainer | line on gpu-2",
    ]
    logs(remote.store.url, "trainer", 1, follow=False, as_json=True)
    document = json.loads(capsys.readouterr().out)["roles"]["trainer"]
    assert (document["host"], document["older"][0]["host"], document["older"][0]["warnings"]) == (
        "gpu-2",
        "gpu-1",
        600,
    )
    with pytest.raises(ConfigError, match="--follow: no such role has run on this host"):
        logs(remote.store.url, "trainer", 1, follow=True, as_json=False)


def test_a_failure_names_the_log_of_its_role_on_another_host(remote, monkeypatch):
    directory = log_directory(remote.store.url, remote.run_id)
    copy_log(remote, "gpu-1", "trainer", "no space: https://u:pw@host\n", monkeypatch)
    write(directory / "hub.log", 1)
    failure = partial(log_copies.lines_of_failure, directory, remote.store, number=5)
    assert failure("trainer: its flow run is Failed") == (
        "`trainer` on host gpu-1", ["no space: https://[redacted]@host"],
    )  # fmt: skip
    place, lines = failure("something else")
    assert place == f"`{directory}/hub.log` on host {socket.gethostname()}"
    assert lines[0].endswith("line 000000")


def test_the_copy_follows_the_log_through_a_cut_and_a_store_that_fails_does_not_hold_the_role(
    remote, monkeypatch, caplog
):
    monkeypatch.setattr(log_copies, "COPY_SECONDS", 0.02)
    path = log_directory(remote.store.url, remote.run_id) / "actor-0.log"
    log = RoleLog(path, 4000)
    with copied_log(remote, "actor-0", log), log.open():
        write(path, 100)
        log.look()
        write(path, 1, start=100)
        wait_for(lambda: any(copy.last_lines[-1].endswith("100") for copy in read_copies(remote.store)), "a copy")
        assert len(read_copies(remote.store)[0].last_lines) == 101
        monkeypatch.setattr(remote.store, "put", MagicMock(side_effect=StoreError("503")))
        write(path, 1, start=101)
        wait_for(lambda: caplog.records, "a warning")
        monkeypatch.undo()
        wait_for(lambda: read_copies(remote.store)[0].last_lines[-1].endswith("101"), "the next copy")
    assert [record.getMessage() for record in caplog.records] == [
        "the log of actor-0 could not be copied to the store, trying again: 503"
    ]
    silent = replace(remote, store=MagicMock(url="s3://silent/r-1", put=lambda *_: threading.Event().wait(60)))
    monkeypatch.setattr(log_copies, "END_SECONDS", 0.05)
    with copied_log(silent, "actor-0", log):
        pass


def test_a_run_in_a_directory_has_no_copies_because_its_logs_are_there(tmp_path):
    store = open_store(str(tmp_path / "r-1"))
    write_run(store, Shape(steps=2))
    log = RoleLog(tmp_path / "r-1" / "logs" / "hub.log", 1 << 20)
    with copied_log(open_run(store.url), "hub", log):
        write(log.path, 3)
    assert [key for key in store.list("") if key.startswith("logs")] == ["logs/hub.log"]
    assert read_copies(store) == []


def test_the_token_of_the_hub_is_taken_out_of_a_printed_warning(caplog):
    problems = RoleProblems("actor-0", "0123secret4567")
    with caplog.at_level(logging.WARNING):
        problems.add("WARNING 11-28 17:00:00 user code printed 0123secret4567\n")
    assert "user code printed [redacted]" in caplog.text
    assert "0123secret4567" not in caplog.text
