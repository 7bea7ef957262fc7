"""Checks of configuration and host before a run starts. Each check raises ConfigError: what, why, what to set."""

import json
import logging
import math
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory, TemporaryFile
from threading import Timer
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from safetensors import safe_open
from sqlalchemy import create_engine
from sqlalchemy.exc import SQLAlchemyError

from pipelinerl_core.check_process import result_of
from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.mixture import naming
from pipelinerl_core.config.mlflow_login import LOGIN_VARIABLES, split_login
from pipelinerl_core.config.rules import empty_slots
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.host import own_cores
from pipelinerl_core.models.hub import is_hub_model
from pipelinerl_core.models.paths import builtin_recipe, read_model_config, resolve_model_path
from pipelinerl_core.models.recipes import PackagedModel, TinyModel, packaged_file
from pipelinerl_core.models.shapes import context_of
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.local_files import check_local_files
from pipelinerl_core.run.locate import SHARED_MEMORY, local_directory
from pipelinerl_core.run.user_code import local_code, read_local, stored_code
from pipelinerl_core.storage.object_store import check_writable, open_store
from pipelinerl_core.supervision.fit import check_fit, shared_bytes, trained_parameters
from pipelinerl_core.supervision.gpus import check_gpus
from pipelinerl_core.supervision.role_commands import ending_with_parent, module_command, role_environment
from pipelinerl_core.supervision.temporary_directories import own_temporary
from pipelinerl_core.telemetry.redact import redact_text
from pipelinerl_core.weights.memory import shm_directory

logger = logging.getLogger(__name__)

HTTP_SECONDS = 5.0
PROMPTS_SECONDS = 1800.0
"""Limit of the prompts check, which may download a data set and reads all its rows."""
REWARD_SECONDS = 180.0
"""Limit of the start of a process with a user's code, which may import large libraries."""
MODEL_SECONDS = 120.0
"""Limit of the check of a model's architecture."""
_QUIET_SECONDS = 15.0
"""A check that takes longer is named in the log."""
PREPARE_SECONDS = 900.0
"""Limit of building a built-in model, which takes about a minute on one core."""
DOWNLOAD_SECONDS = 7200.0
"""Limit of the download of a model."""
_SMALL_FILES_BYTES = 200_000_000  # segments, batches, commits and logs of a run like the quickstart, with reserve
_STORED_CHECKPOINTS = 4  # step 0, the newest two and the next one
_OTHER_VERSIONS = 4  # the first and the last, and two for an evaluator
_STAGED_MODELS = 2  # the merged model that vLLM has loaded, and the next one


def check_packages(config: RunConfig) -> None:
    """The packages of engine and learner must be installed if their roles start on this host, that is, unless on work
    pools."""
    for section in (config.engine, config.learner):
        if section.package and config.placement.kind == "local" and find_spec(section.package) is None:
            raise ConfigError(section.install)


def check_context(config: RunConfig, directory: Path) -> None:
    """The model's context must hold a completion of max_tokens and a prompt of at least one token."""
    limit = context_of(read_model_config(directory))
    for key, longest in (("rollouts", config.rollouts.max_tokens), ("eval", config.eval.max_tokens)):
        if limit is not None and longest >= limit:
            raise ConfigError(
                f"{key}.max_tokens={longest}: the context of the model has {limit} tokens, "
                f"prompt included. Set {key}.max_tokens below {limit}"
            )


def check_all(config: RunConfig, root: str, *, run: RunContext | None = None) -> list[str]:
    """All checks of a configuration, cheap checks first; builds a missing built-in model.

    run: the run, if the run exists: it uses its stored copy of a user's file. Returns lines of text: number, held-out
    share and lengths of the prompts, and warnings about the reward function.
    """
    check_root(root)
    check_hub_address(config)
    own_cores(config, "trainer")
    check_packages(config)
    check_gpus(config)
    if run is None:  # a run that exists trains without MLflow too
        check_mlflow(config.tracking.chosen_uri)
        if config.tracking.wandb:
            from pipelinerl_core.telemetry.wandb import check_wandb  # noqa: PLC0415 - imports mlflow

            check_wandb()
    else:
        check_local_files(run)
    is_model_there = resolve_model_path(config.model.path) is not None
    if not is_model_there and not is_hub_model(config.model.path) and builtin_recipe(config.model.path) is None:
        raise _no_directory(config.model.path)
    fits = check_fit(config)
    with started_loading(config) as loading:  # the longest check, beside the others
        facts = check_prompts(config)
        warnings = [*empty_slots(config), *check_reward(config, run)]
        check_objective(config, run)
        warnings += loading()
    check_model(config)
    if not is_model_there and is_hub_model(config.model.path):
        warnings += check_loading(config)  # again, now with its files
    warnings += fits if is_model_there else check_fit(config)
    check_space(config, root, run=run)
    if is_model_there:
        return [*facts, *warnings]
    # Again, now with the tokenizer: prompts are measured, first messages of environments are rendered.
    if any(part.environment.path for part in config.parts.values()):
        check_reward(config, run)
    return [*check_prompts(config), *warnings]


def start_seconds(config: RunConfig) -> float:
    """Deadline of the start of the trainer: placement.start_seconds, or its default for the size of the model."""
    return config.placement.start_seconds or 600.0 + 30.0 * model_size(config.model.path) / 1e9


def check_root(root: str) -> None:
    """The root is writable; a remote store answers."""
    check_writable(open_store(root))


def check_model(config: RunConfig) -> None:
    """The model is a directory with a config.json; a missing built-in model is built, a model of the hub
    downloaded."""
    path = config.model.path
    directory = obtain(path)
    if directory is None:
        raise _no_directory(path)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"model.path={path}: has no config.json. Set a Hugging Face model directory, or builtin:sums"
        )
    check_context(config, directory)
    check_references(config)


def _no_directory(path: str) -> ConfigError:
    return ConfigError(
        f"model.path={path}: no such directory. Set the directory or the hub name (org/name) of a Hugging Face "
        "model, or builtin:sums"
    )


def obtain(path: str) -> Path | None:
    """The directory of a model: a missing built-in model is built, a model of the hub downloaded; None: not there."""
    if is_hub_model(path):
        download(path)
    elif builtin_recipe(path) is not None and resolve_model_path(path) is None:
        prepare_model(path)
    return resolve_model_path(path)


def check_loading(config: RunConfig) -> list[str]:
    """Learner and engine can compute the architecture of the model, which is tried with a small model, before a
    download; and the files of each model on this host are complete. Returns lines of text about the models."""
    with started_loading(config) as loading:
        return loading()


@contextmanager
def started_loading(config: RunConfig) -> Iterator[Callable[[], list[str]]]:
    """Start `check_loading`; yields the function that waits for its lines."""
    recipes = [builtin_recipe(path) for path in config.model_paths.values()]
    if not any(isinstance(recipe, TinyModel | None) for recipe in recipes):
        yield list
        return
    given = config.model_dump(mode="json")
    with _started("model.path", "pipelinerl_core.tools.check_model", given, MODEL_SECONDS) as wait:
        yield wait


def check_references(config: RunConfig) -> None:
    """Reference model and teacher exist and have the vocabulary of the trained model."""
    own, *references = config.model_paths.items()
    for key, path in references:
        _check_reference(f"{key}={path}", obtain(path), resolve_model_path(own[1]))


def _check_reference(setting: str, directory: Path | None, own: Path | None) -> None:
    sizes = [_vocabulary(path) for path in (directory, own)]
    if sizes[0] is None:
        raise ConfigError(
            f"{setting}: no Hugging Face model there. Set the directory or the hub name of a model, or builtin:sums"
        )
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{setting}: its vocabulary has {sizes[0]} tokens, the vocabulary of model.path has {sizes[1]}. Set a "
            "model with the same tokenizer"
        )
    tokens, own_tokens = (_tokens(path) for path in (directory, own))
    if tokens and own_tokens and tokens != own_tokens:
        raise ConfigError(
            f"{setting}: its vocabulary has other tokens than the vocabulary of model.path (tokenizer.json). Set a "
            "model with the same tokenizer"
        )


def _tokens(directory: Path | None) -> list[object]:
    """The tokens of tokenizer.json with their ids; empty without a readable file."""
    try:
        tokenizer = {} if directory is None else json.loads((directory / "tokenizer.json").read_text())
        added = [(token["id"], token["content"]) for token in tokenizer.get("added_tokens", ())]
        return [tokenizer["model"]["vocab"], added]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _vocabulary(directory: Path | None) -> int | None:
    """Vocabulary size of a model; None if there is no model."""
    try:
        return None if directory is None else int(json.loads((directory / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError):
        return None


def prepare_model(path: str) -> None:
    """Build a built-in model unless the model is cached; progress goes to stderr."""
    recipe = builtin_recipe(path)
    if isinstance(recipe, PackagedModel):
        packaged_file(recipe)
    command = ending_with_parent(module_command("pipelinerl_core.tools.prepare", {"model": path}))
    try:
        with own_temporary(role_environment(1, "")) as own:
            ended = subprocess.run(command, env=own, stdout=subprocess.DEVNULL, timeout=PREPARE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"model.path={path}: was not built within {PREPARE_SECONDS:.0f} s") from None
    if ended.returncode != 0:
        raise ConfigError(f"model.path={path}: the build failed (exit code {ended.returncode}, see the lines above)")


def download(path: str) -> None:
    """Download a model of the hub unless the local cache has the model; progress goes to stderr.

    In a child process, which Ctrl-C and the deadline can end at any moment.
    """
    command = ending_with_parent([sys.executable, "-m", "pipelinerl_core.models.hub", path])
    environment = role_environment(1, "")
    try:
        ended = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, timeout=DOWNLOAD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"model.path={path}: not downloaded within {DOWNLOAD_SECONDS:.0f} s. Call again to continue the download"
        ) from None
    if ended.returncode != 0:
        lines = ended.stdout.splitlines()
        raise ConfigError(lines[-1] if lines else f"model.path={path}: the download ended ({ended.returncode})")


def check_prompts(config: RunConfig) -> list[str]:
    """The prompt source opens and returns a prompt, and the model's tokenizer, if the model is on this host, encodes
    the prompts; checked in a child process, because the libraries are heavy. Returns lines of text about the
    prompts."""
    return _check_in_child(
        "prompts", "pipelinerl_core.prompts.check", config.model_dump(mode="json"), PROMPTS_SECONDS
    )


def check_reward(config: RunConfig, run: RunContext | None = None) -> list[str]:
    """A user's reward function loads and scores two completions of the first prompt, in a scoring process; or an
    environment loads and plays two tasks up to their first messages, in an environment process.

    Returns warnings: one line with file and line for each exception of the function, because the completions are no
    real ones.
    """
    warnings: list[str] = []
    for name, part in config.parts.items():
        with naming(name):
            warnings += [f"mixture.{name}: {line}" if name else line for line in _check_part(part, name, run)]
    return warnings


def check_objective(config: RunConfig, run: RunContext | None = None) -> None:
    """A loss and a function of advantages of the user load and compute random tokens and rewards."""
    own = config.loss.own_functions
    if own:
        code = {
            key: read_local(key, location) if run is None else stored_code(run, key) for key, location in own.items()
        }
        given = {"config": config.model_dump(mode="json"), "code": code}
        _check_in_child(next(iter(own)), "pipelinerl_core.tools.check_loss", given, REWARD_SECONDS)


def _check_part(config: RunConfig, name: str, run: RunContext | None) -> list[str]:
    """`check_reward` for one part of a mixture, or for a run without a mixture (name "")."""
    if config.environment.path:
        seconds = REWARD_SECONDS + PROMPTS_SECONDS + 2 * config.environment.call_seconds
        warnings = _check_in_child(
            f"environment.path={config.environment.path}",
            "pipelinerl_core.tools.check_environment",
            _with_code(config, name, run),
            seconds,
        )
        if not config.reward.function:
            return warnings
    if not config.reward.function:
        return []
    seconds = REWARD_SECONDS + PROMPTS_SECONDS + 2 * config.reward.timeout_seconds
    return _check_in_child(
        f"reward.function={config.reward.function}",
        "pipelinerl_core.tools.check_reward",
        _with_code(config, name, run),
        seconds,
    )


def _with_code(config: RunConfig, part: str, run: RunContext | None) -> dict[str, Any]:
    code = local_code(config) if run is None else stored_code(run, part)
    return {"config": config.model_dump(mode="json"), "code": code}


def _check_in_child(subject: str, module: str, given: Mapping[str, Any], seconds: float) -> list[str]:
    """Run a module that checks the JSON value on its stdin (check_process.py). Returns its lines."""
    with _started(subject, module, given, seconds) as wait:
        return wait()


@contextmanager
def _started(
    subject: str, module: str, given: Mapping[str, Any], seconds: float
) -> Iterator[Callable[[], list[str]]]:
    """Start such a module; yields the function that waits for its lines. The process ends with the block."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as own:  # for files that the user's code leaves
        command = ending_with_parent([sys.executable, "-m", module])
        with TemporaryFile() as value:  # no pipe, whose writer would wait until the process reads
            value.write(json.dumps(given).encode())
            value.seek(0)
            process = subprocess.Popen(
                command,
                env={**role_environment(1, ""), "TMPDIR": own},
                stdin=value,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

        def wait() -> list[str]:
            note = Timer(
                _QUIET_SECONDS,
                lambda: logger.warning(
                    "%s: its check takes more than %.0f s, and may take %.0f s", subject, _QUIET_SECONDS, seconds
                ),
            )
            note.daemon = True
            note.start()
            try:
                stdout, stderr = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                advice = ". Download the files, and set prompts.path to them" if subject == "prompts" else ""
                raise ConfigError(f"{subject}: the check did not end within {seconds:.0f} s{advice}") from None
            finally:
                note.cancel()
            return result_of(subject, process.returncode, stdout, stderr)

        try:
            yield wait
        finally:
            process.kill()  # without effect on a process that has ended
            process.communicate()


_SQLITE = "sqlite:///"
_DATABASES = ("postgresql", "mysql")
"""Servers that MLflow may keep its data in, without a server of its own."""
_LOGINS = {"tracking.mlflow_uri": " and ".join(LOGIN_VARIABLES), "PREFECT_API_URL": "PREFECT_API_AUTH_STRING"}
"""Setting of a server -> the environment variables of its login."""


def check_http(setting: str, url: str, login: tuple[str, str] | None = None) -> None:
    """The server at `url` answers its health page. login: user name and password, unless `url` has them."""
    url, own_login = split_login(url)
    try:
        request = Request(f"{url.rstrip('/')}/health")
        if login := own_login or login:
            credentials = b64encode(":".join(login).encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {credentials}")  # for this server only
        with urlopen(request, timeout=HTTP_SECONDS) as answer:
            if answer.status == HTTPStatus.OK:
                return
        reason = f"answered {answer.status}"
    except HTTPError as error:
        if error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            answered = f"{error.code} {error.reason}"
            raise ConfigError(
                f"{setting}={redact_text(url)}: the server refuses the request ({answered}). Set {_LOGINS[setting]}"
            ) from None
        reason = f"answered {error.code} {error.reason}"
    except (HTTPException, OSError, ValueError) as error:
        reason = str(getattr(error, "reason", error))
    raise ConfigError(f"{setting}={redact_text(url)}: no answer ({reason}). Start the server or change {setting}")


def check_mlflow(uri: str) -> None:
    """The MLflow server answers; a database file needs no server."""
    if uri.startswith(("http://", "https://")):
        user, password = (os.environ.get(name, "") for name in LOGIN_VARIABLES)
        check_http("tracking.mlflow_uri", uri, (user, password) if user else None)
    elif uri.startswith("file:") or (uri and uri != "none" and "://" not in uri):
        raise ConfigError(
            f"tracking.mlflow_uri={uri}: MLflow 3 no longer writes plain directories. "
            "Set sqlite:////absolute/path/mlflow.db, a server's http URL, or none"
        )
    elif uri.startswith("sqlite:"):
        path = uri.removeprefix(_SQLITE)
        if path in (uri, ""):
            raise ConfigError(f"tracking.mlflow_uri={uri}: names no file. Set sqlite:////absolute/path/mlflow.db")
        _check_file(uri, Path(path))
    elif uri.partition(":")[0].partition("+")[0] in _DATABASES:
        _check_database(uri)


def _check_database(uri: str) -> None:
    """The driver of a database server is installed, and the server answers."""
    try:
        engine = create_engine(uri, connect_args={"connect_timeout": int(HTTP_SECONDS)})
        with engine.connect():
            pass
    except (ImportError, SQLAlchemyError, ValueError) as error:
        reason = f"{type(error).__name__}: {redact_text(' '.join(str(error).split()))[:300]}"
        raise ConfigError(
            f"tracking.mlflow_uri={redact_text(uri)}: the database does not answer ({reason}). "
            "Install its driver, start the database or change tracking.mlflow_uri"
        ) from None


def _check_file(uri: str, path: Path) -> None:
    """A file that exists is a database of SQLite; MLflow creates a file that does not exist in a directory."""
    nearest = next(parent for parent in path.absolute().parents if parent.exists())  # MLflow creates the others
    if path.parts[0] == "~":
        raise ConfigError(f"tracking.mlflow_uri={uri}: ~ is not replaced in a URI. Write the home directory out")
    try:
        with NamedTemporaryFile(dir=nearest):  # SQLite writes a second file beside its own
            pass
    except OSError as error:
        raise ConfigError(
            f"tracking.mlflow_uri={uri}: no file can be written in {nearest} ({error.strerror}). Name a file in "
            "another directory, or set none"
        ) from None
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.execute("select count(*) from sqlite_master")
    except sqlite3.Error as error:
        raise ConfigError(
            f"tracking.mlflow_uri={uri}: {path} is no SQLite database ({error}). Name another file, or remove "
            "this file"
        ) from None


def check_hub_address(config: RunConfig) -> None:
    """The hub can bind its address and port."""
    host, port = config.placement.hub_host, config.placement.hub_port
    try:
        with socket.create_server((host, port)):
            return
    except OSError as error:
        raise ConfigError(
            f"placement.hub_host={host} placement.hub_port={port}: cannot listen there ({error.strerror or error}). "
            "Set placement.hub_port=0 for any free port, and placement.hub_host to an address of this host"
        ) from None


def check_space(config: RunConfig, root: str, *, run: RunContext | None = None) -> None:
    """The root's disk and shared memory have enough free space for this run, or for what a run that exists lacks."""
    model_bytes = model_size(config.model.path)
    written = local_directory(run.store.url) if run is not None else None
    version_bytes = _version_size(config, model_bytes)
    directory = local_directory(root)
    if directory is not None:
        _require_free(
            directory,
            _stored_bytes(config) - sum(_used(written / name) for name in ("weights", "checkpoints") if written),
            f"for {_num_durable(config)} durable weight versions of {_size(version_bytes)} and "
            f"{_num_checkpoints(config)} checkpoints of {_size(_checkpoint_bytes(config, version_bytes))}. Raise "
            "weights.durable_every, lower weights.keep or choose another --root",
        )
    if config.weights.uses_shared_memory:
        _require_free(
            SHARED_MEMORY,
            math.ceil(shared_bytes(config, version_bytes)) - _used(shm_directory(run.run_id) if run else None),
            f"for weight versions of {_size(version_bytes)}. "
            "Enlarge it (docker run --shm-size) or set weights.transport=object_store",
        )
    if config.weights.content == "adapters" and config.engine.has_workers and config.placement.kind == "local":
        staged = _STAGED_MODELS * config.placement.actors
        _require_free(
            SHARED_MEMORY,
            staged * model_bytes,
            f"for {staged} merged models of {_size(model_bytes)}. Enlarge it (docker run --shm-size)",
        )


def space_lines(configs: Sequence[RunConfig], root: str) -> list[str]:
    """A warning if the root's disk has not enough free space for all of these runs, which are carried out in turn."""
    directory = local_directory(root)
    needed = sum(_stored_bytes(config) for config in configs)
    if directory is None or (free := _free(directory)) >= needed:
        return []
    return [
        f"{directory}: {_size(free)} free, but {len(configs)} runs need up to {_size(needed)}, and a run that "
        "does not fit is not started. Raise weights.durable_every, lower weights.keep or choose another --root"
    ]


def _num_durable(config: RunConfig) -> int:
    """The number of durable weight versions that a run keeps: an upper bound, which includes versions that are stored
    because of a checkpoint. With weights.keep=0 these are not counted."""
    weights, keep = config.weights, config.weights.keep
    every = weights.publish_every if weights.publish_every > 1 else weights.durable_every
    num_durable = config.trainer.steps // every + 1
    if not keep:
        return num_durable
    beside = min(num_durable, keep) if every > 1 else 0
    return min(config.trainer.steps + 1, keep + beside + _OTHER_VERSIONS)


def _num_checkpoints(config: RunConfig) -> int:
    every = config.checkpoint.keep_every
    return _STORED_CHECKPOINTS + (config.trainer.steps // every if every else 0)


def _checkpoint_bytes(config: RunConfig, version_bytes: int) -> int:
    """Weights and two moments in float32 of every trained parameter; if their number is unknown, as many as a version
    in bfloat16 has."""
    return math.ceil(12 * (trained_parameters(config) or version_bytes / 2))


def _stored_bytes(config: RunConfig) -> int:
    """Bytes that a whole run needs at its root: durable versions, checkpoints, rollouts and logs."""
    version_bytes = _version_size(config, model_size(config.model.path))
    checkpoints_bytes = _num_checkpoints(config) * _checkpoint_bytes(config, version_bytes)
    return _num_durable(config) * version_bytes + checkpoints_bytes + _SMALL_FILES_BYTES


def _version_size(config: RunConfig, model_bytes: int) -> int:
    """Bytes of a published version; for adapters an upper bound, as if every matrix of the model had an adapter."""
    directory = resolve_model_path(config.model.path)
    if config.weights.content != "adapters" or directory is None:
        return model_bytes
    num_bytes = 4 if config.model.dtype == "float32" else 2
    rows_and_columns = sum(sum(shape) for shape in _matrix_shapes(directory))
    return min(model_bytes, config.learner.lora_rank * rows_and_columns * num_bytes)


def _matrix_shapes(directory: Path) -> Iterator[list[int]]:
    """Shapes of the matrices of a model, read from the headers of its safetensors files."""
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
        yield from (shape for shape in shapes if len(shape) == 2)


def model_size(path: str) -> int:
    """Bytes of the weights of a model."""
    directory = resolve_model_path(path)
    return sum(file.stat().st_size for file in directory.glob("*.safetensors")) if directory else 0


def _require_free(directory: Path, needed: int, purpose: str) -> None:
    free = _free(directory)
    if free < needed:
        raise ConfigError(f"{directory}: {_size(free)} free, but this run needs about {_size(needed)} {purpose}")


def _free(directory: Path) -> int:
    """Free bytes on the disk of a directory, which may be missing."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(existing).free


def _used(directory: Path | None) -> int:
    """Bytes of the files below a directory; 0 if it is missing or None."""
    num_bytes = 0
    for path in directory.rglob("*") if directory is not None else ():
        with suppress(OSError):  # removed meanwhile
            num_bytes += path.stat().st_size if path.is_file() else 0
    return num_bytes


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
