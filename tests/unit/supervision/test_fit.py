"""Memory of a run by role: sums by hand, refusals, and sizes of real models."""

import json

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.models.shapes import KNOWN_MODELS, shape_of
from pipelinerl_core.supervision.cards import CARDS
from pipelinerl_core.supervision.fit import card_of, check_fit, container_bytes, fit_of
from tests.unit.supervision.test_gpus import host_of

BASE = (
    "model.dtype=bfloat16", "engine.kind=vllm", "placement.kind=work_pools", "rollouts.max_tokens=4056",
    "trainer.pack_tokens=4096", "learner.activation_checkpointing=false",
)  # fmt: skip
SEVEN = "model.path=Qwen/Qwen2.5-7B"
NUM_7B = 2 * 152064 * 3584 + 28 * (2 * 3584 * (28 + 4) * 128 + 3 * 3584 * 18944 + 2 * 3584) + 3584
"""Embedding and head, and per layer attention, feed-forward and norms; without biases."""


def config(*overrides):
    return load_config("quickstart", [*BASE, *overrides])


def parts(fit, role):
    (role_fit,) = [candidate for candidate in fit.roles if candidate.role == role]
    return dict(role_fit.gpu)


def test_a_full_learner_of_one_rank_needs_twenty_bytes_per_parameter():
    bytes_by_part = parts(fit_of(config(SEVEN, "placement.gpu=H100")), "trainer")
    assert bytes_by_part["weights"] + bytes_by_part["gradients"] + bytes_by_part["optimizer"] == 20 * NUM_7B
    # Rollouts of one prompt: 1.25 times a sequence of 4,096 tokens.
    # 28 layers, hidden 3,584, inner 18,944; and three copies of a chunk of logits
    assert bytes_by_part["activations"] == 5120 * 28 * (24 * 3584 + 8 * 18944) + 3 * 4 * 2**22
    float32 = parts(fit_of(config(SEVEN, "model.dtype=float32")), "trainer")
    assert float32["weights"] + float32["gradients"] + float32["optimizer"] == 20 * NUM_7B


def test_a_teacher_counts_with_its_own_size(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_MODELS["Qwen/Qwen2.5-7B"]))
    student = ("model.path=Qwen/Qwen2.5-1.5B", "placement.gpu=H100")
    taught = parts(fit_of(config(*student, f"loss.teacher={tmp_path}")), "trainer")
    assert taught.pop("teacher") == 2 * NUM_7B
    alone = parts(fit_of(config(*student)), "trainer")
    assert alone.pop("teacher") == 0
    assert taught == alone


def test_the_measured_learner_of_1_5_b_parameters_is_predicted():
    """77 to 80 of 84 GB were in use at 16,384 tokens per pack."""
    fit = fit_of(config("model.path=Qwen/Qwen2.5-1.5B", "placement.gpu=84", "trainer.pack_tokens=16384"))
    (trainer,) = [role_fit for role_fit in fit.roles if role_fit.role == "trainer"]
    assert 74e9 < trainer.gpu_bytes < 86e9


def test_zero_shards_the_state_over_the_ranks_and_offload_moves_the_state_to_the_host():
    sharded = ("learner.kind=deepspeed", "trainer.ranks=4")
    bytes_by_part = parts(fit_of(config(SEVEN, *sharded, "learner.zero_stage=3")), "trainer")
    assert (bytes_by_part["weights"], bytes_by_part["gradients"], bytes_by_part["optimizer"]) == (
        2 * NUM_7B / 4, 4 * NUM_7B / 4, 12 * NUM_7B / 4
    )  # fmt: skip
    bytes_by_part = parts(fit_of(config(SEVEN, *sharded, "learner.zero_stage=1")), "trainer")
    assert (bytes_by_part["weights"], bytes_by_part["gradients"], bytes_by_part["optimizer"]) == (
        2 * NUM_7B,
        4 * NUM_7B,
        12 * NUM_7B / 4,
    )
    offload = (*sharded, "learner.zero_stage=3", "learner.offload=parameters")
    on_host, on_gpu = fit_of(config(SEVEN, *offload)), fit_of(config(SEVEN, *sharded, "learner.zero_stage=3"))
    assert parts(on_host, "trainer")["weights"] == parts(on_host, "trainer")["optimizer"] == 0
    assert on_host.roles[0].host_bytes - on_gpu.roles[0].host_bytes == 14 * NUM_7B


def test_adapters_are_trained_beside_frozen_weights():
    bytes_by_part = parts(
        fit_of(config(SEVEN, "learner.lora_rank=16", "learner.activation_checkpointing=true")), "trainer"
    )
    per_layer = 2 * 3584 + 2 * (3584 + 512) + (3584 + 3584) + 3 * (3584 + 18944)
    assert bytes_by_part["optimizer"] == 12 * 16 * 28 * per_layer
    assert bytes_by_part["weights"] == 2 * NUM_7B
    one_layer = 24 * 3584 + 8 * 18944
    assert bytes_by_part["activations"] == 5120 * (28 * 2 * 3584 + one_layer) + 3 * 4 * 2**22


def test_an_engine_has_room_for_so_many_whole_sequences():
    fit = fit_of(config(SEVEN, "placement.gpu=H100", "engine.tensor_parallel=2"))
    bytes_by_part = parts(fit, "actor")
    assert bytes_by_part["weights"] == NUM_7B
    assert bytes_by_part["one sequence"] == 2 * 2 * 28 * 4 * 128 * 4096 / 2
    room = 0.9 * 80 * 2**30 - NUM_7B - 2 * 2**30
    assert fit.roles[1].note.startswith(f"{int(room // bytes_by_part['one sequence'])} sequences of 4096 tokens")
    assert fit.roles[1].gpus == 2


def test_pods_have_memory_for_the_size_of_the_model():
    pooled = config(SEVEN, "weights.transport=object_store")
    assert container_bytes(pooled, "actor")[1] == 2 * 2 * NUM_7B + 2 * 2**30
    assert container_bytes(pooled, "trainer")[1] == 2 * 2**30
    own, shared = container_bytes(config(SEVEN), "trainer")
    assert shared == (6 + 2) * 2 * NUM_7B
    assert own == next(role for role in fit_of(config(SEVEN)).roles if role.role == "trainer").host_bytes > 0
    assert container_bytes(config("model.path=somebody/unknown"), "trainer") is None
    spread = (SEVEN, "trainer.ranks=16", "placement.kind=work_pools")
    nodes = ("placement.trainer_nodes=2", "placement.hub_host=10.0.0.1")
    for kind, of_rank_0 in (
        (("learner.kind=deepspeed", "learner.zero_stage=3"), {"versions"}),
        ((), {"versions", "checkpoint"}),
    ):
        host = fit_of(config(*spread, *kind)).roles[0].host
        wanted = sum(size / (1 if name in of_rank_0 else 2) for name, size in host.items())
        assert container_bytes(config(*spread, *nodes, *kind), "trainer")[0] == pytest.approx(wanted)


def test_a_run_that_cannot_fit_is_refused_with_the_sum_and_a_way_out():
    with pytest.raises(
        ConfigError, match=r"trainer: weights 15\.2 GB \+ gradients 45\.7 GB.*H100\. Set learner"
    ) as no:
        check_fit(config(SEVEN, "placement.gpu=H100"))
    assert "learner.zero_stage=3 trainer.ranks=" in str(no.value)
    ranks = int(str(no.value).rpartition("trainer.ranks=")[2].partition(",")[0])
    ways = ["learner.kind=deepspeed", "learner.zero_stage=3", f"trainer.ranks={ranks}"]
    assert check_fit(config(SEVEN, "placement.gpu=H100", *ways)) == []
    assert check_fit(config(SEVEN, "placement.gpu=H100", "learner.lora_rank=16")) == []
    sharded = ("learner.kind=deepspeed", "learner.zero_stage=3", "trainer.ranks=16", "trainer.pack_tokens=256")
    sharded += ("learner.activation_checkpointing=true",)
    with pytest.raises(ConfigError, match=r"actor: weights 15.2 GB.*of L4\. Raise engine\.tensor_parallel"):
        check_fit(config(SEVEN, "placement.gpu=L4", "engine.memory_share=0.5", *sharded))


def test_an_estimate_warns_with_a_way_out_and_never_refuses():
    (warning,) = check_fit(config("model.path=Qwen/Qwen2.5-0.5B", "placement.gpu=24", "trainer.pack_tokens=32768"))
    assert "Set learner.activation_checkpointing=true, or lower trainer.pack_tokens" in warning
    tight = config("model.path=Qwen/Qwen2.5-1.5B", "placement.gpu=78", "trainer.pack_tokens=16384")
    (warning,) = check_fit(tight)
    assert "of 78.0 GB on each GPU: it may run out of memory" in warning


def test_cards_are_named_as_people_write_them(tmp_path, monkeypatch):
    def card(name):
        return card_of(config(f"placement.gpu={name}"))

    assert card("H100") == card("h100") == card("NVIDIA H100") == ("H100", CARDS["H100"].gib * 2**30)
    assert card("a100-40gb")[0] == "A100-40GB"
    assert card("48") == ("48 GB", 48e9)
    with pytest.raises(ConfigError, match=r"placement\.gpu=Voodoo2: unknown\. Set its memory in GB, or one of T4"):
        card("Voodoo2")
    assert card_of(config()) == ("", 0.0), "work pools: the GPUs of other hosts are unknown"
    host_of(tmp_path, monkeypatch, 2, mib=24564)
    local = config("placement.kind=local")
    assert card_of(local) == ("NVIDIA H100 80GB HBM3", 24564 * 2**20)


def test_a_model_of_a_directory_is_read_from_its_configuration(tmp_path):
    entries = KNOWN_MODELS["Qwen/Qwen2.5-7B"]
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert fit_of(config(f"model.path={tmp_path}")).num_parameters == NUM_7B
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 7}))
    assert fit_of(config(f"model.path={tmp_path}")) is None
    assert check_fit(config(f"model.path={tmp_path}")) == []


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B", "moe"])
def test_parameters_are_counted_as_transformers_counts_them(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    entries = dict(KNOWN_MODELS.get(name) or KNOWN_MODELS["Qwen/Qwen3-8B"])
    if name == "moe":
        entries |= {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 256, "num_hidden_layers": 4}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**entries))
    exact = sum(parameter.numel() for parameter in model.parameters())
    assert shape_of(entries).num_parameters == pytest.approx(exact, rel=2e-4)


def test_activations_of_long_packs_are_recomputed_unless_the_key_says_otherwise():
    of = [
        parts(
            fit_of(config(SEVEN, "trainer.pack_tokens=8192", f"learner.activation_checkpointing={value}")), "trainer"
        )
        for value in ("auto", "true", "false")
    ]
    assert of[0]["activations"] == of[1]["activations"] < of[2]["activations"] / 4


@pytest.mark.parametrize(
    ("preset", "card"),
    [("gsm8k-0.5b-1gpu", 24), ("lora-7b-1gpu", 80), ("dapo-1.5b-1gpu", 80), ("math-7b-16gpu", 80)],
)
def test_the_presets_fit_the_cards_that_they_name(preset, card):
    chosen = load_config(preset, [f"placement.gpu={card}"])
    assert check_fit(chosen) == []
    assert all(role.limit_bytes for role in fit_of(chosen).roles)


def test_the_buffers_of_a_broadcast_are_beside_the_share_of_the_engine():
    def limit_and_need(transport, share):
        settings = f"weights.transport={transport}", f"engine.memory_share={share}", "engine.kind=vllm"
        trainer, actor = fit_of(config(SEVEN, "placement.gpu=80", *settings)).roles
        return actor.limit_bytes, trainer.gpu_bytes

    assert limit_and_need("nccl", 0.9)[0] == limit_and_need("shm", 0.9)[0] == 0.9 * 80e9
    assert limit_and_need("nccl", 0.99)[0] == 80e9 - 2 * 2**30
    assert limit_and_need("nccl", 0.9)[1] - limit_and_need("shm", 0.9)[1] == 2 * 2**30


def test_by_turns_each_role_has_the_card_without_what_the_other_keeps_there():
    local = (SEVEN, "placement.gpu=141", "placement.kind=local", "trainer.rescore_share=0")

    def roles(*overrides):
        return fit_of(config(*local, *overrides)).roles

    turns, overhead = "placement.share_gpu=turns", 1.5 * 2**30
    embedded = "engine.kind=embedded", "model.device=cuda"
    trainer, actor = roles(turns, *embedded)
    assert trainer.limit_bytes == 141e9 - 2 * NUM_7B - 2 * 2**30
    assert actor.limit_bytes == 141e9 - 2 * NUM_7B - overhead
    beside, _ = roles("placement.share_gpu=true", *embedded)
    assert trainer.host_bytes - beside.host_bytes == 12 * NUM_7B
    asleep, sleeper = roles(turns)
    assert (asleep.limit_bytes, sleeper.limit_bytes) == (141e9 - 2 * 2**30, 0.75 * 141e9)
    assert roles(turns, "engine.memory_share=0.95")[1].limit_bytes == 141e9 - 2 * NUM_7B - overhead
    assert sleeper.host_bytes - roles("placement.share_gpu=true")[1].host_bytes == 2 * NUM_7B


def test_the_fit_is_text_and_a_document():
    fit = fit_of(config(SEVEN, "placement.gpu=H100"))
    first, trainer, _, actor, *_ = fit.lines()
    assert first == "Qwen/Qwen2.5-7B: 7.62 B parameters; GPU H100, 85.9 GB"
    assert trainer.startswith("!!  trainer   1 x 1 GPU")
    assert actor.startswith("ok  actor")
    document = json.loads(json.dumps(fit.document()))
    assert document["roles"][0]["exceeds"] is True
    on_cpu = load_config("quickstart", [SEVEN, "model.dtype=bfloat16"])
    assert "no GPU  host" in fit_of(on_cpu).lines()[1]


def test_versions_that_are_kept_for_rescoring_are_in_the_memory_of_the_host_or_are_published_files():
    def trainer(*overrides):
        return fit_of(config(SEVEN, *overrides)).roles[0]

    through_store = "weights.transport=object_store"
    without = trainer("trainer.rescore_share=0", through_store).host_bytes
    assert trainer(through_store).host_bytes - without == 3 * 2 * NUM_7B
    assert trainer("trainer.rescore_bytes=1000", through_store).host_bytes - without == 2 * NUM_7B + 1000
    shared = trainer("trainer.rescore_share=0")
    assert trainer().host_bytes == shared.host_bytes
    assert trainer().shared_bytes - shared.shared_bytes == 2 * 2 * NUM_7B


NUM_135M = 49152 * 576 + 30 * (2 * 576 * 64 * (9 + 3) + 3 * 576 * 1536 + 2 * 576) + 576
ON_CPU = (
    "model.path=builtin:smollm2", "model.device=cpu", "rollouts.max_prompt_tokens=8", "rollouts.max_tokens=56",
    "trainer.pack_tokens=512", "engine.concurrency=128",
)  # fmt: skip


def host_parts(role, *overrides):
    (role_fit,) = [own for own in fit_of(load_config("quickstart", [*ON_CPU, *overrides])).roles if own.role == role]
    return {name: size for name, size in role_fit.host.items() if size}


@pytest.mark.parametrize(("dtype", "width", "masters"), [("float32", 4, 0), ("bfloat16", 2, 4)])
def test_every_term_of_a_trainer_on_a_cpu(dtype, width, masters):
    activations = 512 * 30 * (24 * 576 + 8 * 1536) * width / 2 + 3 * 4 * 2**22
    terms = {
        "weights": width * NUM_135M, "gradients": (4 + width) * NUM_135M, "optimizer": (8 + masters) * NUM_135M,
        "activations": activations, "checkpoint": 2**28, "processes": 2**29,
    }  # fmt: skip
    assert host_parts("trainer", f"model.dtype={dtype}") == terms
    two = host_parts("trainer", f"model.dtype={dtype}", "trainer.threads=2")
    assert two == terms | {"packs": activations + width * NUM_135M}


def test_a_file_of_a_checkpoint_has_at_least_one_tensor_and_is_at_most_the_state():
    large = host_parts("trainer", "model.path=Qwen/Qwen2.5-0.5B")
    assert large["checkpoint"] == 4 * 151936 * 896
    adapters = host_parts("trainer", "learner.lora_rank=1", "learner.lora_targets=q_proj")
    assert adapters["checkpoint"] == 12 * 30 * (576 + 576)


def test_each_rank_of_a_divided_state_copies_its_part():
    two = ("learner.kind=deepspeed", "trainer.ranks=2", "model.path=Qwen/Qwen2.5-0.5B")
    assert host_parts("trainer", *two, "learner.zero_stage=3")["checkpoint"] == 2 * 2 * 151936 * 896
    assert host_parts("trainer", *two, "learner.zero_stage=0")["checkpoint"] == 4 * 151936 * 896
    on_gpus = host_parts("trainer", *two, "learner.zero_stage=2", "model.device=cuda", "placement.gpu=H100")
    number = fit_of(load_config("quickstart", [*ON_CPU, *two])).num_parameters
    assert on_gpus["checkpoint"] == 12 * number + 2 * 2**28


def test_every_term_of_an_actor_on_a_cpu():
    terms = {
        "weights": 2 * NUM_135M, "head": 2 * 4 * 49152 * 576, "KV cache": 128 * 64 * 2 * 2 * 30 * 3 * 64,
        "sampling": 16 * 128 * 49152, "processes": 2**29,
    }  # fmt: skip
    assert host_parts("actor", "model.dtype=bfloat16") == terms
    through_store = ("model.dtype=bfloat16", "weights.transport=object_store")
    stored = host_parts("actor", *through_store, "weights.durable_every=1")
    assert stored == terms | {"weights": 3 * 2 * NUM_135M}
    deltas = host_parts("actor", *through_store, "weights.durable_every=4")
    assert deltas == stored | {"base": 2 * NUM_135M}
    del terms["head"]
    doubled = {"weights": 4 * NUM_135M, "KV cache": 2 * terms["KV cache"]}
    assert host_parts("actor", "model.dtype=float32") == terms | doubled
    lines = fit_of(load_config("quickstart", [*ON_CPU, "model.dtype=float32"])).lines()
    assert lines[-1].endswith("sampling 0.1 GB + processes 0.5 GB = 1.6 GB")
