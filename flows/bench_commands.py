"""`bessemer bench`: figures of this machine against the bars that the project has set itself.

A bench prints a table, writes its figures as JSON where asked, and exits 1 below a bar. The measurements are in
environments/sandbox/bench.py; here are the bars, and how figures become rows.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from environments.sandbox.bench import Rate
    from environments.sandbox.bubblewrap import BubblewrapBackend
    from environments.sandbox.docker import DockerBackend

bench_app = typer.Typer(
    name="bench", help="Measure this machine against Bessemer's bars.", no_args_is_help=True, rich_markup_mode=None
)

ALIVE, IN_A_ROW, KILLED, WARM = 200, 2000, 50, 4
PARTS = ("fresh", "warm", "turn", "alive", "endurance", "reaper")


class Bar(NamedTuple):
    """What a figure must reach (`at_least`) or may not exceed."""

    limit: float
    at_least: bool
    unit: str

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.limit:g}{self.unit}"


BARS = {
    "cases: bubblewrap against docker run": Bar(10.0, True, "x"),
    "pytest, 3 tests: bubblewrap against docker run": Bar(2.5, True, "x"),
    "warm Docker pool: median latency against docker run": Bar(3.0, True, "x"),
    "warm Docker pool: sustained rate against docker run": Bar(1.0, True, "x"),
    "turn of a stateful session, median": Bar(5.0, False, " ms"),
    f"errors with {ALIVE} sandboxes alive": Bar(0, False, ""),
    f"kinds of traces left by {IN_A_ROW} verdicts": Bar(0, False, ""),
    f"growth of memory over {IN_A_ROW} verdicts": Bar(5.0, False, " %"),
    f"bubblewrap: removing {KILLED} boxes of a killed owner": Bar(30.0, False, " s"),
    f"docker: removing {KILLED} boxes of a killed owner": Bar(30.0, False, " s"),
    "boxes of a killed owner that stay": Bar(0, False, ""),
    "boxes of others that a sweep harmed": Bar(0, False, ""),
}


class Check(NamedTuple):
    """One row of the result: `value` is None where this machine has nothing to measure."""

    name: str
    value: float | None
    reason: str

    @property
    def status(self) -> str:
        return "skip" if self.value is None else "pass" if BARS[self.name].holds(self.value) else "fail"


@bench_app.command()
def sandbox(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures and checks to this file.")] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="Length of each measured loop.")] = 12.0,
    only: Annotated[list[str] | None, typer.Option(help=f"Only these parts: {', '.join(PARTS)}. May be repeated.")] = None,
) -> None:
    """Sandboxes against `docker run --rm`: verdicts a second, latency, CPU, concurrency, what stays behind, a killed owner.

    Needs bubblewrap and Docker (`python -m infra.rootfs --docker`), takes about five minutes, and wants a quiet machine.
    """
    from rich.console import Console
    from rich.table import Table

    if unknown := sorted(set(only or []) - set(PARTS)):
        raise typer.BadParameter(f"expected some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    console = Console(highlight=False)
    load = os.getloadavg()[0]
    checks, figures = asyncio.run(_measure(set(only or PARTS), seconds, lambda text: typer.echo(text, err=True)))
    table = Table(box=None, pad_edge=False)
    for column in ("check", "value", "bar", "state", "seen"):
        table.add_column(column, overflow="fold")
    for check in checks:
        bar = BARS[check.name]
        value = "" if check.value is None else f"{check.value:.2f}".rstrip("0").rstrip(".") + bar.unit
        table.add_row(check.name, value, str(bar), check.status, check.reason)
    console.print(table)
    good = all(check.status != "fail" for check in checks)
    if json_file is not None:
        rows = [
            {"name": c.name, "status": c.status, "reason": c.reason, "value": c.value, "bar": str(BARS[c.name])} for c in checks
        ]
        about = {"cores": len(os.sched_getaffinity(0)), "kernel": platform.release(), "load_average_before": load}
        json_file.write_text(json.dumps({"ok": good, "machine": about, "figures": figures, "checks": rows}, indent=2) + "\n")
    if not good:
        raise typer.Exit(1)


class Bench(NamedTuple):
    """What the parts share."""

    fast: BubblewrapBackend
    docker: DockerBackend
    seconds: float
    figures: dict[str, Any]


async def _measure(parts: set[str], seconds: float, say: Callable[[str], None]) -> tuple[list[Check], dict[str, Any]]:
    from environments.sandbox.bubblewrap import BubblewrapBackend
    from environments.sandbox.docker import DockerBackend

    checks: list[Check] = []
    bench = Bench(BubblewrapBackend(concurrency=8), DockerBackend(concurrency=8), seconds, {})
    try:
        await bench.fast.check()
        await bench.docker.check()
        bench.figures["docker"] = (await bench.docker.run(bench.docker.client.version)).get("Version")
        for part in (part for part in PARTS if part in parts):
            say(f"measuring: {part}")
            checks += await _PARTS[part](bench)
    finally:
        await bench.fast.close()
        await bench.docker.close()
    return checks, bench.figures


async def _fresh(bench: Bench) -> list[Check]:
    from environments.sandbox.bench import WORK, rate, verdict
    from environments.sandbox.docker_run import DockerRun

    checks, names = [], [name for name in BARS if ": bubblewrap against" in name]
    for work, name in zip(WORK, names, strict=True):
        slow = await rate(verdict(work, DockerRun()), seconds=bench.seconds)
        fast = await rate(verdict(work, bench.fast), seconds=bench.seconds)
        bench.figures[work] = {"docker run --rm": slow._asdict(), "bubblewrap": fast._asdict()}
        checks.append(Check(name, fast.per_second / slow.per_second, _two_rates("bubblewrap", fast, slow)))
    return checks


def _two_rates(name: str, rate: Rate, yardstick: Rate) -> str:
    return (
        f"{name} {rate.per_second:.1f}/s at {rate.cpu_seconds * 1000:.0f} ms of CPU, docker run --rm"
        f" {yardstick.per_second:.2f}/s at {yardstick.cpu_seconds * 1000:.0f} ms"
    )


async def _warm(bench: Bench) -> list[Check]:
    from data_contracts.records import SandboxSpec
    from environments.sandbox.bench import latency, rate, verdict
    from environments.sandbox.docker_run import DockerRun
    from environments.sandbox.pool import WarmBackend

    yardstick, pool = verdict("cases", DockerRun()), WarmBackend(bench.docker, warm=WARM)
    await pool.prepare(SandboxSpec())
    warm = verdict("cases", pool)
    slow = await rate(yardstick, seconds=bench.seconds)
    fast = await rate(warm, seconds=bench.seconds)
    half = slow.per_second / 2
    await pool.prepare(SandboxSpec())
    waits = [await latency(call, per_second=half, seconds=bench.seconds) for call in (yardstick, warm)]
    await pool.drain()
    bench.figures["warm"] = {
        "docker run --rm": slow._asdict() | {"median_seconds": waits[0]}, "pool": fast._asdict() | {"median_seconds": waits[1]},
        "requests_per_second": half,
    }  # fmt: skip
    medians = f"{waits[1] * 1000:.0f} ms against {waits[0] * 1000:.0f} ms at {half:.1f} requests/s"
    return [
        Check("warm Docker pool: median latency against docker run", waits[0] / waits[1], medians),
        Check(
            "warm Docker pool: sustained rate against docker run",
            fast.per_second / slow.per_second,
            _two_rates("pool", fast, slow),
        ),
    ]


async def _turn(bench: Bench) -> list[Check]:
    from environments.sandbox.bench import turns

    name, found = "turn of a stateful session, median", await turns(bench.fast, 200)
    bench.figures["turn_seconds"] = found
    return [Check(name, found * 1000, "200 assignments in one shell of a bubblewrap box")]


async def _alive(bench: Bench) -> list[Check]:
    from environments.sandbox.bench import together

    took, errors = await together(bench.fast, ALIVE)
    bench.figures["alive"] = {"seconds": took, "errors": errors}
    seen = errors[0] if errors else f"made and used twice in {took:.1f} s"
    return [Check(f"errors with {ALIVE} sandboxes alive", len(errors), seen)]


async def _endurance(bench: Bench) -> list[Check]:
    from environments.sandbox.bench import endurance

    found = await endurance(bench.fast, IN_A_ROW, bench.docker.client)
    bench.figures["endurance"] = found._asdict()
    return [
        Check(
            f"kinds of traces left by {IN_A_ROW} verdicts",
            len(found.left),
            ", ".join(found.left) or f"{found.per_second:.1f}/s",
        ),
        Check(f"growth of memory over {IN_A_ROW} verdicts", found.growth * 100, "resident memory of the owner"),
    ]


async def _reaper(bench: Bench) -> list[Check]:
    from environments.sandbox.bench import reap_after_kill

    checks, left, harmed = [], 0, 0
    for kind, backend in (("bubblewrap", bench.fast), ("docker", bench.docker)):
        found = await reap_after_kill(kind, KILLED, backend)
        bench.figures[f"reaper, {kind}"] = found._asdict()
        seen = f"{found.boxes} boxes, {found.left} left"
        # A sweep that found nothing to sweep would prove nothing.
        took = found.seconds if found.boxes == KILLED else float("inf")
        checks.append(Check(f"{kind}: removing {KILLED} boxes of a killed owner", took, seen))
        left, harmed = left + found.left, harmed + (not found.bystander)
    checks.append(Check("boxes of a killed owner that stay", left, "counted after the sweep"))
    checks.append(Check("boxes of others that a sweep harmed", harmed, "a box of this process ran a command after each sweep"))
    return checks


_PARTS: dict[str, Callable[[Bench], Awaitable[list[Check]]]] = {
    "fresh": _fresh, "warm": _warm, "turn": _turn, "alive": _alive, "endurance": _endurance, "reaper": _reaper,
}  # fmt: skip
