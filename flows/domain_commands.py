"""`bessemer domains ...`: what is installed, and whether its rewards may be trusted.

Imports what it needs when it runs, as cli.py does. Exit codes of `check`: 0 every domain is admitted, 1 one is not, 2 a mistake
(one line says which), or a sandbox that cannot be used here.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from data_contracts.protocols import SandboxBackend
    from environments.admission import AdmissionReport

domains_app = typer.Typer(name="domains", rich_markup_mode=None)
Names = Annotated[list[str] | None, typer.Argument(help="Only these domains; default: all that are installed.")]


@domains_app.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    """Installed domains; `domains check` proves them."""
    if context.invoked_subcommand is None:
        show_list(None)


@domains_app.command("list")
def show_list(names: Names = None) -> None:
    """Name, family, levels and trust of the installed domains."""
    from rich.console import Console

    from flows.overview import domain_table

    Console(highlight=False).print(domain_table(names or []))


@domains_app.command()
def check(
    names: Names = None,
    level: Annotated[list[str] | None, typer.Option(help="Only these levels, or 'all'. May be repeated.")] = None,
    problems: Annotated[int, typer.Option(min=2, help="Problems to try of each level.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the problems.")] = 0,
    backend: Annotated[
        str | None, typer.Option("--backend", "-b", help="bubblewrap or docker; default: the configured one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line a check: name, status, reason.")] = False,
) -> None:
    """Hold domains to their oracle (1), no-op and random policies (their floor) and exploits (0), all of it twice."""
    from environments.registry import domain, domain_names
    from environments.sandbox import open_backend
    from flows.sandbox_commands import chosen_config

    asked = level or ["default"]
    pairs = [(name, chosen) for name in names or domain_names() for chosen in _levels(domain(name).levels, asked)]
    if not pairs:
        raise typer.BadParameter(f"no such domain has the level {' or '.join(asked)}", param_hint="--level")
    boxes = open_backend(chosen_config(backend))

    async def run() -> bool:
        good = True
        await boxes.check()
        try:
            with _progress(len(pairs)) as advance:
                for name, chosen in pairs:
                    advance(f"{name}, level {chosen}")
                    if "all" in asked and not any(True for _ in domain(name).problems("train", seed=seed, level=chosen)):
                        _say_empty(name, chosen, as_json=as_json)
                        continue
                    good &= await _check(name, chosen, boxes, problems=problems, seed=seed, as_json=as_json)
        finally:
            await boxes.close()
        return good

    if not asyncio.run(run()):
        raise typer.Exit(1)


async def _check(name: str, level: str, boxes: SandboxBackend, *, problems: int, seed: int, as_json: bool) -> bool:
    from environments.admission import check_domain
    from environments.registry import domain

    report = await check_domain(domain(name), boxes, problems=problems, level=level, seed=seed)
    rows = "\n".join(_json_rows(report)) if as_json else report.table()
    sys.stdout.write(f"{rows}\n")
    sys.stdout.flush()
    return report.ok


def _say_empty(name: str, level: str, *, as_json: bool) -> None:
    reason = "this level has no problems of its own; they come from files"
    row = {"name": f"{name}/{level}", "status": "skip", "reason": reason}
    sys.stdout.write(f"{json.dumps(row) if as_json else f'{name} (level {level}): skipped, {reason}'}\n")


def _json_rows(report: AdmissionReport) -> Iterator[str]:
    for row in report.rows:
        about = {
            "name": f"{report.domain}/{report.level}/{row.check}", "status": "pass" if row.ok else "fail", "reason": row.detail,
            "trust": report.trust, "expected": row.expected, "scores": row.scores,
        }  # fmt: skip
        yield json.dumps(about, ensure_ascii=False)


def _levels(known: Iterable[str], asked: list[str]) -> list[str]:
    return [level for level in known if "all" in asked or level in asked]


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal's stderr; answers what moves it on to its next step."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=total, completed=-1)

        def advance(description: str) -> None:
            progress.update(bar, description=description, advance=1)

        yield advance
