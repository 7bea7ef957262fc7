"""Out of memory on a GPU: one line, final before the first completed step, that names only keys that help."""

import pytest
import torch

from pipelinerl_core.errors import ConfigError, OutOfMemory
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.trainer import learners
from pipelinerl_core.roles.trainer.learners import build_alone
from pipelinerl_core.training.optimizer import MasterOptimizer
from pipelinerl_core.training.out_of_memory import explain_out_of_memory
from tests.unit.training.learner_case import config, learner_of, rows_of, tiny_model

FIGURES = (
    "CUDA out of memory. Tried to allocate 2.30 GiB. GPU 0 has a total capacity of 79.11 GiB of which 512.00 MiB is "
    "free."
)
TORCH = (
    f"{FIGURES} Process 7 has 30.00 GiB memory in use. Including non-PyTorch memory, this process has 48.00 GiB "
    "memory in use. Of the allocated memory 40.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch "
    "but unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF."
)
OFFLOAD = "learner.kind=deepspeed learner.zero_stage=2 learner.offload=optimizer"


def fail(*arguments, **options):
    raise torch.OutOfMemoryError(TORCH)


class Pack:
    def __init__(self, num_tokens):
        self.input_ids_T = torch.zeros(num_tokens, dtype=torch.int64)


def explained(overrides=(), packs=(100, 300), **options):
    kind = ConfigError if options.get("is_first", True) else OutOfMemory
    run_config = load_config("quickstart", overrides)

    def step():
        with explain_out_of_memory(run_config, "step 1", **options) as watch:
            list(watch(map(Pack, packs)))
            fail()

    with pytest.raises(kind) as raised:
        step()
    return str(raised.value)


def test_the_line_has_the_figures_of_the_gpu_and_the_keys_to_set():
    text = explained()
    assert text.startswith(
        f"trainer: step 1, with packs of up to 300 tokens: {FIGURES} Process 7 has 30.00 GiB memory"
    )
    assert text.endswith(
        "this process has 48.00 GiB memory in use. Set trainer.pack_tokens below 2048, or "
        f"learner.activation_checkpointing=true, or {OFFLOAD}"
    )
    assert explained(is_first=False) == text


@pytest.mark.parametrize(
    ("overrides", "packs", "remedies"),
    [
        ([], [], OFFLOAD),
        (["trainer.ranks=4"], [], "learner.kind=deepspeed learner.zero_stage=2"),
        (["trainer.ranks=4", "learner.kind=deepspeed", "learner.zero_stage=1"], [], "learner.zero_stage=2"),
        (["trainer.ranks=4", "learner.kind=deepspeed", "learner.zero_stage=2"], [], "learner.zero_stage=3"),
        (["trainer.ranks=4", "learner.kind=deepspeed", "learner.zero_stage=3"], [], "learner.offload=optimizer"),
        (
            ["learner.kind=deepspeed", "learner.zero_stage=2", "learner.offload=optimizer"],
            [],
            "learner.zero_stage=3 learner.offload=parameters",
        ),
        (
            ["trainer.ranks=4", "learner.kind=deepspeed", "learner.zero_stage=3", "learner.offload=parameters"],
            [],
            "trainer.ranks higher",
        ),
        (["learner.activation_checkpointing=true"], [9], f"trainer.pack_tokens below 2048, or {OFFLOAD}"),
        (["trainer.pack_tokens=8192"], [9], f"trainer.pack_tokens below 8192, or {OFFLOAD}"),  # checkpointing is on
        (
            ["trainer.pack_tokens=64", "learner.activation_checkpointing=true"],
            [9, 65],
            "rollouts.max_tokens below 80 (a sequence longer than trainer.pack_tokens is one pack), or " + OFFLOAD,
        ),
    ],
)
def test_only_keys_that_help_are_named(overrides, packs, remedies):
    assert explained(overrides, packs).endswith(f" in use. Set {remedies}")


@pytest.mark.parametrize(
    "overrides",
    [
        ["learner.kind=deepspeed", "learner.zero_stage=2", "learner.offload=optimizer"],
        ["trainer.ranks=2", "learner.kind=deepspeed", "learner.zero_stage=2"],
        ["learner.kind=deepspeed", "learner.zero_stage=3", "learner.offload=parameters"],
        ["learner.activation_checkpointing=true"],
    ],
)
def test_the_proposed_keys_are_accepted_together(overrides):
    load_config("quickstart", overrides)


def test_the_first_step_of_a_process_is_final_and_later_steps_are_retried(monkeypatch):
    run_config = config()
    learner, rows = learner_of(tiny_model(), run_config), rows_of(run_config)
    with monkeypatch.context() as patch:
        patch.setattr(MasterOptimizer, "step", fail)  # AdamW allocates its moments in the first step
        with pytest.raises(ConfigError, match=r"trainer: step 1, with packs of up to \d+ tokens: CUDA out of memory"):
            learner.step(rows)
    learner.step(rows)
    monkeypatch.setattr(learner, "_policy", fail)
    with pytest.raises(OutOfMemory, match=r"trainer: step 2, with packs of up to \d+ tokens: CUDA out of memory"):
        learner.step(rows)
    assert learner.version == 1


@pytest.mark.parametrize("part", ["load_model", "TorchLearner"])
def test_loading_and_creation_of_the_optimizer_are_final(part, monkeypatch, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    monkeypatch.setattr(learners, part, fail)
    with pytest.raises(ConfigError, match=r"^trainer: loading of the model: CUDA out of memory"):
        build_alone(load_config("quickstart", [f"model.path={tmp_path}"]))


def test_other_errors_pass_unchanged():
    with pytest.raises(RuntimeError, match="other"), explain_out_of_memory(config(), "step 1"):
        raise RuntimeError("other")
