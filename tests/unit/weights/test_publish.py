"""Weights: data first, manifest last, and nothing damaged ever reaches an engine."""

import json
import os
import random
import shutil
import stat
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipelinerl_core.errors import ChecksumMismatch, ConfigError, MissingObject
from pipelinerl_core.storage.digests import entry_of, verify
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.weights.files import parse
from pipelinerl_core.weights.memory import PrivateMemory, SharedFiles, open_shared, shm_directory
from pipelinerl_core.weights.publish import WeightPublisher
from pipelinerl_core.weights.staging import staging_directory
from pipelinerl_core.weights.subscribe import WeightSubscriber
from tests.models import file_of, publish

WEIGHTS = {"b.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "a.bias": torch.tensor([0.5])}


def test_private_memory_is_used_again_after_its_last_tensor():
    memory = PrivateMemory()
    region = memory.allocate(4096)
    tensor = torch.frombuffer(region.buffer, dtype=torch.uint8)
    address = tensor.data_ptr()
    del region
    other = torch.frombuffer(memory.allocate(4096).buffer, dtype=torch.uint8)
    assert other.data_ptr() != address, "the first is still used"
    del tensor
    again = torch.frombuffer(memory.allocate(4096).buffer, dtype=torch.uint8)
    assert again.data_ptr() == address
    del again
    assert len(memory.allocate(8192).buffer) == 8192


def valued(value):
    return {name: torch.full_like(tensor, float(value)) for name, tensor in WEIGHTS.items()}


def files(shm):
    """Files with versions, and unfinished ones, in a run's shared memory."""
    return sorted(path.name for path in (shm / "pipelinerl-run").iterdir())


def publisher(store, *, use_shm=True, epoch=3):
    return WeightPublisher(store, run_id="run", epoch=epoch, use_shm=use_shm)


def test_equal_weights_give_equal_bytes_whatever_their_order():
    assert file_of(WEIGHTS) == file_of(dict(reversed(WEIGHTS.items())))


def test_shared_memory_gives_back_the_published_weights(store, shm):
    manifest = publish(publisher(store), 7, WEIGHTS, durable=False)
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
        publish(publisher(open_store("memory://weights-umask")), 1, WEIGHTS, durable=False)
    finally:
        os.umask(before)
    assert stat.S_IMODE((shm / "pipelinerl-run").stat().st_mode) == 0o700


def test_a_link_in_the_place_of_a_runs_shared_memory_is_not_followed(store, shm, caplog):
    """Any user can make it; it could lead to the versions in this user's own store."""
    elsewhere = shm.parent / "elsewhere"
    for version in range(7):
        elsewhere.mkdir(exist_ok=True)
        (elsewhere / f"{version:08d}.2.safetensors").touch()
    elsewhere.chmod(0o755)
    (shm / "pipelinerl-run").symlink_to(elsewhere)
    assert publish(publisher(store), 0, WEIGHTS, durable=False).shm is None
    assert len(list(elsewhere.iterdir())) == 7
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755
    assert staging_directory("run", "actor-0") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user, whose files only root can make")
def test_shared_memory_that_another_user_has_made_is_not_used_by_root_either(store, shm, caplog):
    (shm / "pipelinerl-run").mkdir()
    os.chown(shm / "pipelinerl-run", 65534, 65534)
    assert publish(publisher(store), 0, WEIGHTS, durable=False).key is not None
    assert "it belongs to another user" in caplog.text
    assert staging_directory("run", "actor-0") is None
    assert list((shm / "pipelinerl-run").iterdir()) == []


def test_durable_copy_serves_when_shared_memory_is_gone(store, shm):
    manifest = publish(publisher(store), 7, WEIGHTS, durable=True)
    shutil.rmtree(shm)
    update = WeightSubscriber(store).fetch(manifest)
    torch.testing.assert_close(dict(update.tensors), WEIGHTS, rtol=0, atol=0)
    stored = json.loads(store.get("weights/00000007.3/manifest.json"))
    assert stored["files"][0]["digest"] == manifest.files[0].digest


def test_without_shared_memory_every_version_is_in_the_store(store, shm):
    manifest = publish(publisher(store, use_shm=False), 1, WEIGHTS, durable=False)
    assert manifest.shm is None
    assert WeightSubscriber(store).fetch(manifest).version == 1


def test_a_version_that_is_nowhere_is_a_missing_object(store, shm):
    manifest = publish(publisher(store), 7, WEIGHTS, durable=False)
    shutil.rmtree(shm)
    with pytest.raises(MissingObject, match="version 7"):
        WeightSubscriber(store).fetch(manifest)


def test_one_flipped_bit_is_found_before_the_engine_gets_the_weights(store, shm):
    manifest = publish(publisher(store), 7, WEIGHTS, durable=False)
    path = Path(manifest.shm)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumMismatch, match="digest"):
        WeightSubscriber(store).fetch(manifest)
    path.write_bytes(data[:-3])
    with pytest.raises(ChecksumMismatch, match="bytes"):
        WeightSubscriber(store).fetch(manifest)


def test_a_damaged_copy_in_shared_memory_is_passed_over_for_the_durable_copy(store, shm):
    manifest = publish(publisher(store), 7, WEIGHTS, durable=True)
    Path(manifest.shm).write_bytes(b"another run's weights")
    torch.testing.assert_close(dict(WeightSubscriber(store).fetch(manifest).tensors), WEIGHTS, rtol=0, atol=0)
    store.put("weights/00000007.3/model.safetensors", b"damaged too")
    with pytest.raises(ChecksumMismatch, match=r"weights/00000007\.3"):
        WeightSubscriber(store).fetch(manifest)


def test_a_version_that_shared_memory_has_no_room_for_goes_to_the_store(store, shm, monkeypatch, caplog):
    weights = publisher(store)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        manifest = publish(weights, 7, WEIGHTS, durable=False)
    assert (manifest.shm, manifest.key) == (None, "weights/00000007.3")
    assert "--shm-size" in caplog.text
    torch.testing.assert_close(dict(WeightSubscriber(store).fetch(manifest).tensors), WEIGHTS, rtol=0, atol=0)
    assert publish(weights, 8, WEIGHTS, durable=False).key is None
    assert files(shm) == ["00000008.3.safetensors"]


def test_weights_of_another_host_come_from_the_store(store, shm):
    manifest = replace(publish(publisher(store), 7, WEIGHTS, durable=True), host="elsewhere", shm="/dev/shm/not-here")
    assert WeightSubscriber(store).fetch(manifest).num_bytes == manifest.num_bytes


def test_a_trainer_that_publishes_in_the_shared_memory_of_another_host_alone_is_a_wrong_configuration(store, shm):
    manifest = publish(publisher(store), 7, WEIGHTS, durable=False)
    manifest = replace(manifest, host="elsewhere", shm="/dev/shm/pipelinerl-not-here/7")
    subscriber = WeightSubscriber(store)
    says = r"in the shared memory of elsewhere.*Set weights\.transport=object_store"
    for _ in range(2):  # perhaps of an earlier start of the run on another host
        with pytest.raises(MissingObject, match=says):
            subscriber.fetch(manifest)
    with pytest.raises(ConfigError, match=says):
        subscriber.fetch(replace(manifest, version=8))


def test_a_container_with_another_name_reads_the_shared_memory_of_its_host(store, shm):
    manifest = replace(publish(publisher(store), 7, WEIGHTS, durable=False), host="container")
    torch.testing.assert_close(dict(WeightSubscriber(store).fetch(manifest).tensors), WEIGHTS)
    Path(manifest.shm).write_bytes(b"of another run")
    with pytest.raises(MissingObject, match="gone from shared memory of container"):
        WeightSubscriber(store).fetch(manifest)


def test_files_of_versions_that_nobody_maps_are_written_again(store, shm):
    weights = publisher(store)
    for version in range(7):
        publish(weights, version, WEIGHTS, durable=False)
        assert len(files(shm)) <= 3
    assert files(shm) == [f"{version:08d}.3.safetensors" for version in (4, 5, 6)]
    assert shm_directory("x").name == "pipelinerl-x"


def test_a_file_is_not_written_again_while_a_reader_has_a_tensor_of_it(store, shm):
    weights = publisher(store)
    manifest = publish(weights, 0, valued(0), durable=False)
    update = WeightSubscriber(store).fetch(manifest)
    held = update.tensors["b.weight"]
    del update
    for version in range(1, 6):
        publish(weights, version, valued(version), durable=False)
        assert torch.equal(held, valued(0)["b.weight"])
    assert Path(manifest.shm).exists()
    held.add_(1)  # a reader's own copy
    assert torch.equal(WeightSubscriber(store).fetch(manifest).tensors["b.weight"], valued(0)["b.weight"])
    del held
    for version in range(6, 9):
        publish(weights, version, valued(version), durable=False)
    assert len(files(shm)) <= 4
    with pytest.raises(MissingObject, match="version 0"):
        WeightSubscriber(store).fetch(manifest)


@pytest.mark.parametrize("seed", range(20))
def test_no_reader_ever_sees_a_mixture_of_versions(store, shm, seed):
    """Readers map, hold and leave versions at random while the trainer publishes, ends and starts again."""
    rng, weights, held, manifests, num_fetched = random.Random(seed), publisher(store), {}, [], 0
    for version in range(60):
        if rng.random() < 0.1:  # the trainer was killed: its mappings are gone, files stay
            weights = publisher(store, epoch=4 + version)
        if rng.random() < 0.1:
            SharedFiles("run").allocate(rng.randrange(1, 5000))  # killed in the middle of a write
        shape = (rng.randrange(1, 200), rng.randrange(1, 20))
        tensors = {"w": torch.full(shape, float(version)), "v": torch.full((3,), version, dtype=torch.bfloat16)}
        manifests.append(publish(weights, version, tensors, durable=False))
        for _ in range(3):
            reader, manifest = rng.randrange(4), rng.choice(manifests[-4:])
            held.pop(reader, None)
            with suppress(MissingObject):
                held[reader] = manifest.version, WeightSubscriber(store).fetch(manifest).tensors
                num_fetched += 1
        newest = WeightSubscriber(store).fetch(manifests[-1])  # always readable
        for known, tensors in [*held.values(), (version, newest.tensors)]:
            assert all((tensor == known).all() for tensor in tensors.values())
    assert num_fetched > 60
    del newest, tensors
    held.clear()
    publish(weights, 60, WEIGHTS, durable=False)
    publish(weights, 61, WEIGHTS, durable=False)
    assert len(files(shm)) <= 4


def test_a_killed_process_leaves_no_lock(store, shm):
    """Of a reader that held a version, and of a trainer that was writing."""
    manifest = publish(publisher(store), 1, WEIGHTS, durable=False)
    code = (
        "import sys; from pathlib import Path; from pipelinerl_core.weights import memory\n"
        "memory.SHM_ROOT = Path(sys.argv[2])\n"
        "held = memory.open_shared(Path(sys.argv[1])), memory.SharedFiles('run').allocate(1000)\n"
        "print(held, flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, manifest.shm, str(shm)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    assert len(files(shm)) == 2
    regions = [SharedFiles("run").allocate(1000)]
    assert len(files(shm)) == 3
    child.kill()
    child.communicate()
    regions += [SharedFiles("run").allocate(1000) for _ in range(2)]
    assert len(files(shm)) == 3
    assert open_shared(Path(manifest.shm)) is None


def test_tensors_begin_where_those_of_torch_begin(store, shm):
    tensors = {f"w{size}": torch.full((size,), 1.0) for size in (1, 7, 16, 64, 160)} | {"half": torch.ones(64).half()}
    update = WeightSubscriber(store).fetch(publish(publisher(store), 1, tensors, durable=False))
    torch.testing.assert_close(dict(update.tensors), tensors, rtol=0, atol=0)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in update.tensors.values() if tensor.nbytes % 64 == 0)


@pytest.mark.parametrize("seed", range(30))
def test_no_bytes_but_those_of_a_version_are_weights(seed):
    """Any change of the bytes has another digest, and a file without a digest raises nothing but ChecksumMismatch."""
    rng, data = random.Random(seed), bytearray(file_of(WEIGHTS))
    entry = entry_of("model.safetensors", bytes(data))
    begin = rng.randrange(len(data))
    match rng.randrange(3):
        case 0:
            data[begin] ^= 1 << rng.randrange(8)
        case 1:
            del data[begin : begin + rng.randrange(1, 9)]
        case 2:
            data[begin:begin] = bytes(rng.randrange(1, 9))
    with pytest.raises(ChecksumMismatch):
        verify(data, entry, "here")
    with suppress(ChecksumMismatch):
        parse(data, "here")
