import numpy as np
import torch

from pipelinerl_core.engine.embedded.sampling import noise_key, sample, uniforms


def draw(logits, *, temperature=1.0, top_p=None, uniform=0.5):
    rows = len(logits)
    token_ids, logprobs = sample(
        torch.tensor(logits),
        np.full(rows, temperature, np.float32),
        None if top_p is None else np.array(top_p, np.float32),
        np.broadcast_to(np.array(uniform, np.float64), rows).copy(),
    )
    return token_ids.tolist(), logprobs


def test_noise_is_splitmix64_with_its_published_outputs():
    # Reference outputs of SplitMix64 from state 0 (Vigna's splitmix64.c); here the state is given directly.
    words = (uniforms(np.zeros(3, np.uint64), np.array([0, 1, 2])) * 2.0**52).astype(np.uint64)
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert words.tolist() == [word >> 12 for word in published]


def test_noise_differs_between_neighbouring_seeds_and_positions_and_fills_the_unit_interval():
    keys = np.array([noise_key(seed) for seed in range(200)])
    draws = np.stack([uniforms(keys, np.full(200, position)) for position in range(200)])
    assert len(np.unique(draws)) == draws.size
    assert draws.min() >= 0
    assert draws.max() < 1
    # Mean of 40,000 uniforms: 0.5 +- 0.0014; correlation of neighbours: 0 +- 0.005.
    assert abs(draws.mean() - 0.5) < 0.006
    assert abs(np.corrcoef(draws[:, 1:].ravel(), draws[:, :-1].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(draws[1:].ravel(), draws[:-1].ravel())[0, 1]) < 0.02


def test_any_python_integer_is_a_seed():
    assert noise_key(-1) == noise_key(2**64 - 1)
    assert noise_key(2**80 + 7) == noise_key(7)


def test_a_token_is_the_first_whose_cumulative_probability_exceeds_the_uniform_number():
    logits = [np.log([0.2, 0.5, 0.3]).astype(np.float32).tolist()]
    for uniform, token, probability in [
        (0.0, 0, 0.2),
        (0.19, 0, 0.2),
        (0.21, 1, 0.5),
        (0.69, 1, 0.5),
        (0.71, 2, 0.3),
    ]:
        token_ids, logprobs = draw(logits, uniform=uniform)
        assert token_ids == [token]
        np.testing.assert_allclose(logprobs, np.log(probability), rtol=1e-5)


def test_the_log_probability_is_that_of_the_tempered_distribution():
    # Weights 1, 2, 4 at temperature 1/2 become 1, 4, 16.
    _, logprobs = draw([np.log([1.0, 2.0, 4.0]).astype(np.float32).tolist()], temperature=0.5, uniform=0.1)
    np.testing.assert_allclose(logprobs, np.log(4 / 21), rtol=1e-5)


def test_top_p_keeps_the_fewest_tokens_that_reach_top_p_and_renormalises():
    logits = [np.log([0.15, 0.5, 0.3, 0.05]).astype(np.float32).tolist()] * 2
    token_ids, logprobs = draw(logits, top_p=[0.6, 1.0], uniform=0.99)
    assert token_ids == [2, 3]
    np.testing.assert_allclose(logprobs, np.log([0.3 / 0.8, 0.05]), rtol=1e-5)
    token_ids, logprobs = draw(logits, top_p=[0.01, 1.0], uniform=0.0)
    assert token_ids == [1, 0]
    np.testing.assert_allclose(logprobs, [0.0, np.log(0.15)], atol=1e-6)


def test_a_token_of_probability_zero_is_never_drawn():
    logits = [[-1e30, 0.0, -1e30]]
    for uniform in (0.0, 0.5, 1 - 2.0**-52):
        assert draw(logits, uniform=uniform)[0] == [1]


def test_the_tail_of_a_large_vocabulary_is_drawn_with_the_right_frequency():
    # 200,000 equal tokens: a float32 running sum would be off by many tokens at the end.
    size = 200_000
    for uniform in (0.25, 0.999995):
        token_ids, _ = draw([[0.0] * size], uniform=uniform)
        assert abs(token_ids[0] - int(uniform * size)) <= 1


def test_blocks_of_the_vocabulary_change_no_draw():
    random = np.random.default_rng(0)
    for size in (64, 1024, 49_152, 50_257):
        logits = (random.standard_normal((32, size)) * 3).astype(np.float32)
        logits[:, :: random.integers(2, 5)] = -np.inf  # whole blocks and single tokens without probability
        logits[::2, : size // 2] = -np.inf
        uniform = random.random(32)
        uniform[:2], uniform[2:4] = 0.0, 1 - 2.0**-52
        token_ids, logprobs = draw(logits.tolist(), uniform=uniform)
        exact = np.exp(torch.log_softmax(torch.from_numpy(logits), -1).double().numpy())
        before = np.cumsum(exact, axis=-1) - exact
        chosen = np.arange(32), np.array(token_ids)
        share = (uniform * exact.sum(-1) - before[chosen]) / exact[chosen]
        assert (exact[chosen] > 0).all()
        # The token's own part of [0, 1) has the uniform number, to the rounding of the sums.
        slack = 1e-6 / exact[chosen]
        assert ((share > -slack) & (share < 1 + slack)).all()
        np.testing.assert_allclose(logprobs, np.log(exact[chosen]), atol=1e-5)


def test_a_row_of_nan_has_a_token_of_the_vocabulary_and_the_log_probability_nan():
    token_ids, logprobs = draw([[float("nan")] * 1024, [0.0] * 1024])
    assert token_ids[0] in range(1024)
    assert np.isnan(logprobs[0])
    assert token_ids[1] == 512
