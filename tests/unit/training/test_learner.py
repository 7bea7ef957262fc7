"""Packed forward and optimizer step against plain PyTorch, and what must not change them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipelinerl_core.algo.losses import LOSSES
from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.config.learners import TorchConfig
from pipelinerl_core.config.losses import ReinforceLoss
from pipelinerl_core.config.sections import PlacementConfig
from pipelinerl_core.errors import ConfigError, MissingObject, StoreError, TrainingDiverged
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.run.records import commit_key
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.telemetry.metrics import METRICS
from pipelinerl_core.training.live_state import LiveState
from pipelinerl_core.training.model import (
    checkpoint_activations,
    head_weight,
    hidden_states,
    load_model,
    load_reference,
    prepare_model,
)
from pipelinerl_core.types import WeightSpan
from pipelinerl_core.weights.checkpoint import load_checkpoint, prune_checkpoints, save_checkpoint
from tests.models import published_by, read_checkpoint, state_of
from tests.unit.training.learner_case import (
    TEMPERATURE,
    config,
    groups,
    learner_of,
    plain_logprobs,
    plain_loss,
    rows_of,
    tiny_model,
)


def grads(learner):
    return {name: parameter.grad.clone() for name, parameter in learner._model.named_parameters()}


def grads_after_step(rows, run_config, model=None):
    learner = learner_of(model or tiny_model(), run_config)
    stats = learner.step(rows)
    return grads(learner), stats


def assert_close(actual, wanted, tolerance=2e-7):
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def test_packed_hidden_states_equal_one_forward_per_sequence():
    plain, packed = tiny_model(), prepare_model(tiny_model())
    rows = rows_of(config())
    for batch in PackBatcher(40).rows(rows):
        logits = hidden_states(packed, batch) @ head_weight(packed).T / TEMPERATURE
        logprobs = torch.log_softmax(logits, -1).gather(1, batch.target_ids_N[:, None])[:, 0]
        for sequence, row in enumerate(batch.row_S.tolist()):
            wanted, _ = plain_logprobs(plain, rows[row].rollout)
            torch.testing.assert_close(logprobs[batch.sequence_N == sequence], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pack_tokens", [16, 2048])
def test_the_gradient_of_a_step_equals_that_of_plain_pytorch(tied, pack_tokens):
    run_config = config(pack_tokens)
    rows = rows_of(run_config)
    plain = tiny_model(tie_word_embeddings=tied)
    loss = plain_loss(plain, rows, ratio_max=1.5)
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}

    actual, stats = grads_after_step(rows, run_config, tiny_model(tie_word_embeddings=tied))

    assert_close(actual, wanted)
    assert stats["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.sqrt(sum((grad**2).sum() for grad in wanted.values()))
    assert stats["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_steps_are_adamw_with_warm_up_and_clipping():
    # Adam's first step is blind to the scale of the gradient and to beta2; the third sees clipping and decay.
    run_config = config(lr=1e-3, warmup_steps=4, clip_norm=0.01, weight_decay=0.1)
    step_rows = [rows_of(run_config, step, seed=step) for step in (1, 2, 3)]
    plain, learner = tiny_model(), learner_of(tiny_model(), run_config)
    adam = torch.optim.AdamW(plain.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step, rows in enumerate(step_rows, start=1):
        for group in adam.param_groups:
            group["lr"] = 1e-3 * step / 4
        adam.zero_grad()
        plain_loss(plain, rows, ratio_max=1.5).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        adam.step()
        stats = learner.step(rows)
        assert stats["train/learning_rate"] == pytest.approx(1e-3 * step / 4)
        assert stats["train/grad_norm"] > 0.01
        assert learner.version == step
    for name, parameter in plain.named_parameters():
        # A bias of the keys shifts all scores of a query alike: its gradient is rounding, which Adam blows up.
        if "k_proj.bias" not in name:
            torch.testing.assert_close(published_by(learner)[name], parameter.detach(), rtol=0, atol=2e-6)


def test_warm_up_is_linear_and_then_constant():
    run_config = config(lr=1e-3, warmup_steps=2)
    learner = learner_of(tiny_model(), run_config)
    rates = [learner.step(rows_of(run_config, step))["train/learning_rate"] for step in (1, 2, 3)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3])


def test_statistics_match_the_plain_computation():
    run_config = config()
    rows = rows_of(run_config)
    # One stale token: out of the loss, kl and ratios; still in ess and entropy.
    stale = next(index for index, row in enumerate(rows) if row.rollout.num_tokens > 1)
    rows[stale].loss_mask[0] = False
    learner = learner_of(tiny_model(), run_config)
    plain = tiny_model()
    with torch.no_grad():
        scored = [plain_logprobs(plain, row.rollout) for row in rows]
    differences = [
        logprobs.double().numpy() - row.rollout.rollout_logprobs
        for (logprobs, _), row in zip(scored, rows, strict=True)
    ]
    stats = learner.step(rows)

    every = np.exp(np.concatenate(differences))
    trained = np.concatenate([d[row.loss_mask] for d, row in zip(differences, rows, strict=True)])
    per_sequence = np.exp([d.sum() for d in differences])
    assert stats["importance/ess"] == pytest.approx(every.sum() ** 2 / (len(every) * (every**2).sum()), rel=1e-4)
    assert stats["importance/ess_sequence"] == pytest.approx(
        per_sequence.sum() ** 2 / (len(rows) * (per_sequence**2).sum()), rel=1e-3
    )
    assert stats["importance/kl"] == pytest.approx(-trained.mean(), rel=1e-4)
    # All of version 0, which is being trained.
    assert stats["mismatch/kl"] == pytest.approx(stats["importance/kl"], rel=1e-6)
    assert not {"staleness/abs", "staleness/kl", "policy/kl_ref", "policy/value_error"} & set(stats)
    assert set(stats) <= set(METRICS)
    assert stats["mismatch/abs"] == pytest.approx(np.abs(trained).mean(), rel=1e-4)
    assert stats["importance/ratio_mean"] == pytest.approx(np.exp(trained).mean(), rel=1e-4)
    assert stats["importance/ratio_clipped_fraction"] == pytest.approx((np.exp(trained) > 1.5).mean())
    entropies = torch.cat([entropy for _, entropy in scored])
    assert stats["policy/entropy"] == pytest.approx(entropies.mean().item(), rel=1e-4)
    assert stats["train/trained_tokens"] == len(every) - 1
    forward = sum(len(row.rollout.prompt_token_ids) + row.rollout.num_tokens - 1 for row in rows)
    assert (stats["train/tokens"], stats["train/num_packs"]) == (forward, 1)
    assert stats["train/pack_fill"] == pytest.approx(forward / 2048)


def wide_loss(kind):
    """A loss whose bounds leave most of these tokens a gradient, though nobody sampled them."""
    bounds = {"reinforce": {}, "icepop": {"ratio_min": 1e-6, "ratio_max": 1e6}, "dppo": {"divergence_max": 0.99}}
    bounds |= {"sapo": {"tau_positive": 0.01, "tau_negative": 0.01}, "sequence_product": {"ratio_max": 1e6}}
    return build_config({"loss": {"kind": kind, **bounds.get(kind, {"clip_low": 0.99, "clip_high": 50.0})}}).loss


@pytest.mark.parametrize(
    ("pack_tokens", "kind"),
    [(16, "reinforce"), (64, "reinforce"), *((23, kind) for kind in LOSSES)],
)
def test_cutting_the_step_into_more_packs_changes_no_gradient(pack_tokens, kind):
    loss = wide_loss(kind)
    rows = rows_of(config(loss=loss))
    wanted, whole = grads_after_step(rows, config(loss=loss))
    actual, cut = grads_after_step(rows, config(pack_tokens, loss))
    assert max(tensor.abs().max() for tensor in wanted.values()) > 1e-4
    assert cut["train/num_packs"] > whole["train/num_packs"] == 1
    assert_close(actual, wanted)
    assert cut["importance/ess"] == pytest.approx(whole["importance/ess"])
    assert cut["importance/ess_sequence"] == pytest.approx(whole["importance/ess_sequence"])


def test_a_policy_is_drawn_to_its_reference_and_starts_at_no_distance():
    model, reference = tiny_model(), prepare_model(tiny_model()).requires_grad_(False)
    run_config = config(loss=ReinforceLoss(kl_coefficient=1e3), lr=1e-3)
    run_config = run_config.model_copy(update={"learner": TorchConfig(lr=1e-3, warmup_steps=0)})
    learner = learner_of(model, run_config, reference=reference)
    free = learner_of(tiny_model(), config(lr=1e-3, warmup_steps=0))
    rows = rows_of(run_config)
    distances = [learner.step(rows)["policy/kl_ref"] for _ in range(8)]
    assert distances[0] == 0.0
    assert all(tensor.grad is None for tensor in reference.parameters())
    for _ in range(8):
        assert "policy/kl_ref" not in free.step(rows)
    logprobs = [candidate.logprobs_of([row.rollout for row in rows]) for candidate in (learner, free)]
    start = learner_of(tiny_model(), run_config).logprobs_of([row.rollout for row in rows])
    moved = [max(np.abs(a - b).max() for a, b in zip(final, start, strict=True)) for final in logprobs]
    assert moved[0] < moved[1] / 2


def test_a_reference_with_another_vocabulary_is_refused(tmp_path):
    tiny_model(vocab_size=64).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="64 tokens in the vocabulary, 100 in the trained model"):
        load_reference(tmp_path, tiny_model())


@pytest.mark.parametrize("kind", LOSSES)
def test_the_order_of_rows_changes_no_gradient(kind):
    loss = wide_loss(kind)
    rows = rows_of(config(loss=loss))
    wanted, _ = grads_after_step(rows, config(40, loss))
    actual, _ = grads_after_step([*rows[5:], *reversed(rows[:5])], config(40, loss))
    assert_close(actual, wanted)


def test_rows_with_nothing_live_change_no_gradient():
    rows = rows_of(config())
    extra = [
        replace(row, loss_mask=np.zeros_like(row.loss_mask), advantage=float("nan"), loss_weight=float("inf"))
        for row in rows_of(config(), seed=9)
    ]
    wanted, _ = grads_after_step(rows, config(40))
    actual, stats = grads_after_step([*extra, *rows], config(40))
    assert_close(actual, wanted)
    assert stats["train/trained_tokens"] == sum(row.rollout.num_tokens for row in rows)


def test_garbage_recorded_for_unsampled_tokens_reaches_nothing():
    def masked(garbage):
        rows = rows_of(config())
        for row in rows:
            row.rollout.loss_mask[1:3] = False
            row.loss_mask[1:3] = False
            row.rollout.rollout_logprobs[1:3] = garbage
        return rows

    wanted, clean = grads_after_step(masked(0.0), config())
    actual, dirty = grads_after_step(masked(np.nan), config())
    assert_close(actual, wanted, tolerance=0.0)
    assert {**clean, "time/compute_seconds": 0} == {**dirty, "time/compute_seconds": 0}


def test_a_number_that_is_not_finite_stops_before_the_weights_change():
    learner = learner_of(tiny_model(), config())
    before = published_by(learner)
    rows = rows_of(config())
    rows[2].rollout.rollout_logprobs[0] = np.nan
    message = r"step 1: train/loss=nan, train/grad_norm=nan.*last good weights are version 0"
    with pytest.raises(TrainingDiverged, match=message):
        learner.step(rows)
    assert learner.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in published_by(learner).items())
    learner.step(rows_of(config()))  # and nothing of it is left in the gradients
    assert learner.version == 1


@pytest.mark.parametrize("advantage", ["leave_one_out", "value"])
def test_a_refused_step_leaves_weights_moments_and_random_state(advantage):
    run_config = config(loss=ReinforceLoss(advantage=advantage))

    def packs(rows):
        for batch in PackBatcher(40).rows(rows):
            torch.rand(1)  # a model may draw random numbers
            yield batch

    def after(*seeds):
        torch.manual_seed(1)
        learner = learner_of(tiny_model(), run_config)
        for seed in seeds:
            rows = rows_of(run_config, seed=abs(seed))
            if seed > 0:
                learner.step_packs(packs(rows))
                continue
            with pytest.raises(TrainingDiverged):
                learner.step_packs(packs([*rows[:2], replace(rows[2], advantage=np.inf), *rows[3:]]))
        return state_of(learner)

    (tensors, values), (wanted, values_wanted) = after(-1, 1, -3, -4, 2), after(1, 2)
    assert values == values_wanted
    assert values["version"] == 2
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in tensors.items())


def test_logprobs_of_keeps_the_order_of_rollouts_and_takes_every_token():
    learner = learner_of(tiny_model(), config(24))
    rollouts = [row.rollout for row in rows_of(config())]
    rollouts.insert(1, replace(rollouts[0], completion_token_ids=np.zeros(0, np.int32), weight_spans=()))
    plain = tiny_model()
    all_logprobs = learner.logprobs_of(rollouts)
    for rollout, logprobs in zip(rollouts, all_logprobs, strict=True):
        wanted = plain_logprobs(plain, rollout)[0].detach().numpy() if rollout.num_tokens else np.zeros(0)
        np.testing.assert_allclose(logprobs, wanted, atol=1e-5)


def test_weights_are_a_snapshot_with_each_tied_weight_once():
    learner = learner_of(tiny_model(), config())
    snapshot = published_by(learner)
    copies = {name: tensor.clone() for name, tensor in snapshot.items()}
    learner.step(rows_of(config()))
    assert all(torch.equal(snapshot[name], copies[name]) for name in snapshot)
    assert any(not torch.equal(snapshot[name], tensor) for name, tensor in published_by(learner).items())
    assert "lm_head.weight" not in snapshot
    assert snapshot.keys() == dict(tiny_model().named_parameters()).keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_continues_bit_for_bit(store, dtype):
    run_config = config(40, lr=1e-3, clip_norm=0.3)
    learner = learner_of(tiny_model().to(dtype), run_config)
    for step in (1, 2):
        learner.step(rows_of(run_config, step, seed=step))
    save_checkpoint(store, 2, 1, learner.state())
    drawn = torch.rand(1)
    expected = [learner.step(rows_of(run_config, step, seed=step)) for step in (3, 4)]

    successor = learner_of(tiny_model(seed=77).to(dtype), run_config)
    successor.load_state(*load_checkpoint(store, 2, 1))
    assert successor.version == 2
    assert torch.equal(torch.rand(1), drawn)
    again = [successor.step(rows_of(run_config, step, seed=step)) for step in (3, 4)]

    for metrics, other in zip(expected, again, strict=True):
        assert {**metrics, "time/compute_seconds": 0} == {**other, "time/compute_seconds": 0}
    for name, tensor in published_by(learner).items():
        assert torch.equal(tensor, published_by(successor)[name]), name


def stepped_state():
    learner = learner_of(tiny_model(), config())
    learner.step(rows_of(config()))
    return state_of(learner)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_rests_on_the_host_takes_the_same_steps(store, dtype):
    """On a CPU; a GPU differs by the two copies of a step."""
    run_config = config(40, lr=1e-3, clip_norm=0.3)
    by_turns = run_config.model_copy(update={"placement": PlacementConfig(share_gpu="turns")})
    plain, resting, resumed = (
        learner_of(tiny_model(seed).to(dtype), kind)
        for seed, kind in ((0, run_config), (0, by_turns), (77, by_turns))
    )
    for step in (1, 2, 3):
        rows = rows_of(run_config, step, seed=step)
        expected = plain.step(rows)
        given = [resting.step(rows), *([resumed.step(rows)] if step == 3 else [])]
        for metrics in given:
            assert {**metrics, "time/compute_seconds": 0} == {**expected, "time/compute_seconds": 0}
        assert all(master.grad is None for master in resting._optimizer._masters.values())
        if step == 2:
            save_checkpoint(store, 2, 1, resting.state())
            resumed.load_state(*load_checkpoint(store, 2, 1))
    for name, tensor in state_of(plain)[0].items():
        assert torch.equal(tensor, state_of(resting)[0][name]), name
        assert torch.equal(tensor, state_of(resumed)[0][name]), name


def test_bfloat16_weights_follow_float32_masters():
    run_config = config(lr=1e-5, warmup_steps=0)
    learner = learner_of(tiny_model().to(torch.bfloat16), run_config)
    before = state_of(learner)[0]
    learner.step(rows_of(run_config))
    after, _ = state_of(learner)
    changed = [not torch.equal(after[name], before[name]) for name in before if name.startswith("weights.")]
    assert all(changed)
    for name, tensor in published_by(learner).items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, after[f"weights.{name}"].bfloat16())


def test_bfloat16_gradients_of_all_packs_are_added():
    norms = [
        learner_of(tiny_model().to(torch.bfloat16), config(pack_tokens)).step(rows_of(config()))["train/grad_norm"]
        for pack_tokens in (2048, 16)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


def test_a_checkpoint_of_another_model_is_refused():
    tensors, values = state_of(learner_of(tiny_model(), config()))
    with pytest.raises(ConfigError, match=r"weights.model.embed_tokens.weight: shape \(100, 32\).*\(90, 32\)"):
        learner_of(tiny_model(vocab_size=90), config()).load_state([tensors], values)


def test_a_checkpoint_without_some_elements_is_refused():
    tensors, values = state_of(learner_of(tiny_model(), config()))
    norm = tensors.pop("weights.model.norm.weight")
    learner = learner_of(tiny_model(), config())
    with pytest.raises(ConfigError, match=r"weights.model.norm.weight: nothing in the checkpoint, shape \(32,\) in"):
        learner.load_state([tensors], values)
    files = [tensors, {"weights.model.norm.weight[0 of 32]": norm[:20]}]
    with pytest.raises(ConfigError, match=r"weights.model.norm.weight: nothing in"):
        learner.load_state(files, values)
    learner.load_state([*files, {"weights.model.norm.weight[20 of 32]": norm[20:]}], values)
    assert torch.equal(state_of(learner)[0]["weights.model.norm.weight"], norm)
    stepped, values = stepped_state()
    moment = stepped.pop("optimizer.model.norm.weight.exp_avg")
    with pytest.raises(ConfigError, match=r"optimizer.model.norm.weight.exp_avg: nothing in the checkpoint"):
        learner.load_state([stepped, {"optimizer.model.norm.weight.exp_avg[0 of 32]": moment[:20]}], values)
    with pytest.raises(ConfigError, match=r"weights.other: shape \(1,\) in the checkpoint, nothing in the model"):
        learner.load_state([tensors, {"weights.other": norm[:1]}], values)


def test_a_model_is_loaded_from_its_directory(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    model = load_model(tmp_path, "bfloat16")
    assert model.dtype == torch.bfloat16
    assert not model.training
    with pytest.raises(ConfigError, match=r"no config\.json there"):
        load_model(tmp_path / "nothing", "float32")


def test_a_model_that_packs_cannot_reproduce_is_refused():
    model = tiny_model()
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(0, 1, 100))
    with pytest.raises(ConfigError, match="differ by"):
        prepare_model(model)


def test_a_step_without_a_sampled_token_moves_nothing_but_the_version():
    run_config = config()
    rows = rows_of(run_config)
    for row in rows:
        row.rollout.loss_mask[:] = False
        row.loss_mask[:] = False
    learner = learner_of(tiny_model(), run_config)
    before = published_by(learner)
    stats = learner.step(rows)
    names = ("train/loss", "train/grad_norm", "importance/ess", "train/num_packs")
    assert ([stats[name] for name in names], learner.version) == ([0.0, 0.0, 1.0, 0], 1)
    assert "policy/kl_ref" not in stats
    assert all(torch.equal(tensor, before[name]) for name, tensor in published_by(learner).items())


def test_a_checkpoint_without_its_manifest_does_not_exist(store):
    manifest = save_checkpoint(store, 3, 1, LiveState({"a": torch.arange(4.0)}, {"version": 3, "x": 0.1}))
    tensors, values = read_checkpoint(store, 3, 1)
    assert torch.equal(tensors["a"], torch.arange(4.0))
    assert values == {"version": 3, "x": 0.1}
    assert [entry.name for entry in manifest.files] == ["state-00001.safetensors"]
    store.delete(["checkpoints/00000003.1/manifest.json"])
    with pytest.raises(MissingObject):
        load_checkpoint(store, 3, 1)


def test_no_folder_of_a_pruned_checkpoint_stays_on_a_disk(tmp_path):
    disk = open_store(str(tmp_path))
    for step in (0, 1, 2, 3):
        save_checkpoint(disk, step, 1, learner_of(tiny_model(), config()).state())
    prune_checkpoints(disk, {step: commit_key(step, 1) for step in range(4)})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [f"0000000{n}.1" for n in (0, 2, 3)]


def test_changed_bytes_of_a_checkpoint_are_refused(store):
    save_checkpoint(store, 3, 1, LiveState({"a": torch.arange(4.0)}, {}))
    key = "checkpoints/00000003.1/state-00001.safetensors"
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, bytes(data))
    with pytest.raises(StoreError, match=r"state-00001.safetensors: .* its record says"):
        read_checkpoint(store, 3, 1)


def test_pruning_keeps_the_newest_of_the_newest_epoch(store):
    for step, epoch in [(10, 1), (20, 1), (30, 1), (12, 2), (14, 2)]:
        save_checkpoint(store, step, epoch, LiveState({"a": torch.zeros(1)}, {}))
    store.put("checkpoints/00000011.2/state-00001.safetensors", b"never finished")
    store.put("checkpoints/00000016.2/state-00001.safetensors", b"being written")
    counted = {step: commit_key(step, 1 if step <= 10 else 2) for step in range(15)}
    doomed = prune_checkpoints(store, counted, keep=2)
    assert sorted(doomed) == [(10, 1), (11, 2), (20, 1), (30, 1)]
    assert {key.split("/")[1] for key in store.list("checkpoints")} == {"00000012.2", "00000014.2", "00000016.2"}
    assert prune_checkpoints(store, counted, keep=2) == []


@pytest.mark.parametrize(
    ("keep_every", "kept"),
    [(0, [0, 23, 26]), (1, [0, 3, 7, 10, 14, 19, 23, 26]), (5, [0, 7, 10, 19, 23, 26]), (10, [0, 10, 23, 26]),
     (20, [0, 23, 26]), (100, [0, 23, 26])],
)  # fmt: skip
def test_the_first_checkpoint_of_every_n_steps_stays(store, keep_every, kept):
    """As the trainer prunes after each checkpoint: what is kept stays kept."""
    counted = {step: commit_key(step, 1 if step <= 10 else 2) for step in range(27)}
    for step in (0, 3, 7, 10, 14, 19, 23, 26):
        save_checkpoint(store, step, 1 if step <= 10 else 2, LiveState({"a": torch.zeros(1)}, {}))
        if step == 10:
            save_checkpoint(
                store, 12, 1, LiveState({"a": torch.zeros(1)}, {})
            )  # of a step that the next epoch replaces
        prune_checkpoints(store, counted, keep_every=keep_every)
    assert [int(key.split("/")[1][:8]) for key in store.list("checkpoints") if key.endswith("manifest.json")] == kept


def test_the_checkpoint_of_a_fenced_trainer_replaces_none_that_a_start_can_use(store):
    for step, epoch in [(30, 1), (40, 1), (50, 1), (45, 2)]:
        save_checkpoint(store, step, epoch, LiveState({"a": torch.zeros(1)}, {}))
    counted = {step: commit_key(step, 1 if step <= 42 else 2) for step in range(46)}
    assert prune_checkpoints(store, counted, keep=2) == [(30, 1)]


def test_a_group_of_mixed_versions_masks_only_its_old_tokens():
    run_config = config()
    first, *others = groups(num_groups=1)[0]
    tokens = first.num_tokens
    spans = (WeightSpan(0, 0, 1), WeightSpan(5, 1, tokens)) if tokens > 1 else (WeightSpan(0, 0, 1),)
    others = [replace(other, weight_spans=(WeightSpan(5, 0, other.num_tokens),)) for other in others]
    step = assemble_rows(6, [[replace(first, weight_spans=spans), *others]], run_config)
    stats = learner_of(tiny_model(), run_config, version=5).step(step.rows)
    assert stats["train/trained_tokens"] == step.num_sampled - 1 == step.num_trained
    assert "staleness/abs" not in stats  # the old token is masked
    assert min(stats["mismatch/abs"], stats["stale_kv/abs"]) > 0


def test_packs_computed_at_once_give_the_same_bits():
    run_config = config(pack_tokens=16)
    alone, together = (learner_of(tiny_model(), run_config, threads=threads) for threads in (1, 3))
    for step in (1, 2):
        rows = rows_of(run_config, num_groups=5, seed=step)
        metrics, other = alone.step(rows), together.step(rows)
        assert metrics["train/num_packs"] > 3
        assert {**metrics, "time/compute_seconds": 0} == {**other, "time/compute_seconds": 0}
    for name, tensor in published_by(alone).items():
        assert torch.equal(tensor, published_by(together)[name]), name


def test_checkpointed_activations_are_computed_twice_and_change_no_bit():
    run_config = config()
    rows = rows_of(run_config)
    wanted, _ = grads_after_step(rows, run_config)
    model = tiny_model()
    learner = learner_of(model, run_config)
    checkpoint_activations(model)
    calls = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    learner.step(rows)
    packs = len(list(PackBatcher(run_config.trainer.pack_tokens).rows(rows)))
    assert len(calls) == 2 * packs * len(model.model.layers)
    assert not any(dropout.training for dropout in model.modules() if isinstance(dropout, torch.nn.Dropout))
    for name, gradient in grads(learner).items():
        assert torch.equal(gradient, wanted[name]), name
