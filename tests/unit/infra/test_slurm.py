"""infra/slurm: options that sbatch documents, and a script that hands over and is queued again."""

import os
import re
import signal
import subprocess
from pathlib import Path

from tests.waiting import wait_for

SCRIPT = Path(__file__).parents[3] / "infra" / "slurm" / "workers.sbatch"
# Of https://slurm.schedmd.com/sbatch.html.
OPTIONS = {
    "job-name": r"[\w-]+", "ntasks-per-node": r"\d+", "cpus-per-task": r"\d+", "gpus-per-node": r"(\w+:)?\d+",
    "time": r"(\d+-)?\d+:\d\d:\d\d", "export": r"ALL|NONE", "requeue": "", "open-mode": "append|truncate",
    "output": r"[\w.%-]+", "signal": r"([RB]+:)?[A-Z0-9]+@\d+",
}  # fmt: skip


def test_every_option_is_one_of_sbatch_before_the_first_command():
    head, _, body = SCRIPT.read_text().partition("\nset -")
    assert "#SBATCH" not in body
    options = re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", head, re.MULTILINE)
    assert len(options) == head.count("\n#SBATCH ") == len(OPTIONS)
    for name, value in options:
        assert re.fullmatch(OPTIONS[name], value), name
    subprocess.run(["bash", "-n", SCRIPT], check=True, timeout=10)


def started(tmp_path, *arguments, **environment):
    """The script with stand-ins of srun, which keeps its arguments and kills its tasks at SIGTERM, and of Slurm's
    other commands."""
    for name, text in {
        "srun": 'trap "touch $OUT/killed; exit 1" TERM; trap "touch $OUT/term; exit 0" USR2; echo $$ > "$OUT/pid"\n'
        'echo "$@" > "$OUT/workers"; while :; do sleep 0.05; done',
        "scancel": 'echo "$@" > "$OUT/cancelled"; kill -USR2 "$(cat "$OUT/pid")"',
        "scontrol": 'echo "$@" > "$OUT/queue"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path), "SLURM_JOB_ID": "7", **environment}
    return subprocess.Popen(["bash", SCRIPT, *arguments], env=settings, stderr=subprocess.PIPE, text=True)


def test_workers_get_sigterm_at_the_notice_and_the_job_is_queued_again(tmp_path):
    addresses = {"PREFECT_API_URL": "http://127.0.0.1:1/api", "PIPELINERL_ROOT": "s3://bucket/runs"}
    job = started(tmp_path, "actors", **addresses, PIPELINERL_WORK_SECONDS="0")
    try:
        wait_for(lambda: (tmp_path / "workers").exists(), "the workers", seconds=20)
        job.send_signal(signal.SIGUSR1)
        job.communicate(timeout=20)
    finally:
        job.kill()
    assert "prefect worker start --pool" in (tmp_path / "workers").read_text()
    assert (tmp_path / "cancelled").read_text() == "--signal=TERM 7\n"
    assert (tmp_path / "term").exists()
    assert not (tmp_path / "killed").exists()
    assert (tmp_path / "queue").read_text() == "requeue 7\n"


def test_a_job_without_an_address_or_a_pool_ends_at_once(tmp_path):
    for arguments, environment in ((("actors",), {}), ((), {"PREFECT_API_URL": "x", "PIPELINERL_ROOT": "x"})):
        _, error = (job := started(tmp_path, *arguments, **environment)).communicate(timeout=20)
        assert job.returncode == 1
        assert ("PREFECT_API_URL" if arguments else "the pool") in error
