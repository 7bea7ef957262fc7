"""Prometheus' own tool reads our configuration, and tests our alerts."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROMETHEUS = Path(__file__).parents[2] / "infra" / "prometheus"


@pytest.fixture(scope="module")
def promtool():
    """The binary of Debian's package, which is installed if it is missing."""
    if shutil.which("promtool") is None:
        for command in (["apt-get", "update", "-q"], ["apt-get", "install", "-q", "-y", "prometheus"]):
            subprocess.run(command, check=True, timeout=180, stdout=subprocess.DEVNULL)
    found = shutil.which("promtool")
    assert found is not None
    return found


@pytest.mark.parametrize(
    "arguments",
    [["check", "config", "prometheus.yml"], ["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]],
)
def test_the_tool_accepts_it(promtool, arguments):
    done = subprocess.run(
        [promtool, *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
