"""LoRA: what is trained, what is published, what is kept."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.config.losses import ReinforceLoss
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.tiny import shrunk
from pipelinerl_core.roles.trainer.adopt import _load_committed_weights
from pipelinerl_core.training.learner import TorchLearner
from pipelinerl_core.training.lora import (
    PublishedWeight,
    add_adapters,
    published_weights,
    share_frozen,
    trained_parameters,
)
from pipelinerl_core.training.model import _packed_logprobs, checkpoint_activations, prepare_model
from pipelinerl_core.weights.checkpoint import save_checkpoint
from tests.fakes import MemoryStore
from tests.models import published_by, read_checkpoint, state_of
from tests.unit.training.learner_case import config, plain_loss, rows_of, tiny_model

LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def lora_config(**changes):
    return config(40, **{"lora_rank": 4, "lr": 1e-2, "warmup_steps": 0, **changes})


def adapted_model(run_config, seed=3, dtype=torch.float32):
    model = prepare_model(tiny_model().to(dtype))
    add_adapters(model, run_config.learner, seed)
    return model


def learner_with(model, run_config, **kwargs):
    return TorchLearner(model, run_config, batcher=PackBatcher(run_config.trainer.pack_tokens), **kwargs)


def adapted_learner(run_config, **kwargs):
    return learner_with(adapted_model(run_config, **kwargs), run_config)


def set_b(model, seed=0):
    """B is 0 at first, which would hide A."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trained_parameters(model).items():
            if "lora_B" in name:
                parameter.normal_(std=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_is_w_plus_s_b_a(dtype):
    base = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=dtype)
    a, b = torch.tensor([[1.0, 0.0, -1.0]], dtype=dtype), torch.tensor([[2.0], [3.0]], dtype=dtype)
    merged = torch.empty_like(base)
    PublishedWeight("w", base, (a, b), 0.5).copy_to(merged)
    assert merged.tolist() == [[2.0, 2.0, 2.0], [5.5, 5.0, 4.5]]
    assert merged.dtype == dtype
    assert base.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_bfloat16_is_rounded_once():
    # 1 + 2 * (1/512 + 1/512) = 1.0078125, which bfloat16 has; each 1/512 alone would vanish beside 1.
    base, a = torch.ones(1, 1, dtype=torch.bfloat16), torch.full((2, 1), 1 / 512, dtype=torch.bfloat16)
    merged = torch.empty_like(base)
    PublishedWeight("w", base, (a, torch.ones(1, 2, dtype=torch.bfloat16)), 2.0).copy_to(merged)
    assert merged.item() == 1.0078125


def test_adapters_are_beside_every_linear_layer_of_the_blocks_and_change_nothing_at_first():
    run_config = lora_config()
    model = adapted_model(run_config)
    trained = trained_parameters(model)
    assert {name.split(".")[-3] for name in trained} == LINEAR
    assert len(trained) == 2 * 2 * len(LINEAR)  # two layers, A and B
    assert trained["model.layers.1.mlp.down_proj.lora_A.weight"].shape == (4, 48)
    assert trained["model.layers.1.mlp.down_proj.lora_B.weight"].shape == (32, 4)
    assert not any(module.training for module in model.modules())
    published = published_by(learner_with(model, run_config))
    base = dict(tiny_model().named_parameters())
    assert published.keys() == base.keys()
    assert all(torch.equal(tensor, base[name]) for name, tensor in published.items())


def test_adapters_follow_from_the_seed_alone_and_leave_the_generator():
    torch.manual_seed(5)
    expected = torch.rand(1)
    model = prepare_model(tiny_model())
    torch.manual_seed(5)
    add_adapters(model, lora_config().learner, 3)
    assert torch.equal(torch.rand(1), expected)
    same, other = (trained_parameters(adapted_model(lora_config(), seed=seed)) for seed in (3, 4))
    for name, parameter in trained_parameters(model).items():
        assert torch.equal(parameter, same[name])
        assert torch.equal(parameter, other[name]) == ("lora_B" in name)


def test_the_gradient_is_that_of_a_plain_model_with_merged_weights():
    """d/dA = s B^T G and d/dB = s G A^T, G being the gradient of the merged weight in a plain model."""
    run_config = lora_config(lora_alpha=6.0)
    model = adapted_model(run_config)
    set_b(model)
    learner = learner_with(model, run_config)
    rows = rows_of(run_config)
    plain = tiny_model()
    plain.load_state_dict(published_by(learner), strict=False)
    loss = plain_loss(plain, rows, ratio_max=1.5)
    loss.backward()
    merged = {name: parameter.grad for name, parameter in plain.named_parameters()}
    factors = {name: parameter.detach().clone() for name, parameter in trained_parameters(model).items()}

    stats = learner.step(rows)

    assert stats["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
    for name, parameter in trained_parameters(model).items():
        layer = name.rpartition(".lora_")[0]
        a, b = (factors[f"{layer}.lora_{which}.weight"] for which in "AB")
        gradient = merged[f"{layer}.weight"]
        wanted = 1.5 * (b.T @ gradient if "lora_A" in name else gradient @ a.T)
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-6)


def test_the_trainer_scores_as_an_engine_with_the_merged_weights():
    run_config = lora_config()
    learner = adapted_learner(run_config)
    rows = rows_of(run_config)
    for _ in range(3):
        learner.step(rows)
    plain = prepare_model(tiny_model())
    plain.load_state_dict(published_by(learner), strict=False)
    rollouts = [row.rollout for row in rows]
    scored = zip(learner.logprobs_of(rollouts), learner_with(plain, config(40)).logprobs_of(rollouts), strict=True)
    assert max(abs(first - other).max() for first, other in scored) < 1e-4


def test_steps_change_adapters_alone():
    run_config = lora_config()
    model = adapted_model(run_config)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    learner = learner_with(model, run_config)
    for step in (1, 2):
        learner.step(rows_of(run_config, step))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora_" not in name), name
    base, changed = dict(tiny_model().named_parameters()), published_by(learner)
    moved = {name.split(".")[-2] for name in changed if not torch.equal(changed[name], base[name])}
    assert moved == LINEAR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_of_adapters_continues_bit_for_bit(store, dtype):
    run_config = lora_config()
    learner = adapted_learner(run_config, dtype=dtype)
    learner.step(rows_of(run_config, 1))
    save_checkpoint(store, 1, 1, learner.state())
    expected = learner.step(rows_of(run_config, 2))

    tensors, values = read_checkpoint(store, 1, 1)
    names = {name.removeprefix("weights.") for name in tensors if name.startswith("weights.")}
    assert names == trained_parameters(adapted_model(run_config)).keys()
    assert all(tensor.dtype == torch.float32 for name, tensor in tensors.items() if name != "rng.torch")
    successor = adapted_learner(run_config, seed=77, dtype=dtype)
    successor.load_state([tensors], values)
    again = successor.step(rows_of(run_config, 2))
    assert {**expected, "time/compute_seconds": 0} == {**again, "time/compute_seconds": 0}
    assert all(torch.equal(tensor, published_by(successor)[name]) for name, tensor in published_by(learner).items())


def test_a_checkpoint_of_another_rank_is_refused():
    tensors, values = state_of(adapted_learner(lora_config()))
    with pytest.raises(ConfigError, match=r"lora_A.weight: shape \(4, 32\) in the checkpoint, shape \(8, 32\)"):
        adapted_learner(lora_config(lora_rank=8)).load_state([tensors], values)


def test_chosen_targets_alone_have_adapters():
    model = adapted_model(lora_config(lora_targets=("q_proj", "v_proj")))
    assert {name.split(".")[-3] for name in trained_parameters(model)} == {"q_proj", "v_proj"}


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "q_porj"])
def test_a_target_that_is_not_in_the_blocks_is_refused(target):
    with pytest.raises(ConfigError, match=f"no linear layer {target}. Choose from down_proj, gate_proj") as raised:
        adapted_model(lora_config(lora_targets=("q_proj", target)))
    assert "\n" not in str(raised.value)


def test_the_frozen_base_is_the_reference_without_a_second_copy():
    run_config = lora_config(loss=ReinforceLoss(kl_coefficient=1.0))
    model = prepare_model(tiny_model())
    reference = share_frozen(model)
    add_adapters(model, run_config.learner, 3)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert all(parameter.data_ptr() in own for parameter in reference.parameters())
    learner = learner_with(model, run_config, reference=reference)
    distances = [learner.step(rows_of(run_config))["policy/kl_ref"] for _ in range(3)]
    assert distances[0] == pytest.approx(0.0, abs=1e-9)
    assert distances[2] > 1e-6
    assert all(weight.base.grad is None for weight in published_weights(model, 2.0))


def test_a_model_with_experts_and_dense_layers_publishes_the_names_of_its_weights():
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 2,
               "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 64}  # fmt: skip
    entries = {**shrunk(AutoConfig.for_model("deepseek_v3").to_dict()), **experts}
    model = prepare_model(AutoModelForCausalLM.from_config(AutoConfig.for_model(**entries)))
    names = [name for name, _ in model.named_parameters()]
    add_adapters(model, lora_config().learner, 0)
    assert [weight.name for weight in published_weights(model, 2.0)] == names
    assert not any(".experts." in name for name in trained_parameters(model))


def test_dropout_stays_off_in_recomputed_layers():
    entries = {**shrunk(AutoConfig.for_model("opt").to_dict()), "vocab_size": 64, "dropout": 0.5}
    model = prepare_model(AutoModelForCausalLM.from_config(AutoConfig.for_model(**entries)), "padded")
    before = [logprobs.detach() for logprobs in _packed_logprobs(model)]
    checkpoint_activations(model)
    assert all(map(torch.equal, before, _packed_logprobs(model)))


def test_activation_checkpointing_changes_no_gradient():
    run_config = lora_config()
    norms = []
    for is_checkpointed in (False, True):
        model = adapted_model(run_config)
        set_b(model)
        if is_checkpointed:
            checkpoint_activations(model)
        norms.append(learner_with(model, run_config).step(rows_of(run_config))["train/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_alpha_defaults_to_twice_the_rank():
    assert lora_config(lora_rank=8).learner.lora_scale == 2.0
    assert lora_config(lora_rank=8, lora_alpha=4).learner.lora_scale == 0.5
    assert config().learner.lora_scale == 0.0


def test_committed_weights_do_not_replace_adapters(caplog):
    run_config = lora_config()
    learner = adapted_learner(run_config)
    before = state_of(learner)[0]
    commit = SimpleNamespace(step=3, manifest=SimpleNamespace(key="weights/00000003.1", files=()))
    _load_committed_weights(MemoryStore(), learner, commit, run_config)
    assert "step 3 was trained again on other hardware: its adapters differ" in caplog.text
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(learner)[0].items())
