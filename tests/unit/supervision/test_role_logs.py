"""Logs of roles: their form, their size, what is counted in them, and how they are read."""

import io
import json
import logging
import os
import sys
import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from pipelinerl.flows.cli.logs import show
from pipelinerl.tasks import run_watch
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.roles.runtime.monitor import RoleMonitor, log_as
from pipelinerl_core.run.context import open_run
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision import role_logs
from pipelinerl_core.supervision.role_logs import RoleLog, digest_rows, follow, log_files, tail
from pipelinerl_core.supervision.supervise import RoleFailed, supervise_role
from pipelinerl_core.telemetry.log_lines import RoleFormatter, level_of
from tests.synthetic_run import Shape, write_run

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
            log.rotate_if_large()
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
            [sys.executable, "-I", "-S", "-c", program, f"{path}.1"], env=dict(os.environ), log_path=path,
            max_restarts=0, stop=threading.Event(), name="role", max_log_bytes=2000,
        )  # fmt: skip
    assert "pw@" not in str(caught.value)
    assert path.with_name("role.log.1").exists()


def test_roles_are_chosen_by_name_or_kind(tmp_path):
    for name in ("actor-0", "actor-1", "hub"):
        write(tmp_path / f"{name}.log", 1)
    assert list(log_files(tmp_path, "actor")) == ["actor-0", "actor-1"]
    assert list(log_files(tmp_path, "actor-1")) == ["actor-1"]
    with pytest.raises(ConfigError, match=r"--role act: no log of this role.*actor-0, actor-1, hub"):
        log_files(tmp_path, "act")
    with pytest.raises(ConfigError, match="no logs at"):
        log_files(tmp_path / "nowhere")


def test_the_tail_is_the_last_lines_and_reads_only_the_end_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(role_logs, "TAIL_BYTES", 200)
    write(tmp_path / "hub.log", 1000)
    assert [line[-6:] for line in tail(tmp_path / "hub.log", 2)] == ["000998", "000999"]
    assert tail(tmp_path / "hub.log", 0) == []


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
    logs = tmp_path / "r-1" / "logs"
    logs.mkdir()
    write(logs / "hub.log", 30)
    write(logs / "trainer.log", 1, "WARNING")
    url = f"file://{tmp_path}/r-1"
    show(url, "", 2, keeps_on=False, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["hub", "hub", "trainer"]
    show(url, "trainer", 2, keeps_on=False, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert list(document["roles"]) == ["trainer"]
    assert document["roles"]["trainer"]["warnings"] == 1
    with pytest.raises(ConfigError, match="--follow does not end"):
        show(url, "", 2, keeps_on=True, as_json=True)


def test_the_flow_run_keeps_a_table_of_the_logs_of_the_roles_even_after_a_failure(tmp_path, monkeypatch):
    write_run(open_store(str(tmp_path / "r-1")), Shape(steps=2))
    (tmp_path / "r-1" / "logs").mkdir()
    write(tmp_path / "r-1" / "logs" / "trainer.log", 3, "ERROR")
    kept = {}
    monkeypatch.setattr(run_watch, "create_table_artifact", lambda rows, key, **_: kept.update({key: rows}))
    run = open_run(f"file://{tmp_path}/r-1")
    tracker = MagicMock(logged=None)
    with pytest.raises(RuntimeError), run_watch.RunWatch(run, tracker):
        raise RuntimeError("the trainer failed")
    assert [(row["role"], row["errors"]) for row in kept["synthetic-logs"]] == [("trainer", 3)]
    assert [call.args[0] for call in tracker.close.call_args_list] == ["FAILED"]
