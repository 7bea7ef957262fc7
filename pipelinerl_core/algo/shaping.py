"""Shaping of the reward of a rollout before the advantage is computed."""


def overlong_penalty(num_tokens: int, *, max_tokens: int, overlong_tokens: int) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13): 0 to -1 over the last tokens of the limit.

    num_tokens: length of the completion, at most max_tokens. overlong_tokens: number of tokens before the limit over
    which the penalty grows; 0: no penalty.

    Example: max_tokens 100, overlong_tokens 20: 80 tokens give 0, 90 give -0.5, 100 give -1.
    """
    if overlong_tokens == 0:
        return 0.0
    return -min(1.0, max(0.0, (num_tokens - (max_tokens - overlong_tokens)) / overlong_tokens))
