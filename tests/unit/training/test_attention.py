"""Attention over packs: three ways that compute the same, and which of them is taken where.

On a CPU flex attention has no compiled kernel and refuses gradients, though its plain form has them: the refusal is
lifted here. Flash attention has none at all: a stand-in in plain torch takes its place and checks what it is given.
"""

import itertools
import logging

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pipelinerl_core.algo.packed import Parent, layout_of
from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config, load_config, resume_config
from pipelinerl_core.training import attention, attention_choice
from pipelinerl_core.training.attention import (
    ATTENTION_FUNCTIONS,
    FLEX_ATTENTION,
    FLOAT32_ATTENTION,
    PACKED_ATTENTION,
    VARLEN_ATTENTION,
)
from pipelinerl_core.training.attention_choice import Heads, choose_attention, missing_for
from pipelinerl_core.training.block_masks import BLOCK_TOKENS, block_mask, blocks
from pipelinerl_core.training.learner import TorchLearner
from pipelinerl_core.training.model import hidden_states, prepare_model
from tests.models import tiny_model
from tests.rollout_rows import build_rollout
from tests.unit.training.no_waiting_case import NoWaiting

# Torch's tracer of the plain form of flex attention looks at it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

PACKS = [(5, 1, 3), (1,), (1, 130, 1, 20), (260,), (64, 64, 128, 5)]
HEADS = [(4, 4), (4, 2)]
GPU = torch.device("cuda")  # a name: nothing here is put on one


def plain_varlen(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """What torch.nn.attention.varlen.varlen_attn says it computes, one sequence and all pairs at a time."""
    for cu, longest, heads in ((cu_q, max_q, query), (cu_k, max_k, key)):
        assert (cu.dtype, cu.ndim, cu.is_contiguous()) == (torch.int32, 1, True)
        assert (cu[0], cu[-1]) == (0, heads.shape[0])
        assert longest == cu.diff().max()
        assert heads.ndim == 3
    assert key.shape == value.shape
    assert key.shape[2] == query.shape[2]
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))  # the kernel reads whole heads
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert window_size[1] == 0
    parts = []
    for own, keys in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True):
        num_keys = keys[1] - keys[0]  # the last query sees the last key
        ahead = torch.arange(num_keys - (own[1] - own[0]), num_keys)[:, None] - torch.arange(num_keys)
        seen = (ahead >= 0) & ((ahead <= window_size[0]) | (window_size[0] == -1))
        heads = (
            tensor[slice(*bounds)].transpose(0, 1)[None]
            for tensor, bounds in ((query, own), (key, keys), (value, keys))
        )
        attended = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def anywhere(monkeypatch):
    """Flash and flex attention with gradients on a CPU."""
    monkeypatch.setattr(attention, "varlen_attn", plain_varlen)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr("torch.nn.attention.flex_attention._warn_once", lambda *_, **__: None)


def outcome(name, lengths, heads, **options):
    """What comes out of an attention function, and its gradients."""
    leaves = own_heads(lengths, heads)
    heads_of = [leaf.transpose(1, 2) for leaf in leaves]  # as a model has them
    output, _ = ATTENTION_FUNCTIONS[name](torch.nn.Module(), *heads_of, None, layout=layout_of(lengths), **options)
    assert output.shape == leaves[0].shape
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("name", [VARLEN_ATTENTION, FLEX_ATTENTION])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", PACKS)
def test_values_and_gradients_are_those_of_padded_attention(name, heads, lengths):
    actual = outcome(name, lengths, heads, scaling=0.3)
    torch.testing.assert_close(actual, outcome(PACKED_ATTENTION, lengths, heads, scaling=0.3), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("window", [1, 7, 200])
def test_a_sliding_window_counts_the_token_itself(window):
    lengths, heads = (150, 3, 40), (4, 2)
    flex, varlen = (
        outcome(name, lengths, heads, sliding_window=window) for name in (FLEX_ATTENTION, VARLEN_ATTENTION)
    )
    torch.testing.assert_close(flex, varlen, rtol=1e-4, atol=1e-5)
    if window == 1:  # its own value, nothing else
        values = torch.randn(1, sum(lengths), 4, 8)
        alone, _ = ATTENTION_FUNCTIONS[FLEX_ATTENTION](
            torch.nn.Module(), *[values.transpose(1, 2)] * 3, None, layout=layout_of(lengths), sliding_window=1
        )
        torch.testing.assert_close(alone, values)
    padded = outcome(PACKED_ATTENTION, lengths, heads, sliding_window=window)
    torch.testing.assert_close(flex, padded, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("name", [PACKED_ATTENTION, VARLEN_ATTENTION, FLEX_ATTENTION])
@pytest.mark.parametrize("window", [None, 1, 7, 90])
@pytest.mark.parametrize(
    ("lengths", "parents"),
    [
        ((5, 4, 2, 3, 1), [Parent(0, 5), Parent(0, 2), Parent(1, 1)]),
        ((150, 9, 140, 60), [Parent(0, 130), Parent(1, 9)]),
        ((3, 1), [Parent(0, 1)]),
    ],
    ids=str,
)
def test_a_context_with_a_parent_attends_as_if_it_had_the_tokens_itself(name, window, lengths, parents):
    leaves = own_heads(lengths, (4, 2))
    with_prefixes = copies(lengths, parents)
    outcomes = []
    for layout, places in (
        (layout_of(lengths, parents), np.arange(sum(lengths))),
        (layout_of(list(map(len, with_prefixes))), np.concatenate(with_prefixes)),
    ):
        heads_of = [leaf[:, places].transpose(1, 2) for leaf in leaves]
        output, _ = ATTENTION_FUNCTIONS[name](
            torch.nn.Module(), *heads_of, None, layout=layout, sliding_window=window
        )
        # Of a context with a parent only the own tokens are compared, which are the last.
        ends = np.cumsum(layout.lengths)
        own = np.concatenate([np.arange(end - size, end) for end, size in zip(ends, lengths, strict=True)])
        weights = torch.randn(sum(lengths), 4, 8, generator=torch.Generator().manual_seed(2))
        outcomes.append([output[:, own], *torch.autograd.grad((output[:, own] * weights).sum(), leaves)])
    torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-5)


def test_masks_of_packs_with_other_numbers_of_parents_are_compiled_once():
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex_attention, dynamic=True, backend=counter)
    for num_parents in (*range(1, 13), 0, 0):
        layout = layout_of((128, *[16] * num_parents), [Parent(0, 100)] * num_parents)
        heads_BHTD = torch.randn(1, 2, sum(layout.lengths), 16)
        compiled(heads_BHTD, heads_BHTD, heads_BHTD, block_mask=block_mask(layout, None))
    assert counter.frame_count <= 4  # a first size, any size, and the same without parents


def test_masks_change_nothing_in_place():
    layout = layout_of((128, 16), [Parent(0, 100)])
    indices = [torch.zeros(1, dtype=torch.int64)] * 4
    graph = make_fx(block_mask(layout, 7).mask_mod)(*indices).graph
    names = [str(node.target) for node in graph.nodes]
    assert any("bitwise_or" in name for name in names)
    assert not any("_." in name for name in names), "the compiler of flex attention refuses these operations"


def test_values_may_have_another_size_than_keys():
    lengths, parents = (5, 3, 2), [Parent(0, 4)]
    leaves = own_heads(lengths, (4, 4), value_size=6)
    output, _ = ATTENTION_FUNCTIONS[PACKED_ATTENTION](
        torch.nn.Module(), *[leaf.transpose(1, 2) for leaf in leaves], None, layout=layout_of(lengths, parents)
    )
    query, keys, values = (leaf[0].detach() for leaf in leaves)
    seen = [0, 1, 2, 3, 8, 9]  # by the last token
    weights = torch.softmax(torch.einsum("hd,khd->hk", query[9], keys[seen]) / 8**0.5, -1)
    torch.testing.assert_close(output[0, 9], torch.einsum("hk,khd->hd", weights, values[seen]))
    assert output.shape == (1, 10, 4, 6)


def own_heads(lengths, heads, value_size=8):
    generator = torch.Generator().manual_seed(1)
    sizes = ((heads[0], 8), (heads[1], 8), (heads[1], value_size))
    shapes = [(1, sum(lengths), num, size) for num, size in sizes]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def copies(lengths, parents):
    """For each context the packed tokens of its prefix, then its own packed tokens."""
    starts = np.cumsum([0, *lengths])
    prefixes = [()] * (len(lengths) - len(parents)) + [
        starts[context] + np.arange(num_tokens) for context, num_tokens in parents
    ]
    return [
        np.concatenate([prefix, np.arange(start, start + size)]).astype(int)
        for prefix, start, size in zip(prefixes, starts, lengths, strict=False)
    ]


@pytest.mark.parametrize("window", [None, 1, 60, 128, 129, 300])
def test_blocks_are_those_that_torch_finds_by_asking_for_every_pair(window):
    rng = np.random.default_rng(window or 0)
    for _ in range(6):
        lengths = tuple(rng.integers(1, rng.choice([5, 200, 600]), rng.integers(1, 8)).tolist())
        layout = layout_of(lengths)
        mask = block_mask(layout, window)
        num = sum(lengths)
        wanted = create_block_mask(mask.mask_mod, None, None, num, num, device="cpu", BLOCK_SIZE=BLOCK_TOKENS)
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(mask, name), getattr(wanted, name)), (name, lengths)
            places = name.replace("num_blocks", "indices")
            assert torch.equal(getattr(mask, places), getattr(wanted, places)), (places, lengths)
        assert mask.seq_lengths == wanted.seq_lengths
        assert block_mask(layout, window) is mask  # for all layers of a pack
        some, all_pairs = blocks(lengths, window)
        assert not (some & all_pairs).any()


def pack():
    rng = np.random.default_rng(0)
    (batch,) = PackBatcher(4096).rollouts([build_rollout(rng, num_tokens=num) for num in (1, 140, 9)])
    batch.input_ids_T.remainder_(19)
    batch.target_ids_N.remainder_(19)
    return batch


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("name", [VARLEN_ATTENTION, FLEX_ATTENTION])
def test_a_model_computes_the_same_with_all_of_them(name):
    model, batch = tiny_model(), pack()
    states = []
    for implementation in (PACKED_ATTENTION, name):
        model.set_attn_implementation(implementation)
        states.append(hidden_states(model, batch))
    gradients = [torch.autograd.grad(state.square().sum(), list(model.parameters())) for state in states]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


def test_torchs_own_flash_attention_takes_packs_and_waits_for_nothing():
    # Its meta kernels: shapes and types, forward and backward.
    model = tiny_model(hidden_size=64).to("meta", torch.bfloat16)
    model.set_attn_implementation(VARLEN_ATTENTION)
    learner = TorchLearner(model, build_config({}), batcher=PackBatcher(64))
    batch = pack().to(torch.device("meta"))
    with NoWaiting() as mode:
        gradients = learner._backward(batch).gradients
    assert torch.ops.torch_attn._varlen_attn_backward in mode.seen
    shapes = [tensor.shape for tensor in model.parameters()]
    assert [tensor.shape for tensor in gradients] == shapes


def heads_on(device, dtype=torch.bfloat16):
    return Heads(4, 2, 8, dtype, device)


@pytest.mark.parametrize(
    ("kind", "dtype", "broken", "expected"),
    [
        ("auto", torch.bfloat16, (), VARLEN_ATTENTION),
        ("auto", torch.float32, (), FLEX_ATTENTION),
        ("auto", torch.bfloat16, ("varlen",), FLEX_ATTENTION),
        ("auto", torch.float32, ("flex",), PACKED_ATTENTION),
        ("auto", torch.bfloat16, ("varlen", "flex"), PACKED_ATTENTION),
        ("padded", torch.bfloat16, (), PACKED_ATTENTION),
        ("varlen", torch.bfloat16, (), VARLEN_ATTENTION),
        ("flex", torch.bfloat16, (), FLEX_ATTENTION),
    ],
)
def test_a_gpu_takes_the_best_that_works_there(monkeypatch, caplog, kind, dtype, broken, expected):
    monkeypatch.setattr(attention_choice, "has_triton", lambda: True)
    monkeypatch.setattr(attention_choice, "trial", lambda tried, _: "it is broken" if tried in broken else None)
    with caplog.at_level(logging.WARNING):
        assert choose_attention(kind, heads_on(GPU, dtype)) == expected
    assert len(caplog.records) == len(broken)


@pytest.mark.parametrize(
    ("kind", "heads", "says"),
    [
        ("varlen", heads_on(torch.device("cpu")), "the model is on cpu, this kind of attention needs a GPU"),
        ("flex", heads_on(torch.device("cpu")), "the model is on cpu, this kind of attention needs a GPU"),
        ("varlen", heads_on(GPU, torch.float32), "flash attention does not support float32"),
        ("flex", heads_on(GPU), "Triton is missing"),
    ],
)
def test_an_attention_that_does_not_work_is_refused_in_one_line(monkeypatch, kind, heads, says):
    monkeypatch.setattr(attention_choice, "has_triton", lambda: False)
    with pytest.raises(
        ConfigError, match=f"learner.attention={kind}: .*{says}.* Set learner.attention=auto"
    ) as raised:
        choose_attention(kind, heads)
    assert "\n" not in str(raised.value)


def test_without_a_kernel_or_a_compiler_auto_is_padded_and_says_nothing(monkeypatch, caplog):
    monkeypatch.setattr(attention_choice, "has_triton", lambda: False)
    monkeypatch.setattr(attention, "varlen_attn", None)
    assert "has no varlen_attn" in missing_for("varlen", heads_on(GPU))
    assert choose_attention("auto", heads_on(GPU)) == PACKED_ATTENTION
    assert choose_attention("auto", heads_on(torch.device("cpu"), torch.float32)) == PACKED_ATTENTION
    assert not caplog.records


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("kind", ["varlen", "flex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trial_finds_wrong_and_failing_attention(monkeypatch, kind, dtype):
    heads = heads_on(torch.device("cpu"), dtype)
    with torch.no_grad():  # as a caller that only scores may be
        assert attention_choice.trial(kind, heads) is None
    name = {"varlen": VARLEN_ATTENTION, "flex": FLEX_ATTENTION}[kind]
    right = ATTENTION_FUNCTIONS[name]
    wrong = {
        "difference from padded attention": lambda *args, **kwargs: right(*args, **kwargs, scaling=0.1),
        "RuntimeError: no kernel image": lambda *args, **kwargs: (_ for _ in ()).throw(
            RuntimeError("no kernel image\nis there")
        ),
    }
    for says, function in wrong.items():
        monkeypatch.setitem(ATTENTION_FUNCTIONS, name, function)
        problem = attention_choice.trial(kind, heads)
        assert says in problem
        assert "\n" not in problem


def test_a_model_in_bfloat16_on_a_cpu_attends_in_float32_unless_told_otherwise():
    assert prepare_model(tiny_model().bfloat16()).config._attn_implementation == FLOAT32_ATTENTION
    assert prepare_model(tiny_model().bfloat16(), "padded").config._attn_implementation == PACKED_ATTENTION
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, num, 12, 8, generator=generator).bfloat16() for num in (4, 2, 2)]
    layout = layout_of((9, 3))
    output, _ = ATTENTION_FUNCTIONS[FLOAT32_ATTENTION](torch.nn.Module(), *inputs, None, layout=layout)
    exact = [tensor.float() for tensor in inputs]
    expected, _ = ATTENTION_FUNCTIONS[PACKED_ATTENTION](torch.nn.Module(), *exact, None, layout=layout)
    assert torch.equal(output, expected.bfloat16())


def test_a_model_on_a_cpu_is_padded_and_refuses_the_others():
    model = prepare_model(tiny_model())
    assert model.config._attn_implementation == PACKED_ATTENTION
    with pytest.raises(ConfigError, match=r"learner\.attention=flex: the model is on cpu"):
        prepare_model(tiny_model(), "flex")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["learner.attention=varlen"],
            "does not support float32, but model.dtype=float32. Set learner.attention=auto or flex",
        ),
        (["learner.attention=flex"], "model.device=auto with engine.kind=embedded computes on the CPU"),
        (
            ["learner.attention=varlen", "model.dtype=bfloat16", "engine.kind=vllm", "model.device=cpu"],
            "computes on the CPU",
        ),
        (["learner.attention=flash"], "must be auto, padded, varlen or flex"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_before_anything_starts(overrides, says):
    with pytest.raises(ConfigError) as raised:
        load_config("quickstart", overrides)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_runs_from_before_the_setting_were_padded_and_train_again_to_the_last_bit():
    config = load_config("quickstart")
    values = config.model_dump(mode="json")
    del values["learner"]["attention"]
    assert build_config(values) == config
    assert "attention" not in config.arithmetic
    assert resume_config(config, ["learner.attention=padded"]).arithmetic == config.arithmetic
    on_gpu = ["model.device=cuda", "engine.kind=vllm", "model.dtype=bfloat16"]
    chosen = [
        load_config("quickstart", [*on_gpu, f"learner.attention={kind}"]).arithmetic.get("attention")
        for kind in ("auto", "varlen", "flex", "padded")
    ]
    assert chosen == ["auto", "varlen", "flex", None]
