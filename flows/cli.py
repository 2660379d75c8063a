"""The command `bessemer`. Every command imports what it needs when it runs, so that --help answers at once.

Exit codes: 0 done, 2 a mistake or a failure that Bessemer names (one readable line on stderr, no traceback unless --debug),
3 the campaign is held by another run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows import data_commands, grade_commands
from flows.bench_commands import bench_app
from flows.domain_commands import domains_app
from flows.sandbox_commands import sandbox_app

if TYPE_CHECKING:
    from rich.console import Console

    from infra.supervisor import ProcessState, StackState

app = typer.Typer(
    name="bessemer",
    help="Post-training for large language models: schedule, act in sandboxes, verify, train, prove, promote.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench_app)
app.add_typer(domains_app)
app.add_typer(sandbox_app)
app.add_typer(data_commands.app)
ProfileName = Annotated[
    str, typer.Option("--profile", "-p", help="Name of a file in flows/profiles, or a path to a YAML file.")
]
CampaignName = Annotated[str, typer.Option("--campaign", "-c", help="Name of the campaign; calling again resumes it.")]
Iterations = Annotated[
    int | None, typer.Option("--iterations", "-n", min=1, help="Advance by so many; default: up to its end.")
]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override one value: dotted.path=value. May be repeated.")]
DEFAULT_PROFILE = "demo"


@app.callback()
def options(
    home: Annotated[Path | None, typer.Option(help="State folder; default: $BESSEMER_HOME, else .bessemer here.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    if home is not None:
        os.environ["BESSEMER_HOME"] = str(home.resolve())
    if debug:
        os.environ["BESSEMER_DEBUG"] = "1"


@app.command()
def up(profile: ProfileName = DEFAULT_PROFILE, overrides: Overrides = None) -> None:
    """Start the local stack (Prefect, MLflow, Dask, engine, trainer) and print its addresses. Running parts are reused."""
    from data_contracts.profiles import load_profile
    from flows.stack import start

    state = start(load_profile(profile, overrides or ()), on_change=_progress_line(_console(stderr=True)))
    _print_stack(_console(), state)


@app.command()
def down() -> None:
    """End the local stack and everything it started."""
    from infra import stack
    from infra.paths import home

    typer.echo("the stack is down" if stack.down(home()) else "no stack was running")


@app.command()
def status() -> None:
    """Processes of the local stack, and the campaigns in the store."""
    from flows.overview import campaign_table
    from infra import stack
    from infra.paths import home

    console = _console()
    state = stack.running(home())
    if state is None:
        console.print(f"no stack is running in {home()}; start one with `bessemer up`", soft_wrap=True)
    else:
        _print_stack(console, state)
    console.print(campaign_table())


@app.command()
def run(
    campaign: CampaignName,
    profile: ProfileName = DEFAULT_PROFILE,
    iterations: Iterations = None,
    overrides: Overrides = None,
) -> None:
    """Advance a campaign here and now, through the same Prefect flow that schedules use. Starts the stack when needed."""
    from flows.run import run_here

    run_here(profile, campaign, iterations=iterations, overrides=overrides or [], console=_console())


@app.command()
def resume(
    campaign: Annotated[str, typer.Argument(help="Name of an existing campaign.")],
    iterations: Iterations = None,
    overrides: Overrides = None,
) -> None:
    """Continue a campaign where its ledger ends, with the profile it was started with."""
    from flows.overview import origin_of
    from flows.run import run_here

    origin = origin_of(campaign)
    chosen = [*origin.overrides, *(overrides or [])]
    run_here(origin.profile, campaign, iterations=iterations, overrides=chosen, console=_console())


@app.command()
def deploy(
    file: Annotated[Path, typer.Option("--file", "-f", help="Deployments and schedules.")] = Path("prefect.yaml"),
    notify: Annotated[str | None, typer.Option(help="Prefect notification block for alerts: TYPE/NAME.")] = None,
) -> None:
    """Make Prefect hold exactly the deployments and schedules of prefect.yaml, and install our automations."""
    from flows.deploy import deploy as apply
    from flows.stack import use_running_prefect

    heartbeat = use_running_prefect()
    done = apply(file, heartbeat_seconds=heartbeat, notify=notify)
    for line in done.deployments:
        typer.echo(f"deployed            {line}")
    for line in done.removed_deployments:
        typer.echo(f"removed deployment  {line}")
    for line in done.removed_schedules:
        typer.echo(f"removed schedule    {line}")
    for name, outcome in done.automations.items():
        typer.echo(f"automation          {name}: {outcome}")


@app.command()
def show(
    episode: Annotated[str, typer.Argument(help="Episode id, as in tables, traces and logs.")],
    store: Annotated[str, typer.Option(help="Folder or URL of the store; default: the local one.")] = "",
) -> None:
    """Render an episode readably: turns, tool calls, errors, tests, reward components."""
    from flows import show as view
    from flows.overview import open_local_store, reward_config

    opened = open_local_store(store)
    found, group = view.find_episode(opened, episode)
    _console().print(view.render(found, view.score_of(found, group, reward_config(opened, found.campaign))))


@app.command()
def gc(
    campaign: Annotated[str | None, typer.Argument(help="Only this campaign; default: all.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove checkpoints that retention does not keep; never what ledger or registry names."""
    from flows.overview import collect_garbage

    for line in collect_garbage(campaign, dry_run=dry_run):
        typer.echo(line)


@app.command()
def doctor() -> None:
    """Say what is missing on this machine and the command that fixes it."""
    from flows.overview import doctor_table

    table, healthy = doctor_table()
    _console().print(table)
    if not healthy:
        raise typer.Exit(1)


grade_commands.register(app)


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def _progress_line(console: Console) -> Callable[[ProcessState], None]:
    import time

    start = time.monotonic()

    def line(process: ProcessState) -> None:
        detail = f" ({process.detail})" if process.detail else ""
        console.print(f"{time.monotonic() - start:6.1f} s  {process.name:<15} {process.state}{detail}", soft_wrap=True)

    return line


def _print_stack(console: Console, state: StackState) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("process", "state", "address", "pid", "restarts"):
        table.add_column(column, no_wrap=True)
    for process in state.processes:
        row = (process.name, process.state, process.address, str(process.pid or ""), str(process.restarts))
        table.add_row(*row)
    console.print(table)
    console.print(f"logs: {state.home}/logs", soft_wrap=True, markup=False)


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command. Raises SystemExit."""
    from data_contracts.errors import BessemerError, CampaignHeld

    arguments: Any = sys.argv[1:] if argv is None else argv
    try:
        app(args=arguments)
    except BessemerError as error:
        if os.environ.get("BESSEMER_DEBUG") or "--debug" in arguments:
            raise
        typer.echo(f"bessemer: {error}", err=True)
        raise SystemExit(3 if isinstance(error, CampaignHeld) else 2) from None


if __name__ == "__main__":
    main()
