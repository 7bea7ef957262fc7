"""Other ways to train the same model on the same prompts, measured as our runs are, for `bench learning`.

Each is a module to be run: it trains, keeps the weights of every k-th step and writes points.json (record.py);
evaluate.py adds their held-out accuracy afterwards. What they share with our runs is in task.py.
"""

import os
import sys
from pathlib import Path

# Before any import of Hugging Face's libraries: models are local, and nobody is told of the measurement.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# Before torch: continuous batching has a second pool of threads, and two that spin take five times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# What only peers need: `make bench-peers` puts it here, so that it is no part of our own environment.
PACKAGES = Path(__file__).parents[3] / ".bench-packages"
sys.path.append(str(PACKAGES))
