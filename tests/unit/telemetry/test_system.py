"""System metrics: of the host, of each role below this process, of GPUs as nvidia-smi writes them."""

import fnmatch
import re
import subprocess
import sys
import time

import pytest

from pipelinerl_core import host
from pipelinerl_core.host import nvidia_smi
from pipelinerl_core.telemetry.metrics import METRICS
from pipelinerl_core.telemetry.system import SystemSampler, gpu_figures

URL = "file:///runs/one"
BUSY = """
import time
end = time.process_time() + 0.2
while time.process_time() < end:
    pass
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def start():
    started = []

    def start(module, *arguments):
        command = [sys.executable, "-c", BUSY, f"pipelinerl_core.roles.{module}.main", *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        started[-1].stdout.readline()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_host_and_each_role_of_the_run_are_measured(start):
    sampler = SystemSampler(URL)
    start("actor", "--run", URL, "--name", "actor-1")
    start("trainer", "--run", "file:///runs/another")
    begun = time.monotonic()
    values = sampler()
    assert 0 < values["system/system_memory_usage_percentage"] < 100
    assert values["system/actor-1/memory_usage_megabytes"] > 1
    assert values["system/actor-1/cpu_utilization_percentage"] > 0.5
    assert not [key for key in values if "trainer" in key], "of another run"
    time.sleep(0.2)
    assert sampler()["system/actor-1/cpu_utilization_percentage"] < 50, "since the sample before"
    assert time.monotonic() - begun < 30
    patterns = [re.sub("<.*?>", "*", key) for key in METRICS]
    assert [key for key in values if not any(fnmatch.fnmatch(key, pattern) for pattern in patterns)] == []


def test_the_figures_of_gpus_are_those_of_nvidia_smi():
    rows = [("0", "42", "1024", "4096", "70.5"), ("1", "[N/A]", "0", "4096", "[N/A]")]
    assert gpu_figures(rows) == {
        "gpu_0_utilization_percentage": 42.0,
        "gpu_0_memory_usage_megabytes": 1024 * 2**20 / 1e6,
        "gpu_0_memory_usage_percentage": 25.0,
        "gpu_0_power_usage_watts": 70.5,
        "gpu_1_memory_usage_megabytes": 0.0,
        "gpu_1_memory_usage_percentage": 0.0,
    }
    assert gpu_figures([]) == {}


def test_a_host_without_nvidia_smi_or_with_a_broken_nvidia_smi_has_no_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(host.shutil, "which", lambda name: None)
    assert nvidia_smi(["index"]) == []
    monkeypatch.setattr(host.shutil, "which", lambda name: "/bin/false")
    assert nvidia_smi(["index"]) == []
