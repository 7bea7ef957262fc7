"""Configuration: one place for every default, one line for every mistake."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pipelinerl_core.algo.losses import LOSSES
from pipelinerl_core.config import RunConfig, as_toml, known_keys, preset_names
from pipelinerl_core.config.load import fields
from pipelinerl_core.config.losses import ReinforceLoss
from pipelinerl_core.config.prompts import SumsPrompts
from pipelinerl_core.config.rules import empty_slots, lag_of_full_engines
from pipelinerl_core.config.sections import TrackingConfig
from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config, load_config, override_config, resume_config

GOLDEN = Path(__file__).parents[2] / "golden" / "config_keys.txt"
TURNS, BFLOAT = "placement.share_gpu=turns", "model.dtype=bfloat16"


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_resolves_and_reads_back_equal(preset):
    config = load_config(preset)
    assert build_config(tomllib.loads(as_toml(config))) == config


def test_the_preset_of_dapo_has_the_four_parts_of_the_paper():
    config = load_config("dapo-1.5b-1gpu")
    assert (config.loss.kind, config.loss.clip_low, config.loss.clip_high) == ("dapo", 0.2, 0.28)
    assert config.loss.normalization == "token"
    assert config.rollouts.filter_zero_variance
    assert 0 < config.reward.overlong_tokens < config.rollouts.max_tokens
    assert config.loss.kl_coefficient == 0


def test_overrides_win_over_the_preset_and_keep_their_types():
    config = load_config(
        "quickstart", ["trainer.steps=20", "prompts.lengths=[2, 3]", "model.path=my/model", "seed=7"]
    )
    assert (config.trainer.steps, config.prompts.lengths, config.model.path, config.seed) == (
        20,
        (2, 3),
        "my/model",
        7,
    )


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("tracking.experiment=2024-05-01", "2024-05-01"),
        ("tracking.experiment=7", "7"),
        ("tracking.experiment=true", "true"),
        ('tracking.experiment="7"', "7"),
        ("model.path=123", "123"),
        ("model.path=1e5", "1e5"),
        ("prompts.lengths=2,3", (2, 3)),
        ("prompts.lengths=2, 3", (2, 3)),
        ("prompts.lengths=4", (4,)),
        ("prompts.lengths=[2, 3]", (2, 3)),
        ("environment.command=sleep,5", ("sleep", "5")),
        ("environment.command=sleep", ("sleep",)),
        ('environment.command="a,b"', ("a,b",)),
        ('environment.command="python","-c","print(1,2)"', ("python", "-c", "print(1,2)")),
    ],
)
def test_an_override_takes_the_type_of_its_key(override, value):
    section, name = override.partition("=")[0].split(".")
    kind = ["environment.kind=command"] if section == "environment" else []
    assert getattr(getattr(load_config("quickstart", [*kind, override]), section), name) == value


def test_keys_of_parts_and_sets_have_the_types_of_the_keys_of_a_run():
    config = load_config("quickstart", ["eval.sets.long.lengths=8,20", "mixture.a.prompts.lengths=2",
                                        "mixture.a.weight=2", "mixture.b.prompts.lengths=3,4"])  # fmt: skip
    assert config.with_set("long").prompts.lengths == (8, 20)
    assert [config.with_part(name).prompts.lengths for name in "ab"] == [(2,), (3, 4)]


@pytest.mark.parametrize(
    "override", ["environment.command=[sleep,5]", "prompts.lengths=[2, x]", "prompts.lengths=2;3"]
)
def test_a_list_with_a_mistake_is_refused(override):
    with pytest.raises(ConfigError, match="valid tuple"):
        load_config("quickstart", [*(["environment.kind=command"] if "command" in override else []), override])


@pytest.mark.parametrize("override", ["seed=-1", "seed=99999999999999999999", "learner.lr=inf", "learner.lr=nan",
                                      "rollouts.temperature=inf", "environment.options.limit=inf",
                                      "environment.options.limits=[1.0, nan]"])  # fmt: skip
def test_a_number_that_some_library_refuses_later_is_refused_at_once(override):
    with pytest.raises(ConfigError) as refused:
        load_config("quickstart", [override])
    assert str(refused.value).startswith(override.partition("=")[0])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
def test_a_file_of_another_editor_is_read(tmp_path, encoding):
    text = "# café\r\n[trainer]\r\nsteps = 3\r\n"
    path = tmp_path / "own.toml"
    path.write_bytes((b"\xff\xfe" if encoding == "utf-16-le" else b"") + text.encode(encoding))
    assert load_config(str(path)).trainer.steps == 3


def test_a_file_in_an_unknown_encoding_is_one_line(tmp_path):
    path = tmp_path / "own.toml"
    path.write_bytes("# café\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"own\.toml: cannot be read: .* Write the file in UTF-8$"):
        load_config(str(path))


@pytest.mark.parametrize("chosen", ["auto", "true", "false"])
def test_activations_are_recomputed_on_a_gpu_if_packs_are_long(chosen):
    key = f"learner.activation_checkpointing={chosen}"
    config = load_config("quickstart", [key])
    assert build_config(tomllib.loads(as_toml(config))) == config
    assert build_config(config.model_dump(mode="json")) == config
    long = [["trainer.pack_tokens=8192"], ["rollouts.max_tokens=8152"]]
    configs = [load_config("quickstart", [key, *more]) for more in ([], *long)]
    on_gpu = {"auto": [False, True, True], "true": [True] * 3, "false": [False] * 3}[chosen]
    assert [variant.checkpoints_activations("cuda") for variant in configs] == on_gpu
    assert [variant.checkpoints_activations("cpu") for variant in configs] == [chosen == "true"] * 3


def test_another_kind_forgets_the_keys_of_the_old_kind():
    assert load_config("gsm8k-0.5b-1gpu", ["prompts.kind=sums"]).prompts == SumsPrompts()
    with pytest.raises(ConfigError, match=r"prompts\.lengths needs prompts\.kind=sums \(it is file\)"):
        load_config("quickstart", ["prompts.lengths=[2]", "prompts.kind=file", "prompts.path=a.jsonl"])


def test_another_engine_keeps_the_keys_that_both_have():
    changed = load_config("math-7b-16gpu", ["engine.kind=embedded", "weights.transport=object_store"])
    assert not hasattr(changed.engine, "kv_gigabytes")
    assert changed.engine.kv == load_config("math-7b-16gpu").engine.kv


def test_rows_of_a_file_keep_columns_and_template_of_rows_of_the_hub():
    preset = load_config("gsm8k-0.5b-1gpu").prompts
    changed = load_config("gsm8k-0.5b-1gpu", ["prompts.kind=file", "prompts.path=a.jsonl"]).prompts
    assert (changed.template, changed.prompt_column) == (preset.template, "question")
    assert not hasattr(changed, "config_name")
    with pytest.raises(ConfigError, match=r"prompts\.path: not set"):
        load_config("gsm8k-0.5b-1gpu", ["prompts.kind=file"])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("steps=3", "steps: no such key; did you mean trainer.steps?"),
        ("kind=x", "did you mean engine.kind, environment.kind,"),
        ("trainer.step=3", "did you mean trainer.steps?"),
        ("engin.concurrency=3", "no such key; did you mean engine?"),
        ("trainer.steps=abc", "trainer.steps='abc'"),
        ("learner.activation_checkpointing=on", "activation_checkpointing=on: must be auto, true or false"),
        ("trainer.steps=0", "greater than or equal to 1"),
        ("engine.tensor_parallel=2", "Set engine.kind=vllm"),
        ("prompts.system=Count.", "prompts.system='Count.' is a message of a chat template"),
        ("learner.zero_stage=2", "Set learner.kind=deepspeed"),
        ("learner.offload=optimizer", "Set learner.kind=deepspeed"),
        ("learner.lora_alpha=16", "Set learner.lora_rank too"),
        ('learner.lora_targets=["q_proj"]', "Set learner.lora_rank too"),
        ("weights.content=adapters", "but learner.lora_rank=0 trains no adapters. Set learner.lora_rank too"),
        ("trainer.ranks=0", "greater than or equal to 1"),
        ("rollouts.top_p=0.9", "Set rollouts.top_p=1"),
        ("rollouts.group_size=1", "rollouts.group_size=1"),
        ("engine.kind=vlm", "engine.kind=vlm: must be embedded or vllm"),
        ("engine.kv=maybe", "engine.kv=maybe: must be keep, recompute or drain"),
        (
            "prompts.kind=foo",
            "prompts.kind=foo: must be sums, largest_number, reasoning_gym, environment, file or huggingface",
        ),
        ("loss.kind=foo", "loss.kind=foo: must be reinforce, cispo, ppo,"),
        ("prompts.path=a.jsonl", "prompts.path needs prompts.kind=file or huggingface (it is sums)"),
        ("loss.clip_low=0.1", "loss.clip_low needs loss.kind=cispo, ppo, grpo,"),
        (
            "prompts.dataset=gsm8k",
            "did you mean prompts.path? prompts.path needs prompts.kind=file or huggingface (it is sums)",
        ),
        ("loss.kl=1", "loss.kl: no such key. `pipelinerl config --keys`"),
        ("learner.learning_rate=1", "did you mean learner.lr? `pipelinerl"),
        ("prompts.kind=file", "prompts.path: not set. Set prompts.path, or another prompts.kind"),
        ("prompts.length=[3]", "did you mean prompts.lengths?"),
        ("trainer.steps", "not an override"),
        ("seed.x=1", "seed is a value"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_remedy(override, says):
    with pytest.raises(ConfigError) as raised:
        load_config("quickstart", [override])
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_resume_may_change_the_resources_and_the_length_of_a_run_and_nothing_else():
    config = load_config("quickstart", ["trainer.ranks=2", "learner.lr=1e-3"])
    changed = resume_config(config, ["trainer.ranks=1", "learner.kind=deepspeed", "placement.actors=1"])
    assert (changed.trainer.ranks, changed.learner.kind) == (1, "deepspeed")
    assert changed.learner.lr == 1e-3  # another kind of learner has the same keys
    assert changed.arithmetic != config.arithmetic
    for override in ("loss.kind=gspo", "learner.lr=1", "seed=3"):
        with pytest.raises(ConfigError, match="a resume can change only"):
            resume_config(config, [override])


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean quickstart"):
        load_config("quickstrat")
    with pytest.raises(ConfigError, match="no such file"):
        load_config("nowhere.toml")


def test_admission_window_is_the_documented_formula():
    config = load_config("quickstart", ["schedule.max_lag=3", "trainer.groups_per_step=32", "engine.concurrency=64"])
    assert config.window_groups == (3 + 1) * 32


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([TURNS, "placement.actors=2"], r"Set both to 1, or share_gpu=false"),
        ([TURNS, "placement.kind=work_pools"], r"Set placement\.kind=local"),
        ([TURNS, "eval.on=own"], r"Set eval\.on=actors"),
        ([TURNS, "learner.kind=deepspeed", "learner.zero_stage=1", BFLOAT], r"Set learner\.kind=torch"),
        (["placement.share_gpu=sometimes"], r"share_gpu"),
        (["placement.trainer_nodes=2", "trainer.ranks=2"], r"Set placement\.kind=work_pools"),
        (["placement.trainer_nodes=2", "trainer.ranks=3", "placement.kind=work_pools"], r"a multiple of 2"),
        (["learner.kind=deepspeed", "model.dtype=bfloat16"], r"Set learner\.zero_stage to at least 1"),
        (["learner.kind=deepspeed", "learner.offload=optimizer"], r"Set learner\.zero_stage=1"),
        (["learner.kind=deepspeed", "learner.zero_stage=2", "learner.offload=parameters"], r"learner\.zero_stage=3"),
        (["weights.publish_every=3", "schedule.max_lag=1"], r"schedule\.max_lag to at least 2"),
        (["schedule.kind=conventional", "schedule.steps_per_phase=3"], r"Set schedule\.max_lag=2, or.*phase=1"),
        (["schedule.steps_per_phase=3"], "Set schedule.kind=conventional"),
        (["schedule.kind=april", "schedule.alpha=1.5"], r"alpha=1\.5 keeps.*Set schedule\.max_lag=1, or"),
        (["schedule.kind=april", "schedule.alpha=0.5"], "alpha=0.5: input should be greater than or equal to 1"),
        (["schedule.kind=april", "schedule.alpha=1", "schedule.stale=wait"], "Set schedule.stale=mask or drop"),
        (["schedule.kind=april", "schedule.alpha=1", "engine.kv=drain"], "Set engine.kv=keep or recompute"),
        (["schedule.kind=conventional", "schedule.max_lag=4", "weights.publish_every=2"], "publish_every=1"),
        (["emulation.accelerators=1"], "emulation.generators lower"),
        (["placement.cores=own", "placement.kind=work_pools", "schedule.max_lag=4"], "Set placement.cores=shared"),
    ],
)  # fmt: skip
def test_schedules_that_contradict_themselves_are_refused_in_one_line(overrides, says):
    with pytest.raises(ConfigError, match=says) as raised:
        load_config("quickstart", ["schedule.max_lag=0", *overrides])
    assert "\n" not in str(raised.value)


def test_slots_that_the_schedule_leaves_empty_are_told():
    assert empty_slots(load_config("quickstart")) == []
    (line,) = empty_slots(load_config("quickstart", ["schedule.max_lag=0", "engine.concurrency=1024"]))
    assert "has room for 128 groups, of which schedule.max_lag=0 admits 64" in line
    assert line.endswith("schedule.max_lag=1 fills them")


ENVIRONMENT = "environment.path=my_env.py:Guess"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["environment.workers=2", "environment.options.a=1"],
         r"environment\.workers, environment\.options: not used.*Set environment\.path too"),
        (["environment.path=my_env.py"], "names no class. Write FILE.py:CLASS"),
        (["environment.path=my_env:"], "names no class"),
        ([ENVIRONMENT, "reward.function=a.py:b"], r"reward\.function=a\.py:b chooses a verifier. Remove one"),
        ([ENVIRONMENT, "reward.kind=exact_match"], r"reward\.kind=exact_match chooses a verifier. Remove one"),
        ([ENVIRONMENT, 'environment.variables=["PIPELINERL_TOKEN"]'], "'PIPELINERL_TOKEN', which a user's code"),
        ([ENVIRONMENT, "reward.weights.a=nan"], r"reward\.weights\.a=nan: input should be a finite number"),
        ([ENVIRONMENT, "environment.max_turns=0"], "greater than or equal to 1"),
        (["reward.weights.a=1"], "Set reward.function too"),
        (["reward.network=true"], "Set reward.function too"),
    ],
)  # fmt: skip
def test_an_environment_that_contradicts_other_keys_is_refused_in_one_line(overrides, says):
    with pytest.raises(ConfigError, match=says) as raised:
        load_config("quickstart", overrides)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("path", ["my_env.py:Guess", "some.package:Guess", "builtin:guess"])
def test_an_environment_may_be_a_file_a_module_or_builtin_and_its_weights_may_be_replaced(path):
    options = ["environment.options.limit=5", "reward.weights.solved=2"]
    config = load_config("quickstart", [f"environment.path={path}", *options])
    assert config.environment.options == {"limit": 5}
    assert build_config(tomllib.loads(as_toml(config))) == config
    assert verifier_name(config) == path


def test_phases_end_where_versions_are_announced():
    config = load_config(
        "quickstart", ["schedule.kind=conventional", "schedule.steps_per_phase=4", "trainer.steps=10"]
    )
    assert [config.phase_end(step) for step in range(1, 11)] == [4, 4, 4, 4, 8, 8, 8, 8, 10, 10]
    assert [step for step in range(11) if config.publishes(step)] == [0, 4, 8, 10]
    assert [step for step in range(5) if load_config("quickstart").publishes(step)] == [0, 1, 2, 3, 4]


def test_engines_that_stand_still_hand_their_threads_to_the_trainer():
    assert load_config("quickstart").trainer_threads == 1
    assert not load_config("quickstart", [TURNS]).paces_engines  # it has the GPU alone
    turns = ["schedule.kind=conventional", "placement.actors=2"]
    assert load_config("quickstart", turns).trainer_threads == 3
    assert load_config("quickstart", [*turns, "placement.cores=own"]).trainer_threads == 1
    assert load_config("quickstart", ["trainer.threads=2"]).trainer_threads == 2


def test_the_lag_of_full_engines_is_the_documented_formula():
    # docs/scheduling.md: 1 + ceil(1 * 192 * 6.9 / (8 * 64)) = 1 + ceil(2.59)
    assert lag_of_full_engines(load_config("quickstart"), spread=6.9) == 4


def test_every_key_has_help():
    assert [key for key, info in fields() if not info.description] == []


def test_adapters_alone_are_not_broadcast():
    adapters = ["learner.lora_rank=8", "weights.content=adapters"]
    load_config("quickstart", [*adapters, "weights.transport=object_store"])
    with pytest.raises(
        ConfigError, match=r"weights.content=adapters must be merged first\. Set weights.transport=shm"
    ):
        load_config("quickstart", [*adapters, "weights.transport=nccl", "engine.kind=vllm"])


def test_an_engine_that_drains_first_receives_no_broadcast():
    with pytest.raises(ConfigError, match=r"engine\.kv=drain first finishes .* Set engine\.kv=keep"):
        load_config("quickstart", ["engine.kind=vllm", "engine.kv=drain", "weights.transport=nccl"])


def test_no_key_appears_unannounced():
    assert known_keys() == GOLDEN.read_text().split()


def test_configuration_imports_no_heavy_library():
    heavy = "('torch', 'pyarrow', 'transformers')"
    code = f"import sys, pipelinerl_core.config; print([name for name in {heavy} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert printed.stdout.strip() == "[]"


def test_sections_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().trainer.steps = 3


def test_a_key_with_a_line_break_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^model\.a\\nb: no such key"):
        build_config({"model": {"a\nb": 1}})


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_has_its_own_options_and_survives_serialization(kind):
    config = load_config("quickstart", [f"loss.kind={kind}"])
    assert config.loss.kind == kind
    assert build_config(config.model_dump(mode="json")) == config
    assert override_config(config, ["loss.kind=reinforce"]).loss == ReinforceLoss()


def test_a_loss_without_a_kind_is_the_default_loss():
    assert load_config("quickstart", ["loss.ratio_max=2"]).loss == ReinforceLoss(ratio_max=2.0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["loss.kind=ppo", "loss.ratio_max=2"],
            r"loss.ratio_max needs loss.kind=reinforce, icepop, .* or sequence_product \(it is ppo\)",
        ),
        (["loss.clip_low=0.1"], "loss.clip_low needs loss.kind=cispo"),
        (["loss.kind=gspo", "loss.clip_high=0"], "loss.clip_high=0: input should be greater than 0"),
        (["loss.kind=pop"], "loss.kind=pop: must be reinforce, cispo"),
        (["loss.dual_clip=3"], "loss.dual_clip needs loss.kind=ppo, grpo, dr_grpo, dapo, gspo or decoupled_ppo"),
        (["loss.kind=ppo", "loss.dual_clip=1"], "would leave no gradient to negative advantages"),
        (["loss.sequence_ratio_max=1"], "would leave out every rollout"),
        (["loss.advantage=max_likelihood", "reward.overlong_tokens=4"], "divides by the mean reward of a group"),
        (["reward.overlong_tokens=1000"], "every completion would be overlong"),
        *[
            (["rollouts.filter_zero_variance=true", f"loss.{term}"], rf"gradient with loss\.{term}\. Set rollouts")
            for term in ("advantage=value", "kl_coefficient=0.1", "entropy_bonus=0.1")
        ],
    ],
)
def test_an_option_that_a_loss_does_not_read_is_one_line(overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config("quickstart", overrides)
    assert "\n" not in str(caught.value)


def test_an_mlflow_uri_that_is_not_set_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert TrackingConfig().chosen_uri == "http://mlflow:5000"
    assert TrackingConfig(mlflow_uri="none").chosen_uri == "none"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert TrackingConfig().chosen_uri == ""


@pytest.mark.parametrize("text", [b'path="\xe9.jsonl"', b"x=" + b"[" * 5000, b"steps=" + b"1" * 5000])
def test_a_file_that_is_no_toml_is_one_line(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=r"mine\.toml: (not valid TOML|cannot be read): ") as caught:
        load_config(str(path))
    assert "\n" not in str(caught.value)
