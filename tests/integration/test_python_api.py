"""The notebook of the documentation, cell by cell, and what the Python interface does with a run afterwards."""

import ast
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

import pipelinerl
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.commits import read_commits
from pipelinerl_core.run.local_files import parent_of
from pipelinerl_core.run.records import RUN_KEY
from pipelinerl_core.storage.digests import digest
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.tools.export import export
from pipelinerl_core.tools.start_from import start_from
from tests.models import file_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "first-run.ipynb"
GROUPS = 4


def run_cell(source: str, names: dict) -> object:
    """Run a cell; returns the value of its last expression, as a notebook shows it."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names) if last else None


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """(names, values) after the notebook has run in an empty directory, with fewer rollouts."""
    directory = tmp_path_factory.mktemp("notebook")
    names: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.delenv("PIPELINERL_ROOT", raising=False)
        text = NOTEBOOK.read_text().replace("groups_per_step=16", f"groups_per_step={GROUPS}")
        cells = json.loads(text.replace("eval.num_prompts=64", "eval.num_prompts=16"))["cells"]
        values = [run_cell("".join(cell["source"]), names) for cell in cells if cell["cell_type"] == "code"]
    return names, values


def test_the_notebook_trains_reads_and_exports_a_run(shown):
    names, values = shown
    assert values[0] == (12, 4)
    assert values[2] == ("finished", 12)
    assert values[-1] == (True, "finished", True)
    assert names["metrics"].column("step").to_pylist() == list(range(1, 13))
    assert names["metrics"].column("tokens/generated").to_pylist()[-1] > 0
    assert set(names["rows"]["step"]) == {12}
    assert len(names["rows"]) == GROUPS * 8
    row = names["rows"].iloc[0]
    assert row["prompt"][:1].isdigit()
    assert (names["directory"] / "config.json").is_file()
    assert [evaluation["version"] for evaluation in names["run"].evaluations()] == [0, 12]


def test_another_run_starts_from_the_weights_and_the_configuration(shown, monkeypatch, tmp_path):
    run = shown[0]["run"]
    monkeypatch.setattr("pipelinerl_core.tools.start_from.cache_directory", lambda: tmp_path)
    said: list[str] = []
    source, overrides = start_from(f"{run.url}@12", "", ["learner.lr=1e-6"], "", said.append)
    config = load_config(source, overrides)
    (exported,) = (tmp_path / "branches").glob(f"{run.id}-12-*")
    assert config.model.path == str(exported / "model")
    assert config.learner.lr == 1e-6
    assert config.trainer == run.config.trainer
    assert parent_of(config) == f"{run.id}@12"
    assert parent_of(run.config) == ""
    assert len(said) == 1
    before = (Path(config.model.path) / "model.safetensors").stat().st_mtime_ns
    again = start_from(run.url, "quickstart", [], "", said.append)
    assert again == ("quickstart", (f"model.path={config.model.path}",))
    assert (Path(config.model.path) / "model.safetensors").stat().st_mtime_ns == before
    shutil.rmtree(config.model.path)

    def another_export(url: str, partial: Path, version: str) -> None:
        export(url, partial, version)
        shutil.copytree(partial, config.model.path)

    monkeypatch.setattr("pipelinerl_core.tools.start_from.export", another_export)
    assert start_from(run.url, "quickstart", [], "", said.append) == again
    assert [path.name for path in exported.iterdir() if path.is_dir()] == ["model"]
    with pytest.raises(ConfigError, match="--version 13: no such step"):
        start_from(f"{run.url}@13", "", [], "", said.append)


def test_a_step_that_was_not_stored_is_exported_with_the_weights_of_the_run(shown, tmp_path):
    run = shown[0]["run"]
    step = max(set(range(1, 12)) - set(run.versions()))
    written = load_file(run.export(tmp_path / "exported", step) / "model.safetensors")
    commit = read_commits(open_store(run.url))[step]
    assert digest(file_of(written)) == commit.weights_digest


def test_rollouts_are_read_by_step_and_without_text(shown):
    run = shown[0]["run"]
    ids = run.rollouts([2, 3], text=False)
    assert set(ids.column("step").to_pylist()) == {2, 3}
    assert "completion" not in ids.column_names
    assert run.rollouts().num_rows == 12 * GROUPS * 8
    with pytest.raises(ConfigError, match="step 13 is not committed; steps 1 to 12 are"):
        run.rollouts(13)


def test_a_finished_run_can_be_neither_stopped_nor_resumed_further(shown):
    run = shown[0]["run"]
    assert not run.is_running
    with pytest.raises(ConfigError, match="not live"):
        run.stop()
    assert run.resume().wait(300)["state"] == "finished"


def test_a_refused_start_is_one_error_and_leaves_no_run(tmp_path):
    with pytest.raises(ConfigError, match="no such directory"):
        pipelinerl.start("quickstart", [f"model.path={tmp_path}/none"], root=str(tmp_path / "runs"))
    assert list(tmp_path.rglob(RUN_KEY)) == []


@pytest.mark.campaign
def test_stop_now_ends_all_processes_and_resume_continues(tmp_path):
    overrides = ["trainer.steps=400", "eval.num_prompts=0"]
    run = pipelinerl.start("quickstart", overrides, root=str(tmp_path))
    with pytest.raises(TimeoutError):
        run.wait(0.5)
    run.stop(now=True)
    assert not run.is_running
    with pytest.raises(ConfigError, match="was not started by this process"):
        pipelinerl.open_run("latest", str(tmp_path)).stop(now=True)
    again = run.resume()
    assert again.id == run.id
    again.stop(now=True)
    assert not again.is_running
    assert issubclass(ConfigError, PipelineRLError)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: pipelinerl.load_config(3), "source is 3, but must be text or a path"),
    (lambda: pipelinerl.load_config("quickstart", "trainer.steps=3"), "overrides is 'trainer.steps=3', but"),
    (lambda: pipelinerl.load_config("quickstart", [3]), "overrides is [3], but must be a list such as"),
    (lambda: pipelinerl.start("quickstart", root=3), "root is 3, but must be text or a path"),
    (lambda: pipelinerl.start({"trainer": {}}), "config is {'trainer': {}}, but must be text or a path"),
    (lambda: pipelinerl.open_run(None), "run is None, but must be text or a path"),
    (lambda: pipelinerl.runs(limit="a"), "limit is 'a', but must be a whole number"),
    (lambda: pipelinerl.Run("memory://x").wait("a"), "timeout_seconds is 'a', but must be a number"),
    (lambda: pipelinerl.Run("memory://x").export(3), "directory is 3, but must be text or a path"),
    (lambda: pipelinerl.Run("memory://x").resume("a=1"), "overrides is 'a=1', but must be a list"),
])  # fmt: skip
def test_an_argument_of_another_type_is_one_line(call, message):
    with pytest.raises(ConfigError) as caught:
        call()
    assert str(caught.value).startswith(message)


def test_paths_and_numbers_of_numpy_are_taken(tmp_path):
    (tmp_path / "mine.toml").write_text("[trainer]\nsteps = 7\n")
    overrides = (f"seed={number}" for number in (1, 2))
    config = pipelinerl.load_config(tmp_path / "mine.toml", overrides)
    assert (config.trainer.steps, config.seed) == (7, 2)
    assert pipelinerl.runs(tmp_path, limit=np.int64(3)) == []


def test_a_step_is_a_whole_number(shown):
    run = shown[0]["run"]
    assert run.rollouts(np.int64(2), text=False).num_rows == run.rollouts(np.arange(2, 3), text=False).num_rows
    with pytest.raises(ConfigError, match=r"a step is 1\.5, but must be a whole number"):
        run.rollouts(1.5)
