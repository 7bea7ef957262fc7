"""A process that ends with its parent: imported, and as the script that becomes a command."""

import os
import signal
import subprocess
import sys

import psutil

from pipelinerl_core import parent_death
from tests.processes import is_running
from tests.waiting import wait_for

SCRIPT = [sys.executable, "-I", "-S", parent_death.__file__]


def test_a_process_whose_parent_is_gone_ends_at_once():
    child = "from pipelinerl_core.parent_death import die_with_parent; die_with_parent(1); print('alive')"
    ended = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")


def test_a_command_whose_parent_is_gone_is_not_run():
    ended = subprocess.run([*SCRIPT, "1", "echo", "alive"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")


def test_the_script_becomes_the_command():
    command = [*SCRIPT, str(os.getpid()), "sh", "-c", "echo $$; exit 7"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        said, _ = child.communicate(timeout=60)
    assert (child.returncode, said.strip()) == (7, str(child.pid))


def test_the_command_ends_when_its_parent_is_killed():
    parent = f"""
import os, subprocess, time
child = subprocess.Popen([*{SCRIPT}, str(os.getpid()), "sh", "-c", "echo started; exec sleep 300"],
                         stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(300)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as killed:
        command = psutil.Process(int(killed.stdout.readline()))
        killed.send_signal(signal.SIGKILL)
    wait_for(lambda: not is_running(command), "the end of the command, whose parent was killed")
