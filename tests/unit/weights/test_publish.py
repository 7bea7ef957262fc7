"""Weights: data first, manifest last, and nothing damaged ever reaches an engine."""

import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipelinerl_core.errors import ChecksumMismatch, ConfigError, MissingObject
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.weights.files import serialize
from pipelinerl_core.weights.publish import KEPT_VERSIONS, WeightPublisher, shm_directory
from pipelinerl_core.weights.staging import staging_directory
from pipelinerl_core.weights.subscribe import WeightSubscriber

WEIGHTS = {"b.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "a.bias": torch.tensor([0.5])}


def publisher(store, *, use_shm=True, epoch=3):
    return WeightPublisher(store, run_id="run", epoch=epoch, use_shm=use_shm)


def test_equal_weights_give_equal_bytes_whatever_their_order():
    assert serialize(WEIGHTS) == serialize(dict(reversed(WEIGHTS.items())))


def test_shared_memory_gives_back_the_published_weights(store, shm):
    manifest = publisher(store).publish(7, WEIGHTS, durable=False)
    assert manifest.key is None
    assert manifest.version == 7
    update = WeightSubscriber(store).fetch(manifest)
    assert update.version == 7
    torch.testing.assert_close(dict(update.tensors), WEIGHTS, rtol=0, atol=0)
    assert store.list("weights/") == []


@pytest.mark.parametrize("is_there", [False, True])
def test_shared_memory_of_a_run_is_this_users_alone_whatever_the_umask(shm, is_there):
    before = os.umask(0)
    try:
        if is_there:
            (shm / "pipelinerl-run").mkdir(parents=True)
        publisher(open_store("memory://weights-umask")).publish(1, WEIGHTS, durable=False)
    finally:
        os.umask(before)
    assert stat.S_IMODE((shm / "pipelinerl-run").stat().st_mode) == 0o700


def test_a_link_in_the_place_of_a_runs_shared_memory_is_not_followed(store, shm, caplog):
    """Any user can make it; it could lead to the versions in this user's own store."""
    elsewhere = shm.parent / "elsewhere"
    for version in range(KEPT_VERSIONS + 3):
        (elsewhere / f"{version:08d}.2").mkdir(parents=True)
    elsewhere.chmod(0o755)
    (shm / "pipelinerl-run").symlink_to(elsewhere)
    assert publisher(store).publish(0, WEIGHTS, durable=False).shm is None
    assert len(list(elsewhere.iterdir())) == KEPT_VERSIONS + 3
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755
    assert staging_directory("run", "actor-0") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user, whose files only root can make")
def test_shared_memory_that_another_user_has_made_is_not_used_by_root_either(store, shm, caplog):
    (shm / "pipelinerl-run").mkdir()
    os.chown(shm / "pipelinerl-run", 65534, 65534)
    assert publisher(store).publish(0, WEIGHTS, durable=False).key is not None
    assert "it belongs to another user" in caplog.text
    assert staging_directory("run", "actor-0") is None
    assert list((shm / "pipelinerl-run").iterdir()) == []


def test_durable_copy_serves_when_shared_memory_is_gone(store, shm):
    manifest = publisher(store).publish(7, WEIGHTS, durable=True)
    shutil.rmtree(shm)
    update = WeightSubscriber(store).fetch(manifest)
    torch.testing.assert_close(dict(update.tensors), WEIGHTS, rtol=0, atol=0)
    stored = json.loads(store.get("weights/00000007.3/manifest.json"))
    assert stored["files"][0]["sha256"] == manifest.files[0].sha256


def test_without_shared_memory_every_version_is_in_the_store(store, shm):
    manifest = publisher(store, use_shm=False).publish(1, WEIGHTS, durable=False)
    assert manifest.shm is None
    assert WeightSubscriber(store).fetch(manifest).version == 1


def test_a_version_that_is_nowhere_is_a_missing_object(store, shm):
    manifest = publisher(store).publish(7, WEIGHTS, durable=False)
    shutil.rmtree(shm)
    with pytest.raises(MissingObject, match="version 7"):
        WeightSubscriber(store).fetch(manifest)


def test_one_flipped_bit_is_found_before_the_engine_gets_the_weights(store, shm):
    manifest = publisher(store).publish(7, WEIGHTS, durable=False)
    path = Path(manifest.shm) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumMismatch, match="sha256"):
        WeightSubscriber(store).fetch(manifest)
    path.write_bytes(data[:-3])
    with pytest.raises(ChecksumMismatch, match="bytes"):
        WeightSubscriber(store).fetch(manifest)


def test_a_damaged_copy_in_shared_memory_is_passed_over_for_the_durable_copy(store, shm):
    manifest = publisher(store).publish(7, WEIGHTS, durable=True)
    (Path(manifest.shm) / "model.safetensors").write_bytes(b"another run's weights")
    torch.testing.assert_close(dict(WeightSubscriber(store).fetch(manifest).tensors), WEIGHTS, rtol=0, atol=0)
    store.put("weights/00000007.3/model.safetensors", b"damaged too")
    with pytest.raises(ChecksumMismatch, match=r"weights/00000007\.3"):
        WeightSubscriber(store).fetch(manifest)


def test_a_version_that_shared_memory_has_no_room_for_goes_to_the_store(store, shm, monkeypatch, caplog):
    weights = publisher(store)

    def full(path, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        manifest = weights.publish(7, WEIGHTS, durable=False)
    assert (manifest.shm, manifest.key) == (None, "weights/00000007.3")
    assert "--shm-size" in caplog.text
    torch.testing.assert_close(dict(WeightSubscriber(store).fetch(manifest).tensors), WEIGHTS, rtol=0, atol=0)
    assert weights.publish(8, WEIGHTS, durable=False).key is None
    assert [path.name for path in (shm / "pipelinerl-run").iterdir()] == ["00000008.3"]


def test_weights_of_another_host_come_from_the_store(store, shm):
    manifest = replace(publisher(store).publish(7, WEIGHTS, durable=True), host="elsewhere", shm="/dev/shm/not-here")
    assert WeightSubscriber(store).fetch(manifest).num_bytes == manifest.num_bytes


def test_a_version_in_the_shared_memory_of_another_host_alone_is_a_wrong_configuration(store, shm):
    manifest = replace(publisher(store).publish(7, WEIGHTS, durable=False), host="elsewhere")
    with pytest.raises(ConfigError, match=r"in the shared memory of elsewhere.*Set weights\.transport=object_store"):
        WeightSubscriber(store).fetch(manifest)


def test_only_the_newest_versions_stay_in_shared_memory(shm):
    weights = publisher(open_store("memory://weights-7"))
    for version in range(KEPT_VERSIONS + 3):
        weights.publish(version, WEIGHTS, durable=False)
    kept = sorted(path.name for path in (shm / "pipelinerl-run").iterdir())
    assert kept == [f"{version:08d}.3" for version in range(3, KEPT_VERSIONS + 3)]
    assert shm_directory("x").name == "pipelinerl-x"


def test_versions_of_earlier_starts_go_as_they_would_have(shm):
    store, directory = open_store("memory://weights-10"), shm / "pipelinerl-run"

    def kept():
        return sorted(path.name for path in directory.iterdir() if path.name != "staged")

    (directory / "staged").mkdir(parents=True)  # an engine's
    first = publisher(store)
    for version in range(9, 14):
        newest = first.publish(version, WEIGHTS, durable=False)
    (directory / "00000014.3").mkdir()  # it was killed in the middle of a write
    second = publisher(store, epoch=5)
    manifest = second.publish(13, WEIGHTS, durable=False)
    assert kept() == ["00000012.3", "00000013.3", "00000013.5", "00000014.3"]
    for known_manifest in (newest, manifest):  # an actor may have either
        torch.testing.assert_close(
            dict(WeightSubscriber(store).fetch(known_manifest).tensors), WEIGHTS, rtol=0, atol=0
        )
    for version in range(14, 17):
        second.publish(version, WEIGHTS, durable=False)
    assert kept() == ["00000013.5", "00000014.5", "00000015.5", "00000016.5"]
    assert (directory / "staged").exists()
