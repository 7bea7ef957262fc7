"""One rank or two, torch or DeepSpeed in any stage: the same gradient, the same checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.trainer.learners import build_alone
from tests.integration.rank_cases import rows_of
from tests.models import published_by, state_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

ROOT = Path(__file__).parents[2]
BETA1 = 0.9
STAGES = (0, 1, 2, 3)
# At the first steps the gradient of adapters is small, B being 0; it is to be clipped too.
CLIP_NORM, LORA_CLIP_NORM = 0.005, 0.0002
LORA = ("learner.lora_rank=3", "learner.lora_alpha=1.5", f"learner.clip_norm={LORA_CLIP_NORM}")
ESS = ("learner.ess_scaling=true",)
ALONE = "weights.content=adapters"
BF16_STAGES = (1, 2, 3)


def deepspeed(stage, *more):
    return ["learner.kind=deepspeed", f"learner.zero_stage={stage}", *more]


def case(name, *overrides, steps=(1,), load=None):
    return {"name": name, "overrides": list(overrides), "steps": list(steps), "load": load}


TWO_RANKS = [
    case("torch"),
    *(case(f"zero{stage}", *deepspeed(stage)) for stage in STAGES),
    *(case(f"zero{stage}_after_torch", *deepspeed(stage), steps=(2,), load="torch") for stage in STAGES),
    case("torch_after_zero3", steps=(2,), load="zero3"),
    case("zero2_after_zero3", *deepspeed(2), steps=(2,), load="zero3"),
    case("offloaded2", *deepspeed(2, "learner.offload=optimizer"), steps=(2,), load="torch"),
    case("offloaded3", *deepspeed(3, "learner.offload=parameters"), steps=(2,), load="torch"),
    case("checkpointed3", *deepspeed(3, "learner.activation_checkpointing=true")),
    case("bf16_torch", "model.dtype=bfloat16"),
    *(case(f"bf16_zero{stage}", "model.dtype=bfloat16", *deepspeed(stage)) for stage in BF16_STAGES),
    case("bf16_torch_twice", "model.dtype=bfloat16", steps=(1, 2)),
    case("bf16_zero3_after_torch", "model.dtype=bfloat16", *deepspeed(3), steps=(2,), load="bf16_torch"),
    case("value_torch", "loss.advantage=value"),
    case("value_zero3", *deepspeed(3, "loss.advantage=value")),
    case("ess_torch", *ESS),
    case("ess_zero2", *deepspeed(2, *ESS)),
    case("ess_zero2_after_torch", *deepspeed(2, *ESS), steps=(2,), load="ess_torch"),
    case("ess_torch_after_zero2", *ESS, steps=(2,), load="ess_zero2"),
    case("lora_torch", *LORA),
    case("lora_zero0", *deepspeed(0, *LORA)),
    case("lora_zero2_after_torch", *deepspeed(2, *LORA), steps=(2,), load="lora_torch"),
    case("lora_zero3_after_torch", *deepspeed(3, *LORA), steps=(2,), load="lora_torch"),
    case("adapters_zero3_after_torch", *deepspeed(3, *LORA, ALONE), steps=(2,), load="lora_torch"),
]
REFUSING = {
    "torch": (),
    **{f"zero{stage}": deepspeed(stage) for stage in STAGES},
    **{f"bf16_zero{stage}": ("model.dtype=bfloat16", *deepspeed(stage)) for stage in BF16_STAGES},
    "offloaded2": deepspeed(2, "learner.offload=optimizer"),
    "offloaded3": deepspeed(3, "learner.offload=parameters"),
    "bf16_offloaded2": ("model.dtype=bfloat16", *deepspeed(2, "learner.offload=optimizer")),
}
REFUSALS = [
    case(f"{name}_{kind}", *overrides, steps=steps)
    for name, overrides in REFUSING.items()
    for kind, steps in (("refused", (-1, 1, -2, -3, 2)), ("undisturbed", (1, 2)))
]
ONE_RANK = [
    case("zero3_alone", *deepspeed(3)),
    case("zero1_alone_after_two", *deepspeed(1), steps=(2,), load="zero3"),
]
# Another stage, or the same after another state: the paths of the code are those of cases that remain.
CAMPAIGN = {
    *(f"zero{stage}_after_torch" for stage in (0, 1, 2)),
    *("bf16_zero1", "bf16_zero2", "ess_zero2", "ess_torch_after_zero2", "lora_zero0", "lora_zero3_after_torch"),
    "zero3_alone",
}
CAMPAIGN_REFUSALS = {"zero0", "zero1", "bf16_zero1", "bf16_zero2", "offloaded2"}


def marked(names, campaign):
    return [pytest.param(name, marks=[pytest.mark.campaign] if name in campaign else []) for name in names]


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    """Settings of every case. Sizes that two ranks do not divide, and a clip threshold that every step exceeds."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=101, hidden_size=36, intermediate_size=49, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.1,
            pad_token_id=0,
        )
    ).save_pretrained(path)  # fmt: skip
    settings = {"pack_tokens": 24, "steps": 10}
    learner = {"clip_norm": CLIP_NORM, "weight_decay": 0.1, "warmup_steps": 0, "lr": 1e-2}
    return [
        f"model.path={path}",
        *(f"trainer.{key}={value}" for key, value in settings.items()),
        *(f"learner.{key}={value}" for key, value in learner.items()),
    ]


def run_ranks(ranks, cases, common, out, **environment):
    cases = [{**rank_case, "overrides": [*common, *rank_case["overrides"]]} for rank_case in cases]
    (out / "cases.json").write_text(json.dumps(cases))
    return subprocess.run(
        [sys.executable, "-m", "tests.integration.rank_cases", str(ranks), str(out / "cases.json"), str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False, env=os.environ | environment,
    )  # fmt: skip


def run_cases(ranks, cases, common, out):
    ran = run_ranks(ranks, cases, common, out)
    assert ran.returncode == 0, ran.stderr[-3000:]
    stats = json.loads((out / "stats.json").read_text())
    return {name: (load_file(out / f"{name}.safetensors"), told) for name, told in stats.items()}


@pytest.fixture(scope="module")
def outcomes(request, common, tmp_path_factory):
    """What every case ended with; without those for campaigns only, unless such a test is to run."""
    left_out = CAMPAIGN | {f"{name}_{kind}" for name in CAMPAIGN_REFUSALS for kind in ("refused", "undisturbed")}
    if any(item.path == request.path and item.get_closest_marker("campaign") for item in request.session.items):
        left_out = set()
    together, alone = (
        [each for each in cases if each["name"] not in left_out] for cases in (TWO_RANKS + REFUSALS, ONE_RANK)
    )
    out = tmp_path_factory.mktemp("ranks")
    return run_cases(2, together, common, out) | run_cases(1, alone, common, out)


# Python imports a module of this name at its start. Rank 1 has no memory for its packs.
FULL_GPU = """
import sys
if "--rank" in sys.orig_argv:
    import torch
    from pipelinerl_core.training.learner import TorchLearner

    def fail(learner, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.30 GiB.")

    TorchLearner._backward = fail
"""


def test_rank_0_reports_why_another_rank_cannot_go_on(common, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(FULL_GPU)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ran = run_ranks(2, [case("torch")], common, tmp_path, PYTHONPATH=path)
    assert ran.returncode == 1
    assert ran.stderr.count("rank 1 of 2 ended with code 2") == 1
    last = ran.stderr.splitlines()[-1]
    assert "ConfigError: trainer: step 1, with packs of up to " in last
    assert "CUDA out of memory. Tried to allocate 2.30 GiB. Set trainer.pack_tokens below 24, or " in last


KINDS = (
    ("float32", ()),
    ("value", ("loss.advantage=value",)),
    ("ess", ESS),
    ("lora", LORA),
    ("adapters", (*LORA, ALONE)),
)


@pytest.fixture(scope="module")
def wanted(common, outcomes):
    """What a case must end with after step 1 or 2: the torch learner alone, in bfloat16 on the same packs."""
    results = {}
    for kind, more in KINDS:
        config = load_config("quickstart", [*common, *more])
        learner = build_alone(config)
        for step in (1, 2):
            stats = [learner.step(rows_of(config, step))]
            published = {f"published.{name}": tensor for name, tensor in published_by(learner).items()}
            results[kind, step] = state_of(learner)[0] | published, {"steps": stats}
    # In bfloat16 other packs give other gradients, in the third digit.
    return results | {("bfloat16", 1): outcomes["bf16_torch"], ("bfloat16", 2): outcomes["bf16_torch_twice"]}


@pytest.mark.parametrize("name", marked((rank_case["name"] for rank_case in TWO_RANKS + ONE_RANK), CAMPAIGN))
def test_a_step_is_that_of_the_torch_learner(name, outcomes, wanted):
    tensors, told = outcomes[name]
    step = next(rank_case["steps"][-1] for rank_case in TWO_RANKS + ONE_RANK if rank_case["name"] == name)
    prefix = name.partition("_")[0]
    kind = "bfloat16" if prefix == "bf16" else prefix if prefix in dict(KINDS) else "float32"
    state, told_wanted = wanted[kind, step]
    assert tensors.keys() == state.keys()
    for key, tensor in state.items():
        assert tensors[key].dtype == tensor.dtype
        if key.endswith(".exp_avg"):  # after the first step it is (1 - beta1) times the clipped gradient
            torch.testing.assert_close(tensors[key] / (1 - BETA1), tensor / (1 - BETA1), rtol=1e-5, atol=1e-8)
        elif key.endswith(".step"):
            assert tensors[key] == step
        elif key.startswith(("weights.", "published.")):  # Adam divides by gradients that are nearly 0
            torch.testing.assert_close(tensors[key], tensor, rtol=0, atol=1e-5)
    divided = name.partition("_after")[0].removeprefix("bf16_").removesuffix("_alone")[-1] in "123"
    in_ranks = 1 if "_alone" in name or not divided else 2
    assert len({file.removeprefix("state-").rpartition("-")[0] for file in told["files"]}) == in_ranks
    last, stats = told["steps"][-1], told_wanted["steps"][-1]
    assert last["train/grad_norm"] == pytest.approx(stats["train/grad_norm"], rel=1e-5)
    clip_norm = LORA_CLIP_NORM if kind in ("lora", "adapters") else CLIP_NORM
    assert stats["train/grad_norm"] > 2 * clip_norm  # it was clipped
    importance = (f"importance/{key}" for key in ("ess", "ess_sequence", "ratio_mean", "kl"))
    for key in ("train/loss", *importance, "policy/entropy", "train/trained_tokens", "train/tokens"):
        assert last[key] == pytest.approx(stats[key], rel=1e-5, abs=1e-6), key
    reference, num_tokens = (told["values"].pop(key) for key in ("ess_reference", "ess_tokens"))
    assert told["values"] == {"version": step}
    if step == 1:
        assert (reference, num_tokens) == (last["importance/ess_sequence"], last["importance/sequence_tokens"])
    if kind == "ess":
        assert last["control/lr_factor"] == pytest.approx(stats["control/lr_factor"], rel=1e-5)
        assert step == 1 or last["control/lr_factor"] < 0.95


@pytest.mark.parametrize("name", marked(REFUSING, CAMPAIGN_REFUSALS))
def test_a_refused_step_changes_no_bit(name, outcomes):
    """On two ranks, each refusal is by both ranks; the steps before and after are as without the refusals."""
    state, told = outcomes[f"{name}_refused"]
    wanted, told_wanted = outcomes[f"{name}_undisturbed"]
    assert state.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(state[key], tensor), key
    before, first, masked, after, second = told["steps"]
    assert before.startswith("step 1: train/loss=nan")
    assert "importance/ess=nan" in masked
    assert after.startswith("step 2: train/loss=nan")
    for found_step, wanted_step in zip((first, second), told_wanted["steps"], strict=True):
        assert {**found_step, "time/compute_seconds": 0} == {**wanted_step, "time/compute_seconds": 0}
    assert told["values"] == told_wanted["values"]
    assert told["values"]["version"] == 2


def test_every_rank_adds_its_share(outcomes):
    """All cases score the same rollouts with nearly the same weights, whoever computes them."""
    scores = {
        told["scored"] for name, (_, told) in outcomes.items() if name in ("torch", *(f"zero{s}" for s in STAGES))
    }
    assert max(scores) - min(scores) < 1e-3
