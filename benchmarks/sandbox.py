"""Measure how many programs a second run in the sandbox of environment.kind=code, beside a new interpreter for each.

Each program reads two numbers and prints their sum. The isolations take turns in rounds, so that other load of the
host meets all of them; the table has the fastest round of each.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks import report
from pipelinerl_core.roles.runtime.process import exit_codes
from pipelinerl_core.sandbox.program_server import Limits
from pipelinerl_core.sandbox.programs import Choice, NoSandbox, ProgramSandbox

PROGRAM = "print(sum(map(int, input().split())))"
LIMITS = Limits(cpu_seconds=10, wall_seconds=50, memory_bytes=512 << 20, output_bytes=1 << 16)
INTERPRETER = "new interpreter"


async def measure(num_programs: int, num_sandboxes: int, num_rounds: int) -> list[dict[str, Any]]:
    """For each isolation of this host: programs per second, and CPU time of one program inside of the sandbox."""
    rows_by_name: dict[str, dict[str, Any]] = {}
    runners: dict[str, list[Callable[[], Awaitable[float]]]] = {INTERPRETER: [_interpreted] * num_sandboxes}
    sandboxes: list[ProgramSandbox] = []
    choices: tuple[Choice, ...] = ("bubblewrap", "landlock")
    for choice in choices:
        try:
            started = [ProgramSandbox(LIMITS, choice) for _ in range(num_sandboxes)]
        except NoSandbox as error:
            rows_by_name[choice] = {"isolation": choice, "missing": str(error)}
            continue
        sandboxes += started
        runners[started[0].isolation] = [_sandboxed(program_sandbox) for program_sandbox in started]
    try:
        for _ in range(num_rounds):
            for name, run_each in runners.items():
                row = await _round(name, run_each, num_programs)
                if name not in rows_by_name or row["per_second"] > rows_by_name[name]["per_second"]:
                    rows_by_name[name] = row
    finally:
        for sandbox in sandboxes:
            sandbox.close()
    return list(rows_by_name.values())


async def _round(name: str, runners: list[Callable[[], Awaitable[float]]], num_programs: int) -> dict[str, Any]:
    async def work(run: Callable[[], Awaitable[float]]) -> float:
        return sum([await run() for _ in range(num_programs)])

    started, before = time.perf_counter(), os.times()
    cpu_seconds = sum(await asyncio.gather(*map(work, runners)))
    after = os.times()  # the interpreters are children; the sandboxes have not ended
    cpu_seconds += after.children_user + after.children_system - before.children_user - before.children_system
    seconds, num = time.perf_counter() - started, num_programs * len(runners)
    return {"isolation": name, "per_second": num / seconds, "cpu_milliseconds": 1000 * cpu_seconds / num}


def _sandboxed(sandbox: ProgramSandbox) -> Callable[[], Awaitable[float]]:
    async def run() -> float:
        done = await sandbox.run(PROGRAM, stdin="1 2\n")
        assert done.output == "3\n", done
        return done.cpu_seconds

    return run


async def _interpreted() -> float:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", PROGRAM), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    output, _ = await process.communicate(b"1 2\n")
    assert output == b"3\n", output
    return 0.0  # os.times counts the children


def table(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    base = next(row["per_second"] for row in result["rows"] if row["isolation"] == INTERPRETER)
    rows = [
        (row["isolation"], row["missing"], "", "")
        if "missing" in row
        else (
            row["isolation"],
            f"{row['per_second']:,.0f}",
            f"{row['per_second'] / base:.1f}",
            f"{row['cpu_milliseconds']:.1f}",
        )
        for row in result["rows"]
    ]
    header = ("isolation", "programs/s", "over a new interpreter", "CPU ms each")
    title = (
        f"{result['sandboxes']} sandboxes, {result['programs']} programs each, fastest of {result['rounds']} rounds"
    )
    return "\n".join([title, "", *report.markdown(header, rows), ""])


@exit_codes
def main() -> int:
    """Command line of the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--programs", type=int, default=200, help="for each sandbox and round")
    parser.add_argument("--sandboxes", type=int, default=2, help="sandboxes that run at the same time")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments.programs, arguments.sandboxes, arguments.rounds))
    result = {
        "programs": arguments.programs, "sandboxes": arguments.sandboxes, "rounds": arguments.rounds, "rows": rows,
    }  # fmt: skip
    report.write(result, table, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
