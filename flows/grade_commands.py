"""`bessemer grade` and `bessemer regrade`: arguments, progress, tables and JSON lines around tasks/grade.py and regrade.py.

Exit codes: 0 when everything was graded, whatever the rewards; 2 when a row could not be graded (it is named), or for a
mistake. Results go to standard output, everything else to standard error. With `--json` the output holds one line a row and
nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress

    from data_contracts.config import SandboxConfig
    from data_contracts.records import Problem
    from environments.sandbox.base import Backend
    from tasks.grade import Graded, Solution
    from tasks.regrade import Regraded

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line, and nothing else on standard output.")]
ProfileName = Annotated[
    str,
    typer.Option(
        "--profile", "-p", help="Profile whose stack.sandbox is used; default: the running stack's, else the default."
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override one value, for example stack.sandbox.backend=docker.")
]
Seconds = Annotated[float, typer.Option("--seconds", min=1.0, help="Deadline of one grading.")]
ProblemsFile = Annotated[Path | None, typer.Option("--problems", help="Problems as JSON lines (CSV, Parquet).")]


def register(app: typer.Typer) -> None:
    """Add both commands."""
    app.command(name="grade")(grade)
    app.command(name="regrade")(regrade)


def grade(
    domain: Annotated[str | None, typer.Option("--domain", "-d", help="Where the problem comes from.")] = None,
    problem: Annotated[str | None, typer.Option("--problem", help="Its id.")] = None,
    solution: Annotated[Path | None, typer.Option("--solution", help="A file, or a folder with the collected files.")] = None,
    answer: Annotated[str | None, typer.Option("--answer", help="The policy's final message.")] = None,
    calls: Annotated[
        Path | None, typer.Option("--calls", help='Tool calls before --answer: a JSON file with [{"name", "arguments"}, ...].')
    ] = None,
    problems: ProblemsFile = None,
    solutions: Annotated[
        Path | None, typer.Option("--solutions", help='JSON lines of {"problem_id", "solution": text, {name: text} or calls}.')
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the domain's problems, when the id is not found.")] = 0,
    seconds: Seconds = 60.0,
    profile: ProfileName = "",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Grade one candidate (--problem with --solution, --answer or --calls), or a file of them (--solutions). No model."""
    import asyncio

    from data_contracts.errors import InputError

    if solutions is not None:
        if solution or answer is not None or problem or calls:
            raise InputError(
                "--solutions grades a batch", field="solutions", remedy="Leave --problem, --solution, --calls and --answer out"
            )
        config = _sandbox(profile, overrides)
        good = asyncio.run(
            _grade_batch(domain, problems, solutions, config=config, seed=seed, seconds=seconds, as_json=as_json)
        )
    else:
        if problem is None or (solution is None) == (answer is None and calls is None):
            raise InputError(
                "say what to grade",
                field="problem",
                remedy="Give --problem ID and one of --solution and --answer (or --calls), or --solutions FILE",
            )
        posed = _one_problem(domain, problems, problem, seed=seed)
        config = _sandbox(profile, overrides)
        good = asyncio.run(_grade_one(posed, solution, answer, calls, config=config, seconds=seconds, as_json=as_json))
    if not good:
        raise typer.Exit(2)


def regrade(
    run: Annotated[str, typer.Argument(help="CAMPAIGN, CAMPAIGN/ITERATION, or CAMPAIGN/evaluations/VERSION.")],
    verifier: Annotated[
        str | None, typer.Option("--verifier", help="Another kind, or a .json file with fields of the verifier to replace.")
    ] = None,
    problems: ProblemsFile = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show episodes that did not change, too.")] = False,
    seconds: Seconds = 60.0,
    store: Annotated[str, typer.Option(help="Folder or URL of the store; default: the local one.")] = "",
    profile: ProfileName = "",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Grade and score stored episodes again and show what changed. Writes nothing."""
    import asyncio

    from flows.overview import campaign_state, open_local_store
    from tasks.regrade import batches, read_change, reward_of

    opened = open_local_store(store)
    state = campaign_state(opened, run.strip("/").split("/")[0])
    found = batches(opened, state, run)
    change = read_change(verifier, _problems_of(problems, ()) if problems else {})

    async def regrade_all() -> list[Regraded]:
        from tasks.grade import Boxes
        from tasks.regrade import regrade as again

        config = _sandbox(profile, overrides)
        boxes = Boxes(_backend(config))
        total = sum(ref.rows for ref in (batch.episodes for batch in found))
        rows: list[Regraded] = []
        try:
            with _progress(quiet=as_json) as bar:
                task = bar.add_task("episodes", total=total)
                async for group in again(
                    found, store=opened, reward=reward_of(state), backend=boxes, concurrency=config.concurrency, change=change,
                    seconds=seconds,
                ):  # fmt: skip
                    rows += group
                    bar.update(task, completed=min(len(rows), total))
                    if as_json:
                        _write_json(*group)
        finally:
            await boxes.close()
        return rows

    rows = asyncio.run(regrade_all())
    if not as_json:
        _print_changes(rows, show_all=show_all)


# ------------------------------------------------------------------------------------------------------------------ grading


async def _grade_one(
    posed: Problem,
    path: Path | None,
    answer: str | None,
    calls: Path | None,
    *,
    config: SandboxConfig,
    seconds: float,
    as_json: bool,
) -> bool:
    from tasks.grade import Boxes, grade
    from tasks.grade_inputs import read_calls, read_solution

    solution: Solution = answer or ""
    if calls is not None:
        solution = read_calls(calls, posed, answer=answer)
    elif path is not None:
        solution = read_solution(path, posed)
    boxes = Boxes(_backend(config))
    try:
        row = await grade(posed, solution, backend=boxes, seconds=seconds)
    finally:
        await boxes.close()
    if as_json:
        _write_json(row)
    else:
        _console().print(_verdict(row))
    return row.outcome in ("scored", "policy_failure")


async def _grade_batch(
    domain: str | None,
    problems: Path | None,
    solutions: Path,
    *,
    config: SandboxConfig,
    seed: int,
    seconds: float,
    as_json: bool,
) -> bool:
    from tasks.grade import Boxes, grade_all
    from tasks.grade_inputs import read_lines, read_solutions

    lines = read_lines(solutions)
    known = _problems_of(problems, (domain,) if domain else ()) if problems else _own_problems(domain, lines, seed=seed)
    boxes = Boxes(_backend(config))
    outcomes: dict[str, int] = {}
    rewards: list[float] = []
    try:
        with _progress(quiet=as_json) as bar:
            out = bar.console if sys.stdout.isatty() and not bar.disable else _console()
            task = bar.add_task("solutions", total=sum(1 for line in lines if line.strip()))
            jobs = read_solutions(str(solutions), lines, known)
            async for row in grade_all(jobs, backend=boxes, concurrency=config.concurrency, seconds=seconds):
                bar.advance(task)
                outcomes[row.outcome] = outcomes.get(row.outcome, 0) + 1
                rewards += [row.reward] if row.reward is not None else []
                if row.reward is None:
                    typer.echo(f"bessemer: {row.evidence}", err=True)
                if as_json:
                    _write_json(row)
                elif row.reward is not None:
                    out.print(_line(row), soft_wrap=True)
    finally:
        await boxes.close()
    if not as_json:
        mean = (
            f"; mean reward {sum(rewards) / len(rewards):.3f}, {sum(r >= 1 for r in rewards)} with all of it" if rewards else ""
        )
        typer.echo(", ".join(f"{count} {name}" for name, count in outcomes.items()) + mean, err=True)
    return not set(outcomes) & {"invalid", "infra_failure"}


def _one_problem(domain: str | None, file: Path | None, name: str, *, seed: int) -> Problem:
    from data_contracts.errors import InputError
    from environments import registry
    from tasks.grade_inputs import require_problem

    if file is not None:
        known = _problems_of(file, (domain,) if domain else ())
        if name not in known:
            raise InputError(f"holds no problem '{name}'", file=str(file), field="id", remedy="Give the id of one of its rows")
        return known[name]
    return require_problem(registry.domain(domain or name.split("/")[0]), name, seed=seed)


def _problems_of(file: Path, more: tuple[str, ...]) -> Mapping[str, Problem]:
    """The problems of a file by id; what is wrong with others is said and does not stop them."""
    from data_contracts.errors import InputError
    from environments.registry import domain_names
    from tasks.sources import read_each

    found, wrong = read_each(str(file), domains=(*domain_names(), *more))
    for error in wrong:
        typer.echo(f"bessemer: {error}", err=True)
    if not found:
        raise wrong[0] if wrong else InputError("has no problems", file=str(file), remedy="Write at least one row")
    return found


def _own_problems(domain: str | None, lines: list[bytes], *, seed: int) -> Mapping[str, Problem]:
    """The domain's own problems that a solutions file names."""
    from data_contracts.errors import InputError
    from environments import registry
    from tasks.grade_inputs import find_problems, id_of

    if domain is None:
        raise InputError(
            "nothing says where the problems are", field="problems", remedy="Give --problems FILE or --domain NAME"
        )
    return find_problems(registry.domain(domain), {name for line in lines if (name := id_of(line))}, seed=seed)


def _sandbox(profile: str, overrides: list[str] | None) -> SandboxConfig:
    """stack.sandbox of the named profile, else of the running stack's, else the default."""
    from data_contracts.config import StackConfig
    from data_contracts.profiles import load_profile
    from flows.stack import last_profile

    if profile or overrides:
        return load_profile(profile or "demo", overrides or ()).stack.sandbox
    recorded = last_profile()
    return (recorded.stack if recorded else StackConfig()).sandbox


def _backend(config: SandboxConfig) -> Backend:
    from environments.sandbox import open_backend

    return open_backend(config)


# ------------------------------------------------------------------------------------------------------------------- output


def _write_json(*rows: Graded | Regraded) -> None:
    import msgspec

    for row in rows:
        typer.echo(msgspec.json.encode(row).decode())


def _line(row: Graded) -> RenderableType:
    from rich.text import Text

    failed = [test.id for test in row.tests if not test.passed]
    detail = f"{len(row.tests) - len(failed)}/{len(row.tests)} tests" + (f", not {', '.join(failed[:3])}" if failed else "")
    style = "green" if row.reward == 1 else "red" if not row.reward else "yellow"
    return Text(f"{row.reward or 0.0:5.3f}  {row.problem_id}  {row.outcome}  {detail}", style=style)


def _verdict(row: Graded) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 2))
    reward = "none" if row.reward is None else f"{row.reward:.3f}"
    for name, value in (
        ("problem", row.problem_id),
        ("outcome", row.outcome),
        ("reward", reward),
        ("trust", row.trust or "none"),
    ):
        head.add_row(Text(name, "bold"), Text(value))
    parts: list[RenderableType] = [head]
    if row.tests:
        table = Table(expand=True)
        for column in ("test", "passed", "message"):
            table.add_column(column, overflow="fold")
        for test in row.tests:
            table.add_row(Text(test.id), Text("yes", "green") if test.passed else Text("no", "red"), Text(test.message))
        parts.append(table)
    if row.evidence:
        parts.append(Panel(Text(row.evidence), title="evidence", title_align="left"))
    return Group(*parts)


def _print_changes(rows: list[Regraded], *, show_all: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from tasks.regrade import counts

    shown = [row for row in rows if show_all or row.result in ("changed", "not graded")]
    if shown:
        table = Table()
        for column in ("problem", "episode", "result", "old reward", "new reward", "why"):
            table.add_column(column, overflow="fold")
        for row in shown:
            rewards = ("-" if value is None else f"{value:.3f}" for value in (row.old_reward, row.new_reward))
            table.add_row(Text(row.problem_id), Text(row.episode_id), row.result, *rewards, Text(row.why))
        _console().print(table)
    found = counts(rows)
    typer.echo(", ".join(f"{found.get(name, 0)} {name}" for name in ("same", "changed", "kept", "not graded")))


def _progress(*, quiet: bool) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    off = quiet or not console.is_terminal
    return Progress(*columns, console=console, disable=off, transient=True, redirect_stdout=False)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)
