"""A run whose root is on S3 leaves the documented layout, readable by someone who knows only docs/storage.md."""

import json
import os
import socket
import subprocess
import sys

import duckdb
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from blake3 import blake3

from tests.integration.pipeline import ROOT
from tests.s3_server import ACCESS_KEY, SECRET_KEY

pytestmark = [pytest.mark.slow, pytest.mark.s3]

STEPS = 5
SMALL = [
    "trainer.groups_per_step=16", "engine.concurrency=64", "eval.num_prompts=40",
    # Few weights change in a step, and versions between two that are whole are differences.
    "weights.transport=object_store", "weights.durable_every=3", "model.dtype=bfloat16", "learner.lr=1e-5",
]  # fmt: skip
EVALUATION = [
    "eval.every_steps=3",
    "eval.subset=20",
    "eval.samples=2",
    "eval.greedy=true",
    "eval.sets.long.lengths=[6]",
]


def tokens_in_sql(run: str, root: str, environment: dict[str, str]) -> list[tuple[int, int]]:
    """(step, tokens of its trained rows), as `pipelinerl sql` reads them."""
    statement = (
        "select step, count(*) as n from tokens join rollouts using (step, group_id, rollout_index)"
        " where fate = 'trained' group by step order by step"
    )
    command = [sys.executable, "-m", "pipelinerl.flows.cli", "sql", run, statement, "--root", root, "--json"]
    asked = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, timeout=120, check=True)
    return [(row["step"], row["n"]) for row in json.loads(asked.stdout)["rows"]]


@pytest.mark.timeout(500)
def test_a_run_on_s3_leaves_the_documented_layout(s3_url, rclone_server, tmp_path, prepared_model):
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    command = [sys.executable, "-m", "pipelinerl.flows.cli", "train", "quickstart", f"trainer.steps={STEPS}"]
    command += [*SMALL, *EVALUATION, f"tracking.mlflow_uri=sqlite:///{tmp_path}/mlflow.db"]
    with (tmp_path / "log").open("w") as log:
        printed = subprocess.run(
            [*command, "--root", s3_url, "--json"],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, timeout=400,
        )  # fmt: skip
    assert printed.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    report = json.loads(printed.stdout)
    assert report["steps"] == STEPS

    files = fsspec.filesystem(
        "s3", key=ACCESS_KEY, secret=SECRET_KEY, endpoint_url=rclone_server.endpoint, use_listings_cache=False
    )
    run = f"{s3_url.removeprefix('s3://')}/{report['run_id']}"
    names = {path.removeprefix(f"{run}/").split("/")[0] for path in files.find(run)}
    assert names >= {"run.json", "epochs", "rollouts", "batches", "weights", "checkpoints", "commits", "evals"}
    assert names >= {"report.json", "report.html", "weights.parquet", "hub.json"}

    evaluations = {(evaluation["set"], evaluation["version"]): evaluation for evaluation in report["evaluations"]}
    assert {("", 0), ("", STEPS), ("long", 0), ("long", STEPS)} <= evaluations.keys()
    assert [evaluation["num_prompts"] for key, evaluation in evaluations.items() if key[1] in (0, STEPS)] == [40] * 4
    between = {key: evaluation for key, evaluation in evaluations.items() if 0 < key[1] < STEPS}
    assert {version for _, version in between} <= {3}
    own = {version for name, version in between if not name}
    assert own <= {version for name, version in between if name}, "the records of the sets come first"
    for evaluation in evaluations.values():
        assert evaluation["low"] <= evaluation["accuracy"] <= evaluation["high"] <= 1
        assert evaluation["accuracy"] <= evaluation["best"] <= 1
        assert evaluation["version"] == evaluation["last_version"], "an engine of its own pins the version"
        assert (evaluation["num_samples"], evaluation["errors"]) == (2, 0)
    assert files.exists(f"{run}/evals/{STEPS:08d}.long.json")

    database = duckdb.connect()
    database.register("trained", ds.dataset(f"{run}/batches", format="ipc", filesystem=files).to_table())
    tokens = database.sql(
        "select step, sum(len(completion_token_ids))::int from trained group by 1 order by 1"
    ).fetchall()
    assert tokens_in_sql(report["run_id"], s3_url, environment) == tokens
    database.register("rollouts", ds.dataset(f"{run}/rollouts", format="ipc", filesystem=files).to_table())
    ((num_groups, num_rows),) = database.sql("select count(distinct group_id), count(*) from rollouts").fetchall()
    assert num_rows == num_groups * 8
    missing = database.sql(
        "select count(*) from trained t anti join rollouts r "
        "on t.group_id = r.group_id and t.rollout_index = r.rollout_index and t.reward = r.reward"
    ).fetchall()
    assert missing == [(0,)], "every trained row is in a segment"
    last = json.loads(files.cat_file(sorted(files.glob(f"{run}/commits/{STEPS:08d}.*.json"))[-1]))
    assert last["manifest"]["key"].startswith(f"weights/{STEPS:08d}.")

    assert_difference(files, run)
    assert_audit(report["run_id"], s3_url, environment)
    assert_logs_on_another_host(report["run_id"], s3_url, tmp_path / "another-host", environment)


def assert_difference(files, run):
    manifests = [json.loads(files.cat_file(path)) for path in files.glob(f"{run}/weights/*/manifest.json")]
    manifest = next(manifest for manifest in manifests if manifest["delta"])
    words = np.frombuffer(files.cat_file(f"{run}/{manifest['delta']['base']['name']}"), np.uint16).copy()
    difference = pa.ipc.open_stream(files.cat_file(f"{run}/{manifest['key']}/{manifest['delta']['entry']['name']}"))
    for number, batch in enumerate(difference):
        places = 4_194_304 * number + np.cumsum(batch["gap"].to_numpy(), dtype=np.int64)
        words[places] = batch["value"].to_numpy()
    assert blake3(words.tobytes()).hexdigest() == manifest["files"][0]["digest"]


def assert_audit(run_id, root, environment):
    audited = subprocess.run(
        [sys.executable, "-m", "pipelinerl.flows.cli", "audit", run_id, "--root", root, "--json"],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    document = json.loads(audited.stdout)
    assert audited.returncode == 0, document["problems"]
    assert (document["commits"], document["lost"], document["trained_twice"]) == (STEPS + 1, 0, 0)


def assert_logs_on_another_host(run_id, root, temporary, environment):
    """`pipelinerl logs` where no role has written a log: the directory of the logs depends on TMPDIR."""
    temporary.mkdir()
    logs = subprocess.run(
        [sys.executable, "-m", "pipelinerl.flows.cli", "logs", run_id, "--root", root, "--json"],
        cwd=ROOT, env={**environment, "TMPDIR": str(temporary)}, stdout=subprocess.PIPE, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    roles = json.loads(logs.stdout)["roles"]
    assert roles.keys() >= {"hub", "trainer", "actor-0"}
    assert any(name.startswith("evaluator-") for name in roles)
    for log in roles.values():
        assert (log["is_here"], log["host"]) == (False, socket.gethostname())
        assert log["last_lines"]
