"""A reservation and its rows in one answer: nothing is lost where messages are, and nothing is asked for twice."""

import itertools

import pytest

from pipelinerl_core.channel.client import HubClient
from pipelinerl_core.channel.server import HubServer
from pipelinerl_core.data.codec import decode_rollouts, encode_rollouts
from pipelinerl_core.errors import HubUnavailable
from pipelinerl_core.messages import Group, Reserve, Rows
from tests.rollout_rows import build_group, group_ref
from tests.stream_hub import QueueHub

TOKEN = "a-test-token"
NUM_GROUPS = 4


@pytest.fixture
def hub():
    """A hub with the groups of two steps."""
    service = QueueHub(credit=2 * NUM_GROUPS, groups_per_step=NUM_GROUPS)
    server = HubServer(service, host="127.0.0.1", port=0, token=TOKEN)
    server.start()
    service.url = server.url
    actor = HubClient(service.url, token=TOKEN, role="actor", name="actor-0")
    for group_id in range(2 * NUM_GROUPS):
        rollouts = build_group(0, group_id=group_id)
        actor.request(Group(lease_id=rollouts[0].lease_id, ref=group_ref(rollouts)), encode_rollouts("run", rollouts))
    actor.close()
    yield service
    assert server.shutdown(30.0)


def reserve(client, step):
    """(groups of the answer, those whose rows came with it)."""
    answer, received = client.reserve(Reserve(step=step, epoch=0))
    for header, rows in received:
        assert {rollout.group_id for rollout in decode_rollouts(rows)} == {header.group_id}
    return [ref.group_id for ref in answer.groups], [header.group_id for header, _ in received]


def test_the_rows_come_with_the_answer(hub):
    client = HubClient(hub.url, token=TOKEN, role="trainer", name="trainer", retry_seconds=30)
    for step, expected in ((1, [0, 1, 2, 3]), (2, [4, 5, 6, 7]), (1, [0, 1, 2, 3])):
        assert reserve(client, step) == (expected, expected)
    assert not any(isinstance(message, Rows) for message in hub.received)
    answer, received = client.reserve(Reserve(step=3, epoch=0, wait_seconds=0.01))
    assert (answer.is_ready, received) == (False, [])
    client.close()


def test_the_end_of_the_hub_is_an_error_and_a_silent_hub_is_not_waited_for(hub):
    client = HubClient(hub.url, token=TOKEN, role="trainer", name="trainer", retry_seconds=0.05)
    for step in (1, 2):
        reserve(client, step)
    with pytest.raises(HubUnavailable, match=r"no answer to reserve .* within 0.2 s"):
        client.reserve(Reserve(step=3, epoch=0, wait_seconds=5.0), timeout=0.2)
    client.close(bye=False)
    with pytest.raises(HubUnavailable, match="is lost"):
        client.reserve(Reserve(step=1, epoch=0))


@pytest.mark.parametrize("first_lost", range(1, 7))
def test_whatever_is_lost_comes_again_or_is_left_to_be_asked_for(hub, first_lost):
    """The n-th and every seventh message after it is lost: the request, the answer, or one group's rows."""
    counter = itertools.count(1)
    client = HubClient(
        hub.url, token=TOKEN, role="trainer", name="trainer", retry_seconds=0.05,
        faults=lambda direction: next(counter) % 7 == first_lost,
    )  # fmt: skip
    for step, expected in ((1, [0, 1, 2, 3]), (2, [4, 5, 6, 7])):
        groups, at_hand = reserve(client, step)
        assert groups == expected
        assert set(at_hand) <= set(expected)
        missing = tuple((group_id, 0) for group_id in expected if group_id not in at_hand)
        others = client.request_rows(Rows(step=step, groups=missing)) if missing else []
        assert sorted([*at_hand, *(header.group_id for header, _ in others)]) == expected
    client.close()
