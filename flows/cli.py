"""The command line, light on purpose: commands import what they need when they run; --help answers at once."""

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.arguments import Json, Overrides, Root, Run
from flows.console import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_OK, answer, exit_codes
from flows.environment import set_defaults
from flows.export_command import export
from pipelinerl_core.errors import ConfigError

app = typer.Typer(
    name="pipelinerl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Asynchronous reinforcement learning of language models.

    Generation and training run side by side; new weights are swapped in the middle of sequences.

    First steps:

    - `pipelinerl doctor` says whether this machine is ready
    - `pipelinerl train quickstart` trains a small model on two cores
    - `pipelinerl status latest` shows how it goes
    - `pipelinerl resume latest` goes on after a stop or a crash
    - `pipelinerl compare` says which settings learn sooner

    Results go to stdout (`--json`: one JSON document), logs to stderr. Exit codes: 0 success, 1 failure, 2 bad input.
    """,
)

_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


def main() -> None:
    """Console script `pipelinerl`."""
    set_defaults()
    with exit_codes():
        if sys.platform != "linux":
            raise ConfigError(f"PipelineRL runs on Linux only, and this is {sys.platform}")
        app()


def _module(name: str) -> Any:
    """A module that is too heavy to import for --help."""
    return importlib.import_module(name)


@app.command()
def train(
    source: Annotated[str, typer.Argument(metavar="PRESET|FILE.toml", help="A shipped preset or a TOML file.")],
    overrides: Overrides = None,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Train a model; at the end print accuracy before and after, and where the report is.

    Examples:

    - `pipelinerl train quickstart`
    - `pipelinerl train quickstart trainer.steps=50 placement.actors=2`
    - `pipelinerl train mine.toml --root s3://bucket/runs --json > report.json`

    `pipelinerl config --keys` lists every setting. Ctrl-C stops everything; `resume` goes on.
    """
    config = _module("pipelinerl_core.config").load_config(source, overrides or ())
    arguments = {"preset": source, "overrides": tuple(overrides or ()), "root": root}
    _run(config, arguments, as_json)


@app.command()
def resume(run: Run, overrides: Overrides = None, root: Root = "", as_json: Json = False) -> None:
    """Go on with a run where its last commit is, after a stop, a crash or a kill. Nothing is lost or trained twice.

    Settings may change what it runs on, for good: ranks and kind of the learner, device, placement.

    Examples: `pipelinerl resume latest`, `pipelinerl resume latest trainer.ranks=1`. Refused while the run is live.
    """
    runs = _module("tasks.runs")
    url = runs.locate_run(run, root)
    runs.refuse_if_live(url)
    found = runs.find_run(url)
    config = _module("pipelinerl_core.config").resume_config(found.config, overrides or ())
    arguments = {
        "preset": found.run_id,
        "resume": url,
        "root": url.rpartition("/")[0],
        "overrides": tuple(overrides or ()),
    }
    _run(config, arguments, as_json)


def _run(config: Any, arguments: dict[str, Any], as_json: bool) -> None:
    """Check, run the flow, print what it came to. Bad input is refused before Prefect is even imported."""
    root = arguments["root"]
    _module("tasks.checks").check_all(config, _module("tasks.runs").root_url(root))
    report = _module("flows.launch").run_training(config, arguments)
    inspect = _module("flows.inspect_run")
    answer(report, inspect.summary(report, inspect.report_location(report["run_id"], root)), as_json=as_json)


@app.command()
def drain(run: Run, root: Root = "", as_json: Json = False) -> None:
    """Let a live run stop after its next commit, from anywhere that reaches its store; `resume` goes on.

    Unlike Ctrl-C it waits for a step that takes longer than a few seconds. Example: `pipelinerl drain latest`
    """
    url = _module("tasks.runs").locate_run(run, root)
    document = _module("tasks.draining").drain(url)
    answer(
        document,
        [f"{document['run_id']} stops after its next commit (the newest is {document['step']})"],
        as_json=as_json,
    )


@app.command()
def status(
    run: Run = "latest",
    web: Annotated[
        bool, typer.Option("--web", help="Serve it as a page that follows the run, until Ctrl-C.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address of --web; there is no password.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of --web; 0: any free one.", min=0, max=65535)] = 0,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Show how far a run is, whether it is live, and what its hub says. Reads only its objects.

    `--web` serves the report while the run goes on, with /status.json, and /metrics for Prometheus; of `latest` it
    follows one run after the other.

    Examples: `pipelinerl status`, `pipelinerl status --web`, `pipelinerl status quickstart-1a2b3c4d --json`
    """
    if web:
        _module("flows.live_page").serve(run, root, host, port)
        return
    store = _module("pipelinerl_core.storage.object_store").open_store(_module("tasks.runs").locate_run(run, root))
    live = _module("pipelinerl_core.tracking.live")
    document = {**live.run_status(store), "url": store.url}
    answer(document, [] if as_json else [live.format_status(store), f"at: {store.url}"], as_json=as_json)


@app.command()
def logs(
    run: Run = "latest",
    role: Annotated[str, typer.Option(help="Only hub, trainer, actor (all of them), actor-1, evaluator, ...")] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", help="Last lines of each log.", min=0)] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, until Ctrl-C.")] = False,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Show what the roles of a run have written on this host, and (--json) how many warnings and errors.

    Examples: `pipelinerl logs`, `pipelinerl logs latest --role actor --follow`
    """
    url = _module("tasks.runs").locate_run(run, root)
    _module("flows.show_logs").show(url, role, lines, keeps_on=follow, as_json=as_json)


@app.command()
def replay(
    run: Run,
    from_step: Annotated[int | None, typer.Option(help="First step; default the first of the run.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Another loss or learner: a study.")
    ] = None,
    to_step: Annotated[int | None, typer.Option(help="Last step; default the last of the run.")] = None,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Train recorded batches again and compare losses and weights with the commits; exit 1 if any differs.

    With settings it is a study: what another loss or learner would have made of the recorded stream.

    Examples: `pipelinerl replay latest --from-step 10 --to-step 20`, `pipelinerl replay latest loss.ratio_max=2`
    """
    arguments = {"run": _module("tasks.runs").locate_run(run, root)}
    arguments |= {
        key: str(step) for key, step in (("from-step", from_step), ("to-step", to_step)) if step is not None
    }
    _run_role("replay", arguments, [*(["--json"] if as_json else []), *(overrides or [])])


@app.command()
def actor(
    run: Run,
    name: Annotated[str, typer.Option(help="Name in the run; default: of this host and process.")] = "",
    root: Root = "",
) -> None:
    """Join a run that is under way with one more actor, from anywhere that reaches its hub and store.

    PIPELINERL_TOKEN must have the value that it had when the run was started. Ctrl-C or SIGTERM: its unfinished
    groups go to the other actors, with the tokens they have. Example: `PIPELINERL_TOKEN=... pipelinerl actor latest`
    """
    code = _module("tasks.join").join_run(_module("tasks.runs").locate_run(run, root), name)
    raise typer.Exit(code if code in (EXIT_OK, EXIT_BAD_INPUT) else EXIT_FAILURE)


@app.command()
def audit(run: Run, root: Root = "", as_json: Json = False) -> None:
    """Prove from the objects of a run that nothing was lost or trained twice; exit 1 if anything does not close.

    Example: `pipelinerl audit latest`
    """
    arguments = {"run": _module("tasks.runs").locate_run(run, root)}
    _run_role("audit", arguments, ["--json"] if as_json else [])


@app.command()
def gc(
    run: Run,
    rollouts: Annotated[
        bool,
        typer.Option("--rollouts", help="Decided segments too; batches keep what was trained."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, remove nothing.")] = False,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Remove what a run does not need any more: orphans of crashes, logs of decided groups. Never of a live run.

    Example: `pipelinerl gc latest --rollouts --dry-run`
    """
    runs = _module("tasks.runs")
    url = runs.locate_run(run, root)
    runs.refuse_if_live(url)
    flags = {"--rollouts": rollouts, "--dry-run": dry_run, "--json": as_json}
    _run_role("gc", {"run": url}, [flag for flag, is_set in flags.items() if is_set])


@app.command()
def evaluate(
    run: Run,
    version: Annotated[
        str, typer.Option(help="first, last, the number of a durable weight version, several with commas, or all.")
    ] = "last",
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Measure held-out accuracy of weight versions: mean reward of one sample per prompt at temperature 1.

    Examples: `pipelinerl evaluate latest --version first`, `pipelinerl evaluate latest --version all`
    """
    documents = _module("flows.inspect_run").evaluate_versions(_module("tasks.runs").locate_run(run, root), version)
    line = "version {version}: accuracy {accuracy:.3f} on {num_prompts} prompts, mean length {mean_tokens:.1f} tokens"
    is_one = version != "all" and "," not in version
    answer(documents[0] if is_one else documents, [line.format(**one) for one in documents], as_json=as_json)


app.command()(export)


@app.command()
def compare(
    source: Annotated[
        str, typer.Argument(metavar="[PRESET|FILE.toml]", help="What all arms start from.")
    ] = "quickstart",
    overrides: Overrides = None,
    arm: Annotated[list[str] | None, typer.Option(help='"name: section.key=value ...", once for each arm.')] = None,
    arms: Annotated[str, typer.Option(metavar="FILE.toml", help="Arms as tables of settings.")] = "",
    seeds: Annotated[str, typer.Option(help="Every arm runs once with each.")] = "0,1,2",
    target: Annotated[float, typer.Option(help="Held-out accuracy that the arms are timed to.")] = 0.5,
    margin: Annotated[float, typer.Option(help="A run ends when its training reward is this far above.")] = 0.07,
    budget_minutes: Annotated[float, typer.Option(help="What does not fit is left out, the last seed first.")] = 50.0,
    reference: Annotated[str, typer.Option(help="Arm that the others are compared with; default the first.")] = "",
    name: Annotated[str, typer.Option(help="Of the comparison; default the name of the preset.")] = "",
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Train the same model in several ways and say which reaches an accuracy how much sooner.

    Examples:

    - `pipelinerl compare --arm "pipeline: schedule.kind=pipeline" --arm "four: schedule.kind=conventional
      schedule.steps_per_phase=4" --seeds 0,1`
    - `pipelinerl compare quickstart --arms arms.toml --target 0.4 trainer.steps=200`

    Every arm runs with every seed; runs that are done are found again. Ctrl-C stops; the same command goes on.
    """
    comparing = _module("flows.comparing")
    preset, settings = comparing.split_source(source, overrides or ())
    wanted = _module("tasks.comparison").Wanted(
        source=preset,
        arms=comparing.arms_of(arm or (), arms),
        overrides=settings,
        seeds=comparing.parse_seeds(seeds),
        target=target,
        margin=margin,
        budget_minutes=budget_minutes,
        reference=reference,
        name=name,
    )
    comparing.show(comparing.carry_out(wanted, root), as_json=as_json)


@app.command()
def prepare(
    model: Annotated[str, typer.Option(help="The built-in model to build.")] = "builtin:sums", as_json: Json = False
) -> None:
    """Build a built-in model now rather than at the first `train`; no network, about a minute, cached."""
    _run_role("prepare", {"model": model}, ["--json"] if as_json else [])


@app.command()
def config(
    source: Annotated[str, typer.Argument(metavar="PRESET|FILE.toml")] = "quickstart",
    overrides: Overrides = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every setting with its default and meaning.")] = False,
    as_json: Json = False,
) -> None:
    """Print the resolved configuration as TOML that `train` reads, and what its schedule admits.

    Examples: `pipelinerl config quickstart trainer.steps=50 > mine.toml`, `pipelinerl config --keys`
    """
    if keys:
        listed = _module("flows.settings").every_key()
        lines = [f"{entry['key']} = {entry['default']}\n    {entry['meaning']}" for entry in listed]
        answer(listed, lines, as_json=as_json)
        return
    loader = _module("pipelinerl_core.config")
    resolved = loader.load_config(source, overrides or ())
    schedule = [f"# {line}" for line in _module("pipelinerl_core.config.rules").explain_schedule(resolved)]
    answer(resolved.model_dump(mode="json"), [*schedule, loader.as_toml(resolved).rstrip()], as_json=as_json)


@app.command()
def doctor(root: Root = "", as_json: Json = False) -> None:
    """Say whether this machine is ready: versions, cores, thread settings, memory, disk, servers; exit 1 if not."""
    examination = _module("flows.doctor").examine(root)
    answer(examination.document, examination.lines, as_json=as_json)
    raise typer.Exit(EXIT_FAILURE if examination.problems else EXIT_OK)


@app.command()
def deploy(
    pools: Annotated[str, typer.Option(help="Kind of the work pools: process, docker or kubernetes.")] = "process",
    notify: Annotated[
        str, typer.Option(metavar="TYPE/NAME", help="Notification block that alarms go to, as slack-webhook/team.")
    ] = "",
    max_resumes: Annotated[
        int | None, typer.Option(help="Times that a crashed run is scheduled again without coming to run.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="An edited copy of the shipped prefect.yaml; `deploy --show` prints that."),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the shipped prefect.yaml and change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Create or update work pools, deployments and automations on the server of PREFECT_API_URL.

    Example: `pipelinerl deploy`, then `prefect worker start --pool control` and a click on "Run" in the Prefect UI.
    With images, schedules or resources of your own: `pipelinerl deploy --show > prefect.yaml`, edit,
    `pipelinerl deploy --file prefect.yaml`.
    """
    module = _module("flows.deploy")
    if show:
        text = module.SHIPPED.read_text()
        answer(text, [text.rstrip()], as_json=as_json)
        return
    more = {} if max_resumes is None else {"max_resumes": max_resumes}
    deployed = module.deploy(pools, notify, file or module.SHIPPED, **more)
    answer(dataclasses.asdict(deployed), deployed.lines, as_json=as_json)


@app.command(context_settings=_PASS_THROUGH)
def bench(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            help="engine: tokens per second against its peers; vllm: what the adapter costs vLLM; "
            "gpu: engines on a GPU; learner: its step against a bare loop and TRL; "
            "adapters: versions of LoRA; stream: the channel and the hub; learning: schedules against each other."
        ),
    ],
) -> None:
    """Run a benchmark; what follows its name goes to the benchmark.

    Examples: `pipelinerl bench engine --json`, `pipelinerl bench learning --short`
    """
    if name == "learning":
        _module("flows.bench_learning").main(context.args)
    elif name in ("adapters", "engine", "gpu", "learner", "stream", "vllm"):
        _run_role(f"bench_{name}", {}, context.args)
    else:
        raise ConfigError(
            f"bench {name}: no such benchmark; there are: adapters, engine, gpu, learner, learning, stream, vllm"
        )


def _run_role(role: str, arguments: dict[str, str], flags: list[str]) -> None:
    """Run a role as a child that writes the result to our stdout, and take over its exit code."""
    commands = _module("tasks.commands")
    command = commands.guarded([*commands.role_command(role, arguments), *flags])
    with _module("tasks.scratch").own_temporary(commands.role_environment(1, "")) as environment:
        code = subprocess.run(command, env=environment, check=False).returncode
    raise typer.Exit(code if code in (EXIT_OK, EXIT_BAD_INPUT) else EXIT_FAILURE)


if __name__ == "__main__":
    main()
