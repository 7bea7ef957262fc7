"""GPUs of a host, with an nvidia-smi of the test: inventory, sums, claims of several processes."""

import os
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from pipelinerl_core.config.gpu_counts import gpus_of, needed_gpus
from pipelinerl_core.errors import ConfigError, DeadlineExceeded
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.supervision import gpus, run_roles
from pipelinerl_core.supervision.gpus import check_gpus, claimed_gpus, inventory

VLLM = ("engine.kind=vllm", "model.dtype=bfloat16", "model.device=cuda", "weights.transport=object_store")


def host_of(tmp_path, monkeypatch, count, *, mib=81559):
    """A host with `count` GPUs: an nvidia-smi on PATH."""
    lines = "".join(f"{index}, GPU-{index}{index}aa-bb, NVIDIA H100 80GB HBM3, {mib}\n" for index in range(count))
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\nif [ \"$1\" = \"--query-gpu=compute_cap\" ]; then echo 9.0; exit; fi\n"
                       f"cat <<'END'\n{lines}END\n")  # fmt: skip
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "CLAIMS", tmp_path / "claims")


def config(*overrides):
    return load_config("quickstart", [*VLLM, *overrides])


def claim(stack, role, name, *overrides, run_id="one", seconds=0.0):
    return stack.enter_context(claimed_gpus(config(*overrides), run_id, role, name, Event(), seconds))


def test_the_inventory_has_the_gpus_that_the_driver_lists_and_the_environment_allows(tmp_path, monkeypatch):
    assert [gpu.device for gpu in inventory()] == [], "this host has no driver"
    host_of(tmp_path, monkeypatch, 4)
    assert [(gpu.device, gpu.uuid, gpu.num_bytes) for gpu in inventory()][1] == ("1", "GPU-11aa-bb", 81559 * 2**20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-00aa")
    assert [(gpu.device, gpu.uuid) for gpu in inventory()] == [("2", "GPU-22aa-bb"), ("GPU-00aa", "GPU-00aa-bb")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert inventory() == ()


def test_a_driver_that_answers_nonsense_is_a_host_without_gpus(tmp_path, monkeypatch):
    host_of(tmp_path, monkeypatch, 1)
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert inventory() == ()
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho 'No devices were found'\n")
    assert inventory() == ()


def test_each_role_gets_the_number_of_gpus_of_its_keys():
    twelve = config("placement.actors=6", "engine.tensor_parallel=2", "trainer.ranks=4", "schedule.max_lag=8")
    assert (gpus_of(twelve, "actor"), gpus_of(twelve, "trainer"), gpus_of(twelve, "hub")) == (2, 4, 0)
    assert needed_gpus(twelve) == (16, "trainer.ranks=4 x 1 + placement.actors=6 x 2 = 16")
    assert gpus_of(config("placement.gpus_per_actor=4", "engine.data_parallel=2"), "evaluator") == 4
    pooled = config("placement.kind=work_pools", "placement.trainer_nodes=2", "trainer.ranks=8")
    assert gpus_of(pooled, "trainer") == gpus_of(pooled, "trainer_node") == 4
    on_cpu = load_config("quickstart")
    assert {gpus_of(on_cpu, role) for role in ("actor", "trainer", "evaluator")} == {0}
    assert gpus_of(config("model.device=cpu"), "actor") == 0
    own = config("eval.on=own", "eval.every_steps=10", "placement.actors=1")
    assert needed_gpus(own) == (3, "trainer.ranks=1 x 1 + placement.actors=1 x 1 + evaluator 1 (eval.on=own) = 3")


def test_asking_for_more_than_there_is_is_refused_with_the_sum(tmp_path, monkeypatch):
    check_gpus(config("placement.actors=3", "model.device=auto"))  # a host without GPUs: vLLM on the CPU
    with pytest.raises(ConfigError, match=r"model\.device=cuda: this host has no GPU.*--tiny"):
        check_gpus(config())
    check_gpus(config("placement.kind=work_pools"))
    host_of(tmp_path, monkeypatch, 2)
    check_gpus(config())
    with pytest.raises(ConfigError, match=r"trainer.ranks=1 x 1 \+ placement.actors=3 x 1 = 4 GPUs.* has 2 "):
        check_gpus(config("placement.actors=3"))
    check_gpus(config("placement.actors=3", "placement.kind=work_pools"))
    host_of(tmp_path, monkeypatch, 1)
    with pytest.raises(ConfigError, match=r"placement\.share_gpu=true"):
        check_gpus(config())
    check_gpus(config("placement.share_gpu=true"))
    with ExitStack() as stack, pytest.raises(ConfigError, match="actor-0: needs 2 GPUs, this host has 1"):
        claim(stack, "actor", "actor-0", "engine.tensor_parallel=2")


def test_roles_get_different_gpus_and_give_them_back(tmp_path, monkeypatch):
    host_of(tmp_path, monkeypatch, 4)
    with ExitStack() as run:
        assert claim(run, "hub", "hub")["CUDA_VISIBLE_DEVICES"] == ""
        assert claim(run, "trainer", "trainer", "trainer.ranks=2")["CUDA_VISIBLE_DEVICES"] == "0,1"
        with ExitStack() as actor:
            assert claim(actor, "actor", "actor-0")["CUDA_VISIBLE_DEVICES"] == "2"
            assert claim(run, "actor", "actor-1")["CUDA_VISIBLE_DEVICES"] == "3"
            with pytest.raises(DeadlineExceeded, match=r"evaluator: 1 GPUs wanted.*GPU 2: one/actor-0, GPU 3: one"):
                claim(run, "evaluator", "evaluator")
        assert claim(run, "evaluator", "evaluator")["CUDA_VISIBLE_DEVICES"] == "2"
    with ExitStack() as run:
        assert claim(run, "actor", "actor-0")["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_shared_gpu_is_for_one_run(tmp_path, monkeypatch):
    host_of(tmp_path, monkeypatch, 2)
    share = ("placement.share_gpu=true",)
    with ExitStack() as runs:
        assert claim(runs, "trainer", "trainer", *share)["CUDA_VISIBLE_DEVICES"] == "0"
        assert claim(runs, "actor", "actor-0", *share)["CUDA_VISIBLE_DEVICES"] == "0"
        assert claim(runs, "actor", "actor-0", *share, run_id="two")["CUDA_VISIBLE_DEVICES"] == "1"
        with pytest.raises(DeadlineExceeded):
            claim(runs, "actor", "actor-0", run_id="three")


@pytest.fixture
def shared(monkeypatch):
    """A host with one GPU, whose lock files all users reach; yields the directory of the lock files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        place = Path(directory)
        place.chmod(0o1777)
        (place / "host").mkdir()
        host_of(place / "host", monkeypatch, 1)
        monkeypatch.setattr(gpus, "CLAIMS", place / "claims")
        yield place / "claims"


NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user, which only root can become")


def another_user(program, *arguments):
    """A process of the user nobody; the program has imported `gpus` and `run` before it became this user."""
    begin = (
        "import fcntl, os, signal, sys, time\nfrom contextlib import ExitStack\nfrom pathlib import Path\n"
        "from pipelinerl_core.supervision import gpus\n"
        f"claims = gpus.CLAIMS = Path({str(gpus.CLAIMS)!r})\nos.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "gpu = gpus.Gpu('0', 'GPU-00aa-bb', 'H100', 1)\n"
    )
    command = [sys.executable, "-c", begin + textwrap.dedent(program), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def says(process):
    """The first line that a process prints."""
    return process.stdout.readline().strip()


def end(process):
    process.kill()
    process.communicate()


def test_the_locks_are_open_to_the_processes_of_all_users(shared):
    before = os.umask(0o077)
    try:
        with ExitStack() as run:
            claim(run, "actor", "actor-0")
    finally:
        os.umask(before)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in shared.iterdir()} == {
        "all": 0o644, "GPU-00aa-bb": 0o644, f"GPU-00aa-bb.{os.geteuid()}": 0o644
    }  # fmt: skip


@as_root
def test_two_users_exclude_each_other_and_each_sees_the_holder_of_the_gpu(shared):
    program = """
    with ExitStack() as held:
        print(gpus._claim(held, (gpu,), 1, "theirs", "actor-0", share=False), gpus.holders((gpu,)), flush=True)
        sys.stdin.readline()
    """
    with ExitStack() as run:
        claim(run, "actor", "actor-0")
        other = another_user(program)
        assert says(other) == "None ['GPU 0: one/actor-0']", "a file of root, locked through a read-only descriptor"
        end(other)
    other = another_user(program)
    try:
        assert says(other) == "('0',) ['GPU 0: theirs/actor-0']"
        with ExitStack() as run, pytest.raises(DeadlineExceeded, match="GPU 0: theirs/actor-0"):
            claim(run, "actor", "actor-0")
    finally:
        end(other)
    with ExitStack() as run:
        assert claim(run, "actor", "actor-0")["CUDA_VISIBLE_DEVICES"] == "0"


@as_root
@pytest.mark.parametrize("name", ["all", "GPU-00aa-bb"])
@pytest.mark.parametrize("how", ["LOCK_SH", "LOCK_EX"])
def test_a_lock_that_a_stopped_process_of_another_user_holds_ends_as_a_named_deadline(shared, name, how):
    with ExitStack() as run:
        claim(run, "actor", "actor-0")
    program = """
    file = os.open(claims / sys.argv[1], os.O_RDONLY)
    fcntl.flock(file, getattr(fcntl, sys.argv[2]))
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    """
    other = another_user(program, name, how)
    try:
        assert says(other) == "held"
        place = {"all": str(shared / "all")}.get(name, "GPU 0")
        with ExitStack() as run, pytest.raises(DeadlineExceeded, match=f"not as many were free.*{place}: another"):
            claim(run, "actor", "actor-0")
        stop = Event()
        stop.set()
        with claimed_gpus(config(), "one", "actor", "actor-0", stop, 60.0) as environment:
            assert environment["CUDA_VISIBLE_DEVICES"] == "", "a stop is honoured before the deadline"
    finally:
        end(other)


PLANTED = {
    "a link": "os.symlink(sys.argv[1], claims / name)",
    "a pipe": "os.mkfifo(claims / name)",
    "a hard link": "pass",  # made below: Linux may refuse it to the user (fs.protected_hardlinks)
    "a file that root cannot trust": "(claims / name).write_text('root:x')",
}


@as_root
@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("name", ["all", "GPU-00aa-bb", "GPU-00aa-bb.0"])
def test_a_link_or_file_that_another_user_plants_is_neither_followed_nor_written(shared, name, planted):
    """The other user has created the directory, and so may put there what they like."""
    victim = shared.parent / "victim"
    victim.write_text("private")
    victim.chmod(0o600)
    program = f"claims.mkdir(); name = {name!r}; {PLANTED[planted]}; print('planted', flush=True)"
    other = another_user(program, victim)
    try:
        assert says(other) == "planted"
    finally:
        end(other)
    if planted == "a hard link":
        os.link(victim, shared / name)
    is_harmless = planted.startswith("a file") and not name.endswith(".0")  # such a file is only locked
    with ExitStack() as run:
        if is_harmless:
            claim(run, "actor", "actor-0")
        else:
            with pytest.raises(DeadlineExceeded, match=rf"{shared}: .*{name}"):
                claim(run, "actor", "actor-0")
    assert (victim.read_text(), stat.S_IMODE(victim.stat().st_mode)) == ("private", 0o600)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777


@as_root
def test_a_directory_that_another_user_left_open_to_all_is_repaired_by_root_only(shared):
    shared.mkdir()
    shared.chmod(0o777)  # as an earlier release
    program = """
    try:
        gpus.holders((gpu,))
    except OSError as error:
        print(error, flush=True)
    """
    other = another_user(program)
    assert says(other) == "user 0 made it without the sticky bit; the user or root must set mode 1777"
    end(other)
    with ExitStack() as run:
        assert claim(run, "actor", "actor-0")["CUDA_VISIBLE_DEVICES"] == "0"
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777


CLAIMER = """
import sys, time
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.supervision import gpus, run_roles
gpus.CLAIMS = Path(sys.argv[1])
config = load_config("quickstart", sys.argv[3:])
with gpus.claimed_gpus(config, sys.argv[2], "actor", "actor-0", Event(), 5.0) as environment:
    print(environment["CUDA_VISIBLE_DEVICES"], flush=True)
    time.sleep(60)
"""


def test_processes_of_two_runs_do_not_collide_and_a_killed_process_frees_its_gpus(tmp_path, monkeypatch):
    host_of(tmp_path, monkeypatch, 4)
    command = [sys.executable, "-c", textwrap.dedent(CLAIMER), str(tmp_path / "claims")]
    overrides = [*VLLM, "engine.tensor_parallel=2"]
    processes = [
        subprocess.Popen([*command, run_id, *overrides], stdout=subprocess.PIPE, text=True) for run_id in ("a", "b")
    ]
    try:
        first, second = (process.stdout.readline().strip() for process in processes)
        assert {first, second} == {"0,1", "2,3"}
        with ExitStack() as stack, pytest.raises(DeadlineExceeded, match=r"GPU 0: [ab]/actor-0"):
            claim(stack, "actor", "actor-0", run_id="c")
        processes[0].kill()
        processes[0].wait()
        with ExitStack() as stack:
            assert claim(stack, "actor", "actor-0", "engine.tensor_parallel=2", run_id="c") == {
                "CUDA_VISIBLE_DEVICES": first, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"
            }  # fmt: skip
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def test_the_roles_of_a_local_run_are_started_on_their_gpus(tmp_path, monkeypatch):
    """Real child processes, as the tasks of a flow supervise them; each writes its device list and ends."""
    host_of(tmp_path, monkeypatch, 4)
    run = SimpleNamespace(
        run_id="one", token="token", config=config("trainer.ranks=2", "placement.actors=2", "schedule.max_lag=8"),
        store=SimpleNamespace(url=f"file://{tmp_path}/one"),
    )  # fmt: skip
    barrier = tmp_path / "all-started"
    program = (
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1]).write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.05)\n"
    )
    roles = {"hub": "hub", "trainer": "trainer", "actor-0": "actor", "actor-1": "actor"}
    monkeypatch.setattr(
        run_roles, "role_command",
        lambda role, arguments: [sys.executable, "-c", program, str(tmp_path / arguments["name"]), str(barrier)],
    )  # fmt: skip
    monkeypatch.setattr(run_roles, "_is_done", lambda *_, **__: lambda: True)
    monkeypatch.setattr(run_roles, "hub_is_up", lambda run: True)
    with ThreadPoolExecutor() as threads:
        ends = []
        for name, role in roles.items():
            ends.append(threads.submit(run_roles.supervise, run, role, name, {"name": name}, Event()))
            await_file(tmp_path / name)
        barrier.touch()
        for end in ends:
            end.result(timeout=60)
    given = {name: (tmp_path / name).read_text() for name in roles}
    assert given == {"hub": "", "trainer": "0,1", "actor-0": "2", "actor-1": "3"}
    assert gpus.holders(inventory()) == []


def await_file(path, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not path.exists() or (path.name != "hub" and not path.read_text()):
        assert time.monotonic() < deadline, f"{path.name} has not started"
        time.sleep(0.05)
