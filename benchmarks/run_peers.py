"""Runs reference libraries on the task of a comparison: one child process per library and seed, one at a time.

The results are stored under <root>/peers/<name>-s<seed>-<digest of the settings>/; peer_points.py reads them.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peer_points import PEERS_PREFIX, read_peer
from pipelinerl_core.comparison.analysis import ComparedRun
from pipelinerl_core.comparison.plan import PlannedRun, Wanted, digest_of
from pipelinerl_core.config.arm import Arm, read_arms
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.models.paths import seeded_path
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.locate import local_directory, root_url
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision.role_commands import ending_with_parent
from pipelinerl_core.supervision.temporary_directories import own_temporary

logger = logging.getLogger(__name__)

PEERS = ("trl", "sequential")
"""trl: GRPOTrainer of TRL (`make bench-peers` installs it); sequential: alternates `generate` and optimizer steps."""
MAX_SECONDS = 900.0
"""Limit of training time; a library that has not reached the target by then stops."""
_START_SECONDS = 300.0
_MODULE = "benchmarks.peers"


def own_arms(name: str) -> list[Arm]:
    """The arms of a file of benchmarks/arms, by name without suffix."""
    return read_arms(str(Path(__file__).parent / "arms" / f"{name}.toml"))


def parse_peers(text: str, suite: Sequence[str], user: Sequence[str]) -> tuple[Arm, ...]:
    """Parse names such as "trl,sequential" to arms with settings of suite, library and user; later settings win.

    Raises ConfigError for an unknown name.
    """
    own = {arm.name: arm.overrides for arm in own_arms("peers")}
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"--peers {name}: no such peer; there are {', '.join(PEERS)}")
    return tuple(Arm(name, (*suite, *own.get(name, ()), *user)) for name in names)


def peer_runs(peers: Sequence[Arm], wanted: Wanted) -> list[PlannedRun]:
    """The runs, ordered by seed. The name of a run contains a digest of the settings and the target."""
    return [_planned(peer, seed, wanted) for seed in wanted.seeds for peer in peers]


def run_peers(peers: Sequence[Arm], wanted: Wanted, root: str) -> list[ComparedRun]:
    """All runs; trains and evaluates those that are not stored yet. Raises PipelineRLError if a library fails."""
    store = open_store(root_url(root))
    directory = local_directory(store.url)
    if directory is None:
        raise ConfigError(f"--peers writes to a local directory, --root is {store.url}. Give a path")
    overrides = {peer.name: peer.overrides for peer in peers}
    runs: list[ComparedRun] = []
    for run in peer_runs(peers, wanted):
        if (stored := read_peer(store, run.run_id)) is None:
            _run_peer(run, overrides[run.arm], wanted, directory / PEERS_PREFIX / run.run_id)
            stored = read_peer(store, run.run_id)
        assert stored is not None
        runs.append(stored)
    return runs


def _planned(peer: Arm, seed: int, wanted: Wanted) -> PlannedRun:
    config = load_config(wanted.source, [*peer.overrides, f"seed={seed}"])
    digest = digest_of([config.model_dump(mode="json"), wanted.target])
    return PlannedRun(arm=peer.name, seed=seed, config=config, run_id=f"{peer.name}-s{seed}-{digest}")


def _run_peer(run: PlannedRun, overrides: Sequence[str], wanted: Wanted, out: Path) -> None:
    model = seeded_path("builtin:sums", run.seed)
    arguments = ["--out", str(out), "--seed", str(run.seed), "--model", model, "--target", str(wanted.target)]
    _run(run.arm, [run.arm, "--preset", wanted.source, *arguments, "--max-seconds", str(MAX_SECONDS), *overrides])
    _run(run.arm, ["evaluate", "--out", str(out)])


def _run(name: str, arguments: Sequence[str]) -> None:
    logger.info("%s: %s", name, " ".join(arguments))
    command = ending_with_parent([sys.executable, "-m", _MODULE, *arguments])
    try:
        with own_temporary(os.environ) as own:
            code = subprocess.run(command, env=own, check=False, timeout=MAX_SECONDS + _START_SECONDS).returncode
    except subprocess.TimeoutExpired:
        raise PipelineRLError(f"{name}: not done after {MAX_SECONDS + _START_SECONDS:.0f} s") from None
    if code:
        raise PipelineRLError(f"{name} failed with exit code {code}; its lines above say why")
