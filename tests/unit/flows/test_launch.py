"""Signals of a command that runs a flow."""

import os
import signal
import time

import pytest

from pipelinerl.flows.cli import launch


def terminated(*, is_swallowed: bool, number: int = signal.SIGTERM) -> None:
    with launch._signals_raise():
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except launch._Terminated:
            if not is_swallowed:
                raise
        time.sleep(5)


def test_a_termination_that_a_library_swallows_is_raised_again(monkeypatch):
    monkeypatch.setattr(launch, "AGAIN_SECONDS", 0.1)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(launch._Terminated):
        terminated(is_swallowed=True)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_terminal_that_is_closed_ends_the_command_like_a_termination_unless_it_runs_under_nohup():
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(launch._Terminated):
            terminated(is_swallowed=False, number=signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with launch._signals_raise():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_after_the_block_no_signal_follows(monkeypatch):
    monkeypatch.setattr(launch, "AGAIN_SECONDS", 0.1)
    arrived = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: arrived.append(number))
    try:
        with pytest.raises(launch._Terminated):
            terminated(is_swallowed=False)
        time.sleep(0.3)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert not arrived
