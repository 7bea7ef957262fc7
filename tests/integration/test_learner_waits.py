"""A pack of the DeepSpeed learner asks the device for nothing either, its own code included."""

import os
import subprocess
import sys

import pytest

from tests.integration.pipeline import ROOT

pytestmark = pytest.mark.slow


def test_a_pack_under_zero_waits_for_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.waiting_case"],
        cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
