"""Creates .venv with the locked packages; `make install` calls this program.

The package index decides which build of torch it offers: PyPI's torch for Linux is the CUDA build, other indexes
have the CPU build. pip installs what the metadata of that build names, in the versions of requirements-cuda.lock.

Needs nothing but the standard library. Exit codes: 0 success, 1 a step failed, 2 this machine cannot be used.
"""

import argparse
import importlib.util
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
CUDA_LOCK = ROOT / "requirements-cuda.lock"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PYTHONS = ((3, 11), (3, 12))
GIGABYTE = 1e9
# Sizes of .venv, measured (docs/installing.md), with a reserve of a third for what pip unpacks on the way.
CPU_BYTES = 2.0 * GIGABYTE
CUDA_BYTES = 7.0 * GIGABYTE
CUDA_LIBRARIES_BYTES = 5.0 * GIGABYTE
_BUILD_PROGRAM = (
    "from importlib.metadata import PackageNotFoundError, metadata\n"
    "try: found = metadata('torch')\n"
    "except PackageNotFoundError: print('none', 'none')\n"
    "else:\n"
    "    names = ' '.join(found.get_all('Requires-Dist') or ())\n"
    "    print('cuda' if 'nvidia-' in names else 'cpu', found['Version'])"
)


class CannotInstall(Exception):
    """One line for the person who called `make`, with the exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Environment:
    """The virtual environment that is being filled."""

    directory: Path

    @property
    def python(self) -> str:
        """Path of its interpreter."""
        return str(self.directory / "bin" / "python")

    def pip(self, *arguments: str) -> int:
        """Run pip quietly; its exit code. pip writes errors to stderr itself."""
        command = [self.python, "-m", "pip", *arguments[:1], "-q", "--disable-pip-version-check", *arguments[1:]]
        return subprocess.run(command, check=False).returncode

    def install(self, what: str, *arguments: str) -> None:
        """Install; CannotInstall names `what` if pip fails."""
        if self.pip("install", *arguments) != 0:
            raise CannotInstall(f"pip could not install {what}; the reason stands above", 1)

    def torch_build(self) -> tuple[str, str]:
        """("cpu" | "cuda" | "none", version) of the installed torch, from its metadata, without importing torch."""
        answer = subprocess.run([self.python, "-c", _BUILD_PROGRAM], capture_output=True, text=True, check=True)
        build, version = answer.stdout.split()
        return build, version


def main() -> int:
    """Read the arguments, install, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path, help="directory of the virtual environment")
    parser.add_argument("--torch", default="", help="cpu, cuda, or nothing: the build that the package index offers")
    parser.add_argument("--add", choices=["vllm"], help="add packages to an environment that exists")
    options = parser.parse_args()
    try:
        if options.torch not in ("", "cpu", "cuda"):
            raise CannotInstall(f"TORCH={options.torch}: there are TORCH=cpu, TORCH=cuda, or nothing")
        environment = Environment(options.venv)
        if options.add == "vllm":
            add_vllm(environment)
        else:
            install(environment, options.torch)
    except CannotInstall as error:
        sys.stderr.write(f"make install: {error}\n")
        return error.code
    return 0


def install(environment: Environment, torch: str) -> None:
    """Everything that `pipelinerl` needs; torch: "cpu", "cuda" or "" for the build that the index offers."""
    check_machine(environment.directory, CUDA_BYTES if torch == "cuda" else CPU_BYTES)
    started = time.monotonic()
    say(f"[1/4] {environment.directory}: Python {platform.python_version()}")
    if not (environment.directory / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment.directory)], check=True)
    number = locked_torch()
    say(f"[2/4] torch {number} ({torch or 'the build that the package index offers'})")
    install_torch(environment, torch, number)
    say("[3/4] the other locked packages and this project (one to two minutes)")
    environment.install("the locked packages", "--no-deps", "-r", str(LOCK))
    environment.install("this project", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    say(f"[4/4] {import_torch(environment)}; installed in {time.monotonic() - started:.0f} s")


def check_machine(directory: Path, need_bytes: float) -> None:
    """Raise CannotInstall for what would fail later with a riddle."""
    if platform.system() != "Linux":
        raise CannotInstall(f"PipelineRL runs on Linux only, and this is {platform.system()}")
    if sys.version_info[:2] not in PYTHONS:
        raise CannotInstall(
            f"Python {platform.python_version()} is not supported: install Python 3.11 or 3.12, or set PYTHON=..."
        )
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        raise CannotInstall(
            f"Python {version} lacks the venv module: on Debian and Ubuntu, `apt-get install python{version}-venv`"
        )
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not (shutil.which("cc") or shutil.which("gcc")) or not headers.exists():
        raise CannotInstall(  # pycosat of reasoning-gym has no wheels
            "a C compiler or the headers of Python are missing, and one package is compiled: on Debian and Ubuntu, "
            f"`apt-get install gcc libc6-dev python{version}-dev`"
        )
    check_disk(directory, need_bytes, "the packages need")


def check_disk(directory: Path, need_bytes: float, what: str) -> None:
    """Raise CannotInstall if the file system of the environment has less than `need_bytes` free."""
    if (directory / ".installed").exists():
        return  # most of it is there
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < need_bytes:
        raise CannotInstall(
            f"{what} {need_bytes / GIGABYTE:.0f} GB, and {existing} has {free / GIGABYTE:.1f} GB free"
            + (": free some, or set TORCH=cpu for the build that needs 2 GB" if need_bytes > CPU_BYTES else "")
        )


def locked_torch() -> str:
    """Version of torch in requirements.lock."""
    (line,) = [line for line in LOCK.read_text().splitlines() if line.startswith("torch==")]
    return line.removeprefix("torch==").strip()


def install_torch(environment: Environment, wanted: str, number: str) -> None:
    """torch of the wanted build, and what the metadata of that build names."""
    before = environment.torch_build()
    for stamp in environment.directory.glob(".installed-torch-*"):
        stamp.unlink()  # make writes the stamp of this build at the end
    if wanted == "cpu":
        install_cpu_torch(environment, number)
    else:
        # === compares the whole text: 2.13.0 is the CUDA build, and 2.13.0+cpu does not equal it.
        environment.install(f"torch {number}", "--no-deps", f"torch{'===' if wanted == 'cuda' else '=='}{number}")
    build, version = environment.torch_build()
    if wanted == "cuda" and build != "cuda":
        raise CannotInstall(f"TORCH=cuda: the package index offers torch {version} without CUDA libraries")
    if build == "cuda":
        say("      the CUDA build: its libraries follow, 3.5 GB (TORCH=cpu takes the build without them)")
        check_disk(environment.directory, CUDA_LIBRARIES_BYTES, "the CUDA libraries of torch need")
        constraints = ("-c", str(LOCK), "-c", str(CUDA_LOCK))
        environment.install("the CUDA libraries of torch", *constraints, f"torch==={number}")
    if before not in (("none", "none"), (build, version)):
        (environment.directory / ".installed-vllm").unlink(missing_ok=True)  # vLLM has a build for each


def install_cpu_torch(environment: Environment, number: str) -> None:
    """The CPU build from PyTorch's own index, without libraries that a CUDA build left."""
    wheel = f"torch==={number}+cpu"
    if environment.torch_build() == ("cuda", number):
        environment.pip("uninstall", "-y", "-r", str(CUDA_LOCK))
    if environment.pip("install", "--no-deps", "--retries", "1", "--index-url", CPU_INDEX, wheel) != 0:
        raise CannotInstall(f"TORCH=cpu: {CPU_INDEX} has no torch {number}+cpu for this Python, or is not reached", 1)


def import_torch(environment: Environment) -> str:
    """What was imported, as one line; CannotInstall if the import fails."""
    program = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.device_count())"
    ended = subprocess.run(
        [environment.python, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        raise CannotInstall(
            f"torch does not import: {reason}. `make install TORCH=cpu` takes the build without CUDA libraries, "
            f"`make install TORCH=cuda` the one with them; remove {environment.directory} first",
            1,
        )
    version, cuda, devices = ended.stdout.split()
    if cuda == "None":
        return f"torch {version}: CPU build"
    return f"torch {version}: CUDA {cuda}, {devices if devices != '0' else 'no'} GPU visible"


def add_vllm(environment: Environment) -> None:
    """Install vLLM for GPUs beside the CUDA build of torch, and vLLM for CPUs beside the CPU build."""
    build, _ = environment.torch_build()
    name = "requirements-gpu.lock" if build == "cuda" else "requirements-vllm.lock"
    say(f"vLLM for {'GPUs' if build == 'cuda' else 'CPUs'}, beside the {build.upper()} build of torch")
    if build == "cuda" and not Path("/proc/driver/nvidia/version").exists():
        say("no NVIDIA driver is loaded here: for vLLM on the CPU, `make install TORCH=cpu ENGINE=vllm`")
    environment.install("vLLM", "--no-deps", "-r", str(ROOT / name))


def say(text: str) -> None:
    """A line of progress."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
