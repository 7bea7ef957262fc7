"""Other libraries on the task of a comparison: each with each seed a child process, alone on the machine.

Their results stay under <root>/peers/<name>-s<seed>/, and are found again there (pipelinerl_core/tracking/peers.py).
"""

import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelinerl_core.config.model_path import seeded_path
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.tracking.peers import PEERS_PREFIX, peer_key, read_peer
from tasks.commands import guarded
from tasks.comparison import Wanted
from tasks.runs import local_directory, root_url

logger = logging.getLogger(__name__)

PEERS = ("trl", "sequential")
"""trl: GRPOTrainer of TRL (`make bench-peers` installs it); sequential: plain generate, then a step."""
MAX_SECONDS = 900.0
"""A peer that has not reached the target within this time of training stops."""
_START_SECONDS = 300.0
_MODULE = "pipelinerl_core.testing.peers"


def parse_peers(text: str) -> tuple[str, ...]:
    """Example: "trl,sequential"; ConfigError for a name that is none."""
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"--peers {name}: no such peer; there are {', '.join(PEERS)}")
    return names


def run_peers(names: Sequence[str], wanted: Wanted, root: str) -> None:
    """Run and evaluate what is not there yet. Raises PipelineRLError when a peer fails."""
    store = open_store(root_url(root))
    directory = local_directory(store.url)
    if directory is None:
        raise ConfigError(f"--peers writes to a local directory, --root is {store.url}. Give a path")
    for seed in wanted.seeds:
        for name in names:
            if read_peer(store, name, seed) is None:
                _run_peer(name, seed, wanted, directory / PEERS_PREFIX / f"{name}-s{seed}")
                assert store.exists(peer_key(name, seed))


def _run_peer(name: str, seed: int, wanted: Wanted, out: Path) -> None:
    model = seeded_path("builtin:sums", seed)
    arguments = ["--out", str(out), "--seed", str(seed), "--model", model, "--target", str(wanted.target)]
    _run(name, [name, "--preset", wanted.source, *arguments, "--max-seconds", str(MAX_SECONDS), *wanted.overrides])
    _run(name, ["evaluate", "--out", str(out)])


def _run(name: str, arguments: Sequence[str]) -> None:
    logger.info("%s: %s", name, " ".join(arguments))
    command = guarded([sys.executable, "-m", _MODULE, *arguments])
    try:
        code = subprocess.run(command, check=False, timeout=MAX_SECONDS + _START_SECONDS).returncode
    except subprocess.TimeoutExpired:
        raise PipelineRLError(f"{name}: not done after {MAX_SECONDS + _START_SECONDS:.0f} s") from None
    if code:
        raise PipelineRLError(f"{name} failed with exit code {code}; its lines above say why")
