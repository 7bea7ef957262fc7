"""Roles start without libraries that transformers imports and no role uses."""

import subprocess
import sys

CODE = """
import sys
import pipelinerl_core.roles.trainer.main
print(sorted({"sklearn", "scipy", "pandas"} & sys.modules.keys()), "transformers.modeling_utils" in sys.modules)
import scipy.linalg, sklearn.metrics  # as code of a user may do
"""


def test_a_role_starts_without_scikit_learn_and_scipy_which_its_user_can_import():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == "[] True", done.stderr
    assert done.returncode == 0, done.stderr
