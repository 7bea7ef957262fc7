"""Imports transformers without scikit-learn and scipy, which take a fifth of the CPU time of a role's start.

If these two are installed, as they are beside MLflow, transformers imports them for assisted generation and for
losses of object detection. No role uses either. Afterwards, code of a user can import them as always; transformers
does not use them in this process.
"""

import importlib
import sys

_UNUSED = ("sklearn", "scipy")
_USERS = ("transformers.generation.candidate_generator", "transformers.loss.loss_utils")


def _import_without() -> None:
    hidden = [name for name in _UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: such a package is not installed
    try:
        for name in _USERS:
            importlib.import_module(name)
    finally:
        for name in hidden:
            del sys.modules[name]


_import_without()
