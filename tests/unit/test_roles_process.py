"""What every role does as a process."""

import subprocess
import sys
import textwrap


def run(code: str) -> str:
    printed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, timeout=60
    )
    return printed.stdout.strip()


def test_startup_objects_are_left_out_of_later_collections():
    code = """
        import gc
        from pipelinerl_core.roles.process import freeze_startup_objects
        kept = [[] for _ in range(10_000)]
        freeze_startup_objects()
        print(gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 1_000)
    """
    assert run(code) == "True True"


def test_a_child_whose_parent_is_gone_ends_at_once():
    code = """
        import subprocess, sys
        child = "from pipelinerl_core.roles.process import die_with_parent; die_with_parent(1); print('alive')"
        ended = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
        print(ended.returncode, repr(ended.stdout))
    """
    assert run(code) == "1 ''"


def test_all_threads_of_a_process_and_its_children_keep_to_its_cores():
    code = """
        import os, subprocess, sys, threading
        from pipelinerl_core.roles.process import keep_to_cores
        done = threading.Event()
        old = threading.Thread(target=done.wait, daemon=True)
        old.start()
        before = os.sched_getaffinity(0)
        keep_to_cores(None)
        assert os.sched_getaffinity(0) == before
        core = max(before)
        keep_to_cores([core])
        child = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
        printed = subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip()
        print([os.sched_getaffinity(0), os.sched_getaffinity(old.native_id)] == [{core}] * 2, printed == str({core}))
    """
    assert run(code) == "True True"
