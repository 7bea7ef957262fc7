"""A supervised child: a late start, a failure of the supervision, long lines."""

import asyncio
import errno
import json
import sys

import psutil
import pytest

from pipelinerl_core.sandbox import supervised
from pipelinerl_core.sandbox.supervised import Request, SupervisedChild

CHILD = """
import json, time
from pipelinerl_core.sandbox.child_process import as_line, begin_child, write_all

requests, answers, prepare = begin_child()
time.sleep(prepare["seconds"])
write_all(answers, as_line({"ready": True}))
with open(requests, "rb") as stream:
    for line in stream:
        write_all(answers, b"x" * json.loads(line) + b"\\n")
"""


class Repeating(SupervisedChild[Request]):
    """Asks for lines by their lengths."""

    MODULE = "repeating_child"
    LINE_BYTES = 1 << 20
    ERROR = RuntimeError
    NOUN = "the process"
    CLOSED = "closed"

    def __init__(self, seconds):
        super().__init__("repeating", {"memory_bytes": 1 << 30, "seconds": seconds}, ())
        self.lengths = {}
        self.num_starts = 0
        self.has_died = asyncio.Event()

    def ask(self, length):
        self.lengths[self._next_id] = length
        request = Request(future=asyncio.get_running_loop().create_future())
        self._add(request)
        self._send(json.dumps(length).encode() + b"\n")
        return request.future

    def _new_descriptors(self):
        self.num_starts += 1
        return ()

    def _on_ready(self, fields):
        for identity in self._requests:
            self._send(json.dumps(self.lengths[identity]).encode() + b"\n")

    def _on_lines(self, lines):
        for line in lines.split(b"\n"):
            self._requests.pop(next(iter(self._requests))).finish(len(line))

    def _seconds_to_check(self):
        return 60.0

    async def _on_death(self, exit_code, bad_line):
        self.has_died.set()
        if self._requests:
            self._fail(self._requests.pop(next(iter(self._requests))), f"{bad_line} ({exit_code})")


@pytest.fixture
def child_module(tmp_path, monkeypatch):
    (tmp_path / "repeating_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))


def run(work, seconds=0.0):
    async def main():
        child = Repeating(seconds)
        async with asyncio.timeout(60):
            result = await work(child)
            await child.close()
        return result

    return asyncio.run(main())


async def error_of(child):
    with pytest.raises(RuntimeError) as caught:
        await child.ask(1)
    return str(caught.value), child.num_starts


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("", ("repeating: the child was not ready within 0.1 s, after 2 restarts (at most 2 in a row)", 3)),
        ("it was late", ("repeating: it was late", 1)),
    ],
)
def test_a_late_child_is_started_again_unless_the_next_would_be_late_too(child_module, monkeypatch, reason, error):
    for name in ("START_SECONDS", "CLOSE_SECONDS"):
        monkeypatch.setattr(supervised, name, 0.1)
    monkeypatch.setattr(supervised, "BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(Repeating, "LATE", reason)
    assert run(error_of, seconds=60) == error


def test_requests_after_starts_that_the_host_refused_start_a_child(child_module, monkeypatch):
    monkeypatch.setattr(supervised, "BACKOFF_SECONDS", 0.001)

    async def work(child):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", "/no/such/program")
            error, _ = await error_of(child)
        return error, await child.ask(7)

    error, length = run(work)
    assert "did not start ([Errno 2] No such file or directory: '/no/such/program'), after 2 restarts" in error
    assert length == 7


def refused_once(monkeypatch):
    """The next start of a process fails once, as without memory."""
    real = asyncio.create_subprocess_exec

    async def start(*arguments, **options):
        monkeypatch.setattr(asyncio, "create_subprocess_exec", real)
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)


@pytest.mark.parametrize("cause", ["refused", "late"])
def test_a_child_that_cannot_be_replaced_at_once_is_replaced_later(child_module, monkeypatch, cause):
    monkeypatch.setattr(Repeating, "LATE", "it was late")
    monkeypatch.setattr(supervised, "BACKOFF_SECONDS", 0.05)

    async def work(child):
        assert await child.ask(1) == 1
        (own,) = [other for other in psutil.Process().children() if "repeating_child" in other.cmdline()]
        own.kill()
        await child.has_died.wait()
        if cause == "refused":
            refused_once(monkeypatch)
            return await child.ask(7)
        with monkeypatch.context() as patched:
            patched.setattr(supervised, "START_SECONDS", 0.001)
            asked = child.ask(7)
            await asyncio.sleep(0.1)
        return await asked

    assert run(work) == 7


def test_long_lines_arrive_whole_and_a_line_beyond_the_limit_kills_the_child(child_module):
    lengths = [1, 300_000, 0, 1 << 17, 2, 1 << 22, 3]

    async def work(child):
        return await asyncio.gather(*map(child.ask, lengths), return_exceptions=True)

    *before, beyond, after = run(work)
    assert [*before, after] == [*lengths[:-2], 3]
    assert str(beyond) == "repeating: a line of more than 1048576 bytes (-9)"
