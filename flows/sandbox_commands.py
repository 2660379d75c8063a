"""`bessemer sandbox ...`: whether the sandboxes of this host hold what they promise, shown check by check.

Imports what it needs when it runs, as cli.py does. Exit codes: 0 all checks passed or were skipped, 1 one failed, 2 the backend
cannot be used here at all (one line says what is missing).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, get_args

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from data_contracts.config import SandboxConfig
    from environments.sandbox.conformance.check import Check, Outcome

sandbox_app = typer.Typer(name="sandbox", help="Sandboxes of this host.", no_args_is_help=True, rich_markup_mode=None)
COMMANDS_AT_ONCE = 16
"""More than all checks that run at once need: a check that queues behind another would measure the queue."""


@sandbox_app.callback()
def group() -> None:
    """Sandboxes of this host: hold them to their contract."""


@sandbox_app.command()
def check(
    names: Annotated[list[str] | None, typer.Argument(help="Only these checks or themes; default: all.")] = None,
    backend: Annotated[
        str | None, typer.Option("--backend", "-b", help="bubblewrap, docker or fake; default: the configured one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line a check: name, status, reason.")] = False,
) -> None:
    """Run the conformance checks against a sandbox backend of this host and print the table. Exit code 1 if one fails."""
    from rich.console import Console

    from environments.sandbox.conformance import suite

    outcomes = asyncio.run(_run(chosen_config(backend), suite.checks(names or ()), as_json=as_json))
    if not as_json:
        print_table(Console(highlight=False), suite.checks(names or ()), outcomes)
    if any(outcome.status == "fail" for outcome in outcomes):
        raise typer.Exit(1)


def chosen_config(backend: str | None) -> SandboxConfig:
    """The sandboxes of the running stack's profile, with another backend if one is named. Raises ConfigError."""
    from data_contracts.config import SandboxConfig, StackConfig
    from data_contracts.errors import ConfigError
    from flows.stack import last_profile

    recorded = last_profile()
    found = (recorded.stack if recorded else StackConfig()).sandbox
    known = get_args(SandboxConfig.model_fields["backend"].annotation)
    if backend is not None and backend not in known:
        raise ConfigError(
            f"there is no sandbox backend '{backend}'", field="--backend", remedy=f"Name one of {', '.join(known)}"
        )
    return found.model_copy(update={"backend": backend or found.backend, "concurrency": COMMANDS_AT_ONCE})


async def _run(config: SandboxConfig, chosen: Sequence[Check], *, as_json: bool) -> list[Outcome]:
    """With a progress bar on the terminal, or a line of JSON as each check ends."""
    from pathlib import Path

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from environments.sandbox import open_backend
    from environments.sandbox.conformance.lab import Lab
    from environments.sandbox.conformance.suite import run_checks
    from flows.overview import open_local_store

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    root = open_local_store().root
    store = None if "://" in root else Path(root)
    backend = open_backend(config)
    try:
        await backend.check()
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task(config.backend, total=len(chosen))

            def started(item: Check) -> None:
                progress.update(bar, description=f"{config.backend}: {item.name}")

            def done(outcome: Outcome) -> None:
                progress.advance(bar)
                if as_json:
                    row = {"name": outcome.name, "status": outcome.status, "reason": outcome.reason}
                    sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
                    sys.stdout.flush()

            return await run_checks(Lab(backend, store=store), chosen, started=started, done=done)
    finally:
        await backend.close()


def print_table(console: Console, chosen: Sequence[Check], outcomes: Sequence[Outcome]) -> None:
    """One row a check, with what it shows or why it did not; then the counts."""
    from rich.text import Text

    table = _table()
    colours = {"pass": "green", "fail": "bold red", "skip": "yellow"}
    shown = {item.name: item.shows for item in chosen}
    for outcome in outcomes:
        state = Text(outcome.status, style=colours[outcome.status])
        table.add_row(outcome.name, state, f"{outcome.seconds:.1f}", Text(outcome.reason or shown[outcome.name]))
    console.print(table)
    count = {status: sum(outcome.status == status for outcome in outcomes) for status in colours}
    console.print(f"{count['pass']} passed, {count['fail']} failed, {count['skip']} skipped", soft_wrap=True)


def _table() -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("state")
    table.add_column("s", justify="right")
    table.add_column("what is shown, or why not", overflow="fold")
    return table
