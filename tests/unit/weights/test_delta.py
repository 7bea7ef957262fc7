"""Versions as differences: bit-exact or refused, and never without the version that they are differences from."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipelinerl_core.errors import ChecksumMismatch, MissingObject
from pipelinerl_core.models.resolve import build_config, load_config
from pipelinerl_core.run.versions import bases_of, remove_weights, stored_versions, weights_to_remove
from pipelinerl_core.tools.audit import Audit
from pipelinerl_core.tools.gc import collect
from pipelinerl_core.weights import delta
from pipelinerl_core.weights.delta import apply_delta, encode_delta
from pipelinerl_core.weights.publish import WeightPublisher
from pipelinerl_core.weights.subscribe import WeightSubscriber
from tests.builders import put_commit, put_epoch
from tests.counting_store import CountingStore
from tests.fakes import MemoryStore
from tests.models import publish

EPOCH = 2


def changed(data, share, seed=0):
    rng = np.random.default_rng(seed)
    words = np.frombuffer(bytes(data), np.uint16).copy()
    places = rng.random(len(words)) < share
    words[places] += rng.integers(1, 3, places.sum(), dtype=np.uint16)
    return words.tobytes()


@pytest.mark.parametrize("batch_words", [7, 1000, 1 << 22])
@pytest.mark.parametrize("share", [0.0, 0.004, 0.3, 1.0])
@pytest.mark.parametrize("size", [0, 2, 14, 16, 20_000])
def test_a_difference_gives_the_new_bytes(size, share, batch_words, monkeypatch):
    monkeypatch.setattr(delta, "_BATCH_WORDS", batch_words)
    old = np.random.default_rng(1).bytes(size)
    new = changed(old, share)
    target = bytearray(old)
    apply_delta(target, encode_delta(old, new, 10**9), "here")
    assert bytes(target) == new


def test_a_difference_is_smaller_if_few_weights_change():
    old = np.random.default_rng(1).bytes(10_000_000)
    sizes = [len(encode_delta(old, changed(old, share), 10**9)) / len(old) for share in (0.004, 0.04, 0.4)]
    assert sizes == pytest.approx([0.007, 0.06, 0.48], rel=0.25)
    assert encode_delta(old, changed(old, 0.4), 4_000_000) is None
    assert encode_delta(old, old[:-2], 10**9) is None
    assert encode_delta(b"odd", b"eve", 10**9) is None


def version(number):
    """Weights of a version; two versions differ in a few elements."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(200, 50, generator=generator).bfloat16() for name in ("a", "b")}
    weights["a"].view(-1)[number * 7 : number * 7 + 5] = number
    return weights


def equal(tensors, number):
    return all(torch.equal(tensors[name], tensor) for name, tensor in version(number).items())


class Publishing:
    """A trainer that stores every fourth version whole."""

    def __init__(self, store, epoch=EPOCH):
        self.store, self.epoch = store, epoch
        self.publisher = WeightPublisher(store, run_id="run", epoch=epoch, use_shm=False, use_deltas=True)
        self.manifests = []

    def publish(self, number, *, durable=False):
        manifest = publish(self.publisher, number, version(number), durable=durable or number % 4 == 0)
        self.manifests.append(manifest)
        put_commit(self.store, number, self.epoch, manifest=manifest, weights_digest=manifest.files[0].digest)
        return manifest


@pytest.fixture
def store():
    store = MemoryStore()
    put_epoch(store, EPOCH)
    return store


def test_readers_get_the_bits_of_each_version_whatever_they_have_read_before(store):
    publishing = Publishing(store)
    manifests = [publishing.publish(number) for number in range(10)]
    assert [manifest.delta is not None for manifest in manifests] == [number % 4 > 0 for number in range(10)]
    assert all(manifest.num_bytes < 2_000 for manifest in manifests if manifest.delta)
    orders = ([*range(10)], [5], [9, 1, 6, 2, 0], [3, 3, 4, 7])
    for order in orders:
        reader = WeightSubscriber(store)
        assert all(equal(reader.fetch(manifests[number]).tensors, number) for number in order)


def test_a_reader_reads_each_whole_version_at_most_twice(store):
    publishing = Publishing(store)
    manifests = [publishing.publish(number) for number in range(12)]
    counting = CountingStore(store)
    reader = WeightSubscriber(counting)
    for manifest in manifests:
        reader.fetch(manifest)
    assert counting.requests["get weights"] == 12 + 1  # version 0 again, at the first difference


def test_a_version_that_changes_much_is_stored_whole_and_is_the_next_base(store):
    publisher = Publishing(store).publisher
    first = publish(publisher, 0, version(0), durable=True)
    other = {name: tensor * 3 for name, tensor in version(0).items()}
    assert publish(publisher, 1, other, durable=False).delta is None
    other["a"].view(-1)[7] = 7
    third = publish(publisher, 2, other, durable=False)
    assert third.delta.base.name == "weights/00000001.2/model.safetensors"
    assert first.delta is None
    tensors = WeightSubscriber(store).fetch(third).tensors
    assert all(torch.equal(tensors[name], tensor) for name, tensor in other.items())


@pytest.mark.parametrize("kind", ["flipped", "cut", "lost", "other"])
@pytest.mark.parametrize("of_base", [False, True])
def test_a_damaged_difference_or_base_is_refused(store, kind, of_base):
    publishing = Publishing(store)
    manifests = [publishing.publish(number) for number in range(4)]
    manifest = manifests[3]
    key = manifest.delta.base.name if of_base else f"{manifest.key}/{manifest.delta.entry.name}"
    data = bytearray(store.get(key))
    if kind == "flipped":
        data[len(data) // 2] ^= 1
    elif kind == "cut":
        del data[-2:]
    elif kind == "other":
        data = bytearray(store.get(f"{manifests[1].key}/{manifests[1].delta.entry.name}"))
    store.delete([key])
    if kind != "lost":
        store.put(key, bytes(data))
    with pytest.raises(MissingObject if kind == "lost" else ChecksumMismatch):
        WeightSubscriber(store).fetch(manifest)
    problems = Audit(store, build_config({"trainer": {"steps": 3}})).run().problems
    assert any(key in problem for problem in problems)


def test_a_difference_of_another_version_never_gives_weights(store):
    """Even if every object is intact, the result has the digest of its version or is refused."""
    publishing = Publishing(store)
    manifests = [publishing.publish(number) for number in range(8)]
    wrong = replace(manifests[3], delta=replace(manifests[3].delta, base=manifests[6].delta.base))
    with pytest.raises(ChecksumMismatch, match="weights of version 3"):
        WeightSubscriber(store).fetch(wrong)
    with pytest.raises(ChecksumMismatch, match="here: no delta of a file of 20 bytes"):
        apply_delta(bytearray(20), store.get(f"{manifests[3].key}/{manifests[3].delta.entry.name}"), "here")
    with pytest.raises(ChecksumMismatch, match="here: no delta"):
        apply_delta(bytearray(20), b"no Arrow", "here")


def test_the_base_of_a_difference_stays_as_long_as_the_difference(store):
    config = retention()
    publishing = Publishing(store)
    for number in range(24):
        publishing.publish(number)
        remove_weights(store, weights_to_remove(config, store.list("weights"), number))
        left = {int(key.split("/")[1][:8]) for key in store.list("weights")}
        for manifest in publishing.manifests:
            if manifest.version in left:
                assert equal(WeightSubscriber(store).read(manifest), manifest.version)
    assert left == {0, 8, 12, 16, 20, 21, 22, 23}
    assert collect(store, config, with_rollouts=False, dry_run=True)["weights"] == []
    problems = Audit(store, config).run()
    assert [text for text in (*problems.problems, *problems.damaged) if "weights" in text] == []


def retention(**weights):
    return build_config({
        "weights": {"transport": "object_store", "durable_every": 4, "keep": 4, **weights}, "trainer": {"steps": 100},
        "eval": {"num_prompts": 0}, "model": {"dtype": "bfloat16"},
    })  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_every_listed_version_is_readable_whatever_a_trainer_does(seed):
    """Restarts, versions that are published again, retention and gc: what a commit names and the store lists can be
    read, and the audit says so."""
    store, rng, config, epoch, manifests = MemoryStore(), random.Random(seed), retention(), 1, {}
    put_epoch(store, epoch)
    publishing = Publishing(store, epoch)
    for number in range(60):
        if number and rng.random() < 0.1:  # a new trainer adopts the newest commit
            epoch += 1
            put_epoch(store, epoch, adopted_through=number - 1)
            publishing = Publishing(store, epoch)
            publish(publishing.publisher, number - 1, version(number - 1), durable=True, again=True)
        manifests[number] = publishing.publish(number, durable=rng.random() < 0.1)
        if rng.random() < 0.1:  # an actor could not read it
            publish(publishing.publisher, number, version(number), durable=True, again=True)
        remove_weights(store, weights_to_remove(config, store.list("weights"), number))
        if rng.random() < 0.2:
            collect(store, config, with_rollouts=False, dry_run=False, now=True)
        for stored in stored_versions(store):
            assert equal(WeightSubscriber(store).read(manifests[stored]), stored), (number, stored)
    audit = Audit(store, config).run()
    assert [text for text in (*audit.problems, *audit.damaged) if "weights" in text] == []


def test_the_name_of_a_difference_names_its_base():
    keys = [
        "weights/00000001.1/model.safetensors", "weights/00000002.1/delta-00000001.arrow",
        "weights/00000002.1/manifest.json", "weights/00000003.2/delta-00000002.arrow",
        "weights/00000003.2/model.safetensors", "weights/00000004.2/other-00000001.arrow",
    ]  # fmt: skip
    assert [bases_of({number}, keys) for number in range(1, 5)] == [set(), {1}, {2}, set()]
    assert bases_of({1, 2, 3, 4}, keys) == {1, 2}


def test_a_version_that_is_published_again_is_whole_and_no_base(store):
    publisher = Publishing(store).publisher
    first = publish(publisher, 4, version(4), durable=True)
    again = publish(publisher, 5, version(5), durable=True, again=True)
    assert again.delta is None
    assert publish(publisher, 6, version(6), durable=False).delta.base.name == f"{first.key}/model.safetensors"
    assert publish(publisher, 7, version(7), durable=False, again=True).delta is None


@pytest.mark.parametrize(
    ("overrides", "used"),
    [
        ((), True),
        (("weights.durable_every=1",), False),
        (("weights.transport=shm",), False),
        (("model.dtype=float32",), False),
        (("weights.publish_every=2",), False),
        (("schedule.kind=conventional", "schedule.steps_per_phase=2"), False),
        (("weights.content=adapters", "learner.lora_rank=2"), False),
    ],
)
def test_versions_are_differences_where_this_saves_bytes(overrides, used):
    base = ("weights.transport=object_store", "weights.durable_every=4", "model.dtype=bfloat16")
    assert load_config("quickstart", [*base, *overrides]).uses_deltas is used
