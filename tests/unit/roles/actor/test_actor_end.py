"""How an actor ends, and what it does about segments while no hub is there: without engine or channel.

Tests replace the private log of an actor, which would need a hub and a store that waits.
"""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from pipelinerl_core.data.partials import PartialReader
from pipelinerl_core.data.segments import SealedSegment
from pipelinerl_core.errors import EngineError, HubUnavailable, RunOver, StoreError
from pipelinerl_core.messages import Ack, Lease, Refused, SyncReply
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.actor.finished_group import FinishedGroup
from pipelinerl_core.roles.actor.loop import Actor, ActorParts
from pipelinerl_core.roles.actor.sealing import Sealer
from pipelinerl_core.rollouts.player import SingleTurns, TextCodec
from pipelinerl_core.types import Chunk, Completion, FinishReason, Outcome, PreviousHolder, Prompt, WeightSpan
from tests.builders import group_named
from tests.fakes import MemoryStore
from tests.unit.roles.actor.actor_case import NO_PLAYERS
from tests.waiting import until

SECONDS = 60.0


class Segments:
    """Everything appended waits; a seal makes one segment of it."""

    def __init__(self):
        self.waiting = []
        self.num_sealed = 0

    def append(self, rows, ref):
        self.waiting.append((ref.group_id, ref.attempt))

    def seal(self):
        if not self.waiting:
            return None
        keys, self.waiting = tuple(self.waiting), []
        self.num_sealed += 1
        return SealedSegment(self.num_sealed - 1, keys)

    seal_due = seal


class Link:
    """Answers with what `answers` says of a message: an answer, or an error to raise."""

    boot_id = "boot"
    registered = None
    on_sync_now = None
    is_cancelled = None

    def __init__(self, answers=lambda message: Ack(re=0)):
        self.answers = answers
        self.told = []
        self.is_closed = False

    def connect(self):
        self.request(SimpleNamespace(kind="register"))

    def request(self, message, rows=None, *, seconds=None):
        answer = self.answers(message)
        if isinstance(answer, Exception):
            raise answer
        self.told.append(message)
        return answer

    def register_again(self):
        raise HubUnavailable("lost just now")

    def close(self):
        self.is_closed = True


def group(group_id, *, is_sent=False):
    ref = group_named(group_id, num_rollouts=8, num_tokens=80)
    return FinishedGroup(ref, f"lease-{group_id}", rows=None, is_sent=is_sent)


async def nothing(keys):
    """In place of the log."""


def sealer(link, segments, forget=nothing):
    return Sealer(segments, link, actor="a", epoch=1, forget=forget)


async def test_segments_are_written_while_no_hub_is_there_and_told_in_order_to_a_new_hub():
    is_there = threading.Event()
    link = Link(lambda message: Ack(re=0) if is_there.is_set() else HubUnavailable("away"))
    segments, forgotten = Segments(), []

    async def forget(keys):
        forgotten.extend(keys)

    group_sealer = sealer(link, segments, forget)
    loops = [asyncio.create_task(group_sealer.run(0.01)), asyncio.create_task(group_sealer.report())]
    for group_id in range(3):
        group_sealer.add(group(group_id, is_sent=True))
        await until(lambda number=group_id: segments.num_sealed == number + 1, "a segment")
    await until(lambda: len(forgotten) == 3, "three forgotten groups")
    assert link.told == []
    is_there.set()
    await until(lambda: group_sealer.lease_refs() == [], "three reports")  # sent, sealed and known to the hub
    for loop in loops:
        loop.cancel()
    assert [message.seq for message in link.told] == [0, 1, 2]


async def test_a_group_whose_segment_a_new_hub_learns_first_is_still_offered():
    """Otherwise the hub has the segment of the group, never counts the group as ready, and leases it again."""
    link = Link()
    group_sealer = sealer(link, Segments())
    group_sealer.add(group(0, is_sent=True))
    group_sealer.must_send_again = True  # it has registered with a new hub
    await group_sealer.seal(everything=True)
    telling = asyncio.create_task(group_sealer.report())
    await until(lambda: link.told, "a report")
    telling.cancel()
    (again,) = group_sealer.groups_to_send_again()
    assert again.seq == 0
    group_sealer.confirm(again)  # the new hub has it, and where it lies
    assert group_sealer.lease_refs() == group_sealer.groups_to_send_again() == []


async def test_the_log_of_a_sealed_group_is_kept_until_the_group_is_sent():
    """Otherwise the next holder samples the group from the start, if this actor leaves without credit for it."""
    forgotten = []

    async def forget(keys):
        forgotten.extend(sorted(keys))

    group_sealer, unsent, sent = sealer(Link(), Segments(), forget), group(0), group(1, is_sent=True)
    for finished in (unsent, sent, group(2)):
        group_sealer.add(finished)
    await group_sealer.seal(everything=True)
    assert forgotten == [(1, 0)]
    unsent.is_sent = True
    group_sealer.confirm(unsent)
    await group_sealer.close()
    assert forgotten == [(1, 0), (0, 0)]


async def test_a_store_that_fails_ends_no_sequence_and_loses_no_group():
    class Failing(Segments):
        is_away = True

        def seal(self):
            if self.is_away:
                raise StoreError("the disk is full")
            return super().seal()

        seal_due = seal

    link, segments = Link(), Failing()
    group_sealer = sealer(link, segments)
    group_sealer.add(group(0))
    for everything in (True, False):
        await group_sealer.seal(everything=everything)
    with pytest.raises(StoreError, match="the disk is full"):
        await group_sealer.close()  # the last attempt: the supervisor of the actor must see the error
    segments.is_away = False
    await group_sealer.close()
    assert [message.groups for message in link.told] == [((0, 0),)]


@pytest.mark.parametrize("error", [HubUnavailable("away"), RunOver("over")])
async def test_the_last_segment_is_written_without_a_hub(error):
    segments = Segments()
    group_sealer = sealer(Link(lambda message: error), segments)
    group_sealer.add(group(0))
    group_sealer.add(group(1))
    await group_sealer.close()
    assert segments.num_sealed == 1


class Engine:
    """Has nothing to do."""

    weight_version = 0

    def stats(self):
        names = (
            "running waiting slots num_tokens num_steps kv_usage num_prefilled num_reused running_seconds "
            "overrun_seconds"
        )
        return SimpleNamespace(**dict.fromkeys(names.split(), 0))

    def set_paused(self, is_paused):
        pass

    def set_pace(self, step_delay_seconds):
        pass


def test_the_pauses_of_a_paced_engine_are_counted_per_token():
    engine = SimpleNamespace(set_pace=lambda seconds: None)
    pacer = SimpleNamespace(delay_seconds=0.01, update=lambda ready_groups, seconds: 0.02)
    actor = SimpleNamespace(
        _engine=engine, _pacer=pacer, _paced_at=0.0, _paced_tokens=100, _paced_seconds=1.0, _num_sampled=lambda: 300
    )
    Actor._set_pace(actor, 5)
    assert actor._paced_seconds == 1.0 + 0.01 * 200
    assert actor._paced_tokens == 300


def run_actor(link, stop):
    """Run an actor to its end; how often its log was written before it closed the link."""
    flushes = []

    async def main():
        parts = ActorParts(
            engine=Engine(), players=NO_PLAYERS, subscriber=None, segments=Segments(), store=MemoryStore()
        )
        tested_actor = Actor(load_config("quickstart"), parts, run_id="run", name="a", epoch=1, link=lambda _: link)

        async def flush():
            flushes.append(link.is_closed)

        tested_actor._log.flush = flush
        tested_actor._log.run = lambda: asyncio.sleep(SECONDS)
        await asyncio.wait_for(tested_actor.run(stop), SECONDS)

    try:
        asyncio.run(main())
    except* HubUnavailable:
        flushes.append("HubUnavailable")
    assert link.is_closed
    return flushes


def said(*answers):
    """A hub that answers syncs so, one after the other, and everything else with an acknowledgement."""
    left = list(answers)
    return lambda message: left.pop(0) if message.kind == "sync" else Ack(re=0)


def test_an_actor_that_is_told_to_drain_writes_its_log_once_more():
    drain = SyncReply(re=0, boot_id="boot", state="drain")
    assert run_actor(Link(said(drain)), threading.Event()) == [False]


def test_an_actor_whose_hub_has_left_for_good_ends_as_by_a_drain():
    assert run_actor(Link(said(RunOver("over"))), threading.Event()) == [False]


def test_an_actor_that_comes_when_the_run_is_over_ends_at_once():
    assert run_actor(Link(lambda message: RunOver("over")), threading.Event()) == []


def test_an_actor_that_is_stopped_while_its_hub_is_away_writes_its_log_and_ends():
    stop = threading.Event()

    def answers(message):
        if message.kind == "sync":
            assert link.is_cancelled() is False
            stop.set()
            assert link.is_cancelled() is True  # the link asks while it looks for the hub
            return HubUnavailable("away")
        return Ack(re=0)

    link = Link(answers)
    assert run_actor(link, stop) == [False]


def test_an_actor_that_is_stopped_before_any_hub_answers_ends():
    stop = threading.Event()
    stop.set()
    assert run_actor(Link(lambda message: HubUnavailable("away")), stop) == []


def test_an_actor_whose_hub_stays_away_writes_its_log_before_the_failure():
    assert run_actor(Link(said(HubUnavailable("away"))), threading.Event()) == [False, "HubUnavailable"]


class FailingEngine(Engine):
    """Ends the first rollout of a group after two tokens, and fails for good after two tokens of the second."""

    failure = ""

    async def generate(self, request):
        ids, logprobs = np.array([1, 2], np.int32), np.zeros(2, np.float32)
        whole = Completion(
            token_ids=ids,
            rollout_logprobs=logprobs,
            weight_spans=(WeightSpan(0, 0, 2),),
            finish_reason=FinishReason.STOP,
        )
        is_first = request.request_id.endswith(".0")
        yield Chunk(
            request_id=request.request_id,
            token_ids=ids,
            rollout_logprobs=logprobs,
            weight_version=0,
            completion=whole if is_first else None,
        )
        if not is_first:
            self.failure = "the engine failed: OutOfMemoryError"
            raise EngineError(self.failure)

    def flush(self):
        pass


class Scorer:
    async def score(self, prompt, text, completion=None):
        return 1.0


def test_an_engine_that_fails_ends_no_group_and_its_tokens_are_in_the_log():
    """Otherwise each group is `failed`, or is trained with only its short rollouts."""
    store, segments, engine = MemoryStore(), Segments(), FailingEngine()
    config = load_config("quickstart")
    codec = TextCodec(encode=lambda prompt: np.array([1], np.int32), decode=str)
    prompt = Prompt(prompt_id="p", source="sums", env="sums", text="1+2=")
    lease = Lease(group_id=4, attempt=0, lease_id="4.0", deadline_seconds=0.0, group_size=2, prompt=prompt)
    answer = SyncReply(re=0, boot_id="boot", leases=(lease,))
    link = Link(lambda message: answer if message.kind == "sync" else Ack(re=0))
    players = {"": SingleTurns(engine, Scorer(), codec, config)}

    async def main():
        parts = ActorParts(engine=engine, players=players, subscriber=None, segments=segments, store=store)
        tested_actor = Actor(config, parts, run_id="run", name="a", epoch=1, link=lambda _: link)
        await asyncio.wait_for(tested_actor.run(threading.Event()), SECONDS)

    with pytest.RaisesGroup(pytest.RaisesExc(EngineError, match="OutOfMemoryError")):
        asyncio.run(main())
    logged = PartialReader(store).read_continuations(4, [PreviousHolder("a", 1, 0)])
    assert {index: (len(row.token_ids), row.outcome) for index, row in logged.items()} == {
        0: (2, Outcome.SCORED),
        1: (2, None),
    }
    assert {message.kind for message in link.told} == {"register", "sync"}
    assert segments.num_sealed == 0


def test_a_hub_that_is_lost_while_an_actor_registers_again_is_looked_for():
    unknown = Refused(re=0, code="unknown_boot", detail="another hub")
    drain = SyncReply(re=0, boot_id="boot", state="drain")
    assert run_actor(Link(said(unknown, drain)), threading.Event()) == [False]


def test_syncs_go_on_while_every_thread_of_other_work_waits_for_the_store():
    syncs, is_there = [], threading.Event()

    def answers(message):
        if message.kind != "sync":
            return Ack(re=0)
        syncs.append(message)
        if len(syncs) == 5:
            is_there.set()
            return SyncReply(re=0, boot_id="boot", state="drain")
        return SyncReply(re=0, boot_id="boot")

    async def main():
        parts = ActorParts(
            engine=Engine(), players=NO_PLAYERS, subscriber=None, segments=Segments(), store=MemoryStore()
        )
        tested_actor = Actor(
            load_config("quickstart"), parts, run_id="run", name="a", epoch=1, link=lambda _: Link(answers)
        )
        tested_actor._log.flush = lambda: asyncio.sleep(0)
        tested_actor._log.run = lambda: asyncio.sleep(SECONDS)
        stalled = [asyncio.create_task(asyncio.to_thread(is_there.wait, SECONDS)) for _ in range(64)]
        await asyncio.sleep(0)
        await asyncio.wait_for(tested_actor.run(threading.Event()), SECONDS)
        assert all(await asyncio.gather(*stalled))  # nothing but the fifth sync ended the wait

    asyncio.run(main())
    assert len(syncs) == 5
