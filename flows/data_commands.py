"""The commands `bessemer data ...`: files of rows become problem files. Imports what it needs when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from data_contracts.errors import InputError
    from tasks.import_problems import Import

app = typer.Typer(name="data", help="Bring your own problems.", no_args_is_help=True, rich_markup_mode=None)
SHOWN = 10
"""Refused rows printed; the quarantine file has all."""


@app.callback()
def group() -> None:
    """Bring your own problems."""


@app.command("import")
def import_rows(
    file: Annotated[str, typer.Argument(help="JSONL (also .gz), Parquet or CSV; a path or an fsspec URL.")],
    kind: Annotated[str, typer.Option("--as", help="What the rows become; 'problems' is all there is.")] = "problems",
    domain: Annotated[str, typer.Option(help="The domain whose problems they become.")] = "code",
    out: Annotated[Path | None, typer.Option(help="File to write; default: NAME.problems.jsonl here.")] = None,
    split: Annotated[str, typer.Option(help="Split of rows that name none: train or heldout.")] = "train",
    heldout_share: Annotated[float, typer.Option(min=0.0, max=0.99, help="Share of rows to hold out, by their prompts.")] = 0.0,
    check: Annotated[bool, typer.Option("--check", help="Grade every solution and a no-op in the sandbox.")] = False,
    backend: Annotated[str | None, typer.Option(help="Sandbox for --check; default: the running profile's.")] = None,
) -> None:
    """Turn rows with prompts and hidden tests into a problem file for campaign.curate.sources.

    Rows that do not fit are written to NAME.quarantine.jsonl, each with field, problem and remedy; the exit code is then 1.
    """
    from tasks.import_problems import import_problems, write_import

    if kind != "problems":
        raise typer.BadParameter(f"expected problems, got '{kind}'", param_hint="--as")
    if split not in ("train", "heldout"):
        raise typer.BadParameter(f"expected train or heldout, got '{split}'", param_hint="--split")
    done = import_problems(file, domain=domain, split="heldout" if split == "heldout" else "train", heldout_share=heldout_share)
    if check:
        done = done.without(_proven(done, backend))
    name = Path(file.split("?")[0]).name.partition(".")[0]
    written = write_import(done, out or Path(f"{name}.problems.jsonl"))
    trust: dict[str, int] = {}
    for problem in done.problems:
        trust[problem.verifier.trust] = trust.get(problem.verifier.trust, 0) + 1
    levels = ", ".join(f"{count} {level}" for level, count in sorted(trust.items())) or "none"
    typer.echo(f"{len(done.problems)} problems in {written.problems} (trust: {levels})")
    unsolved = sum(not problem.metadata.get("solution") for problem in done.problems)
    if unsolved:
        typer.echo(f"{unsolved} of them have no solution: nothing shows that they can be solved")
    if not check and done.problems:
        typer.echo("not graded yet: add --check to grade every solution and a no-op in the sandbox")
    for one in done.refused[:SHOWN]:
        typer.echo(f"refused: {one.error}", err=True)
    if written.quarantine is not None:
        more = len(done.refused) - SHOWN
        typer.echo(f"{len(done.refused)} rows in {written.quarantine}{f' ({more} not shown)' if more > 0 else ''}", err=True)
        raise typer.Exit(1)


def _proven(done: Import, backend: str | None) -> dict[int, InputError]:
    import asyncio

    from data_contracts.config import SandboxConfig, StackConfig
    from environments.sandbox import open_backend
    from flows.stack import last_profile
    from tasks.import_problems import prove

    recorded = last_profile()
    config = (recorded.stack if recorded else StackConfig()).sandbox
    if backend is not None:
        config = SandboxConfig.model_validate(config.model_dump() | {"backend": backend})
    opened = open_backend(config)

    def show(count: int) -> None:
        if count % 20 == 0 or count == len(done.problems):
            typer.echo(f"graded {count} of {len(done.problems)}", err=True)

    async def run() -> dict[int, InputError]:
        await opened.check()
        try:
            return await prove(done, opened, progress=show)
        finally:
            await opened.close()

    return asyncio.run(run())
