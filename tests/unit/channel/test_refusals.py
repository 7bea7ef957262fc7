"""One table of refusals: the hub's code for an error, and the peer's error for a code."""

import pytest

from pipelinerl_core.channel.refusals import REFUSALS, Next, after, code_of, error_of
from pipelinerl_core.errors import RewardError, StreamError
from pipelinerl_core.messages import Refused


@pytest.mark.parametrize("code", [code for code, refusal in REFUSALS.items() if refusal.error])
def test_an_error_that_the_hub_refuses_with_reaches_the_peer_as_the_same_error(code):
    error = error_of(Refused(re=1, code=code, detail="lease-3 is held by actor-1"))
    assert str(error) == "lease-3 is held by actor-1"
    assert code_of(error) == code


@pytest.mark.parametrize("code", ["unknown_boot", "internal", "of a later version"])
def test_a_refusal_without_an_error_of_its_own_is_named_by_its_code(code):
    error = error_of(Refused(re=1, code=code, detail="step 3"))
    assert type(error) is StreamError
    assert str(error) == f"the hub refused ({code}): step 3"


def test_an_error_without_a_code_is_internal():
    assert code_of(RewardError("0.3")) == "internal"


def test_a_code_of_a_later_version_ends_the_role():
    assert after(Refused(re=1, code="of a later version", detail="")) is Next.END
