"""Every conformance check against every backend that offers what it needs; and the suite itself, held to what it says."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable

import pytest

from data_contracts.errors import ConfigError, InfraError
from environments.sandbox.base import CONTRACT, ISOLATION, SERVICES, Backend
from environments.sandbox.bubblewrap import BubblewrapBackend
from environments.sandbox.conformance.check import Check, Outcome, check, holds, same
from environments.sandbox.conformance.lab import Lab, sh
from environments.sandbox.conformance.suite import checks, run_check, run_checks
from environments.sandbox.docker import DockerBackend
from environments.sandbox.fake import FakeBackend
from tests.conformance.table import PAGE

BACKENDS: tuple[type[Backend], ...] = (BubblewrapBackend, DockerBackend, FakeBackend)
ROWS = [
    pytest.param(kind.name, item, id=f"{kind.name}-{item.name}")
    for kind in BACKENDS
    for item in checks()
    if set(item.needs) <= kind.capabilities
]


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest) -> Callable[[Backend], dict[str, Outcome]]:
    """Outcomes by name of the checks that this session selected for a backend, all run at once as the command does."""

    @functools.cache
    def of(backend: Backend) -> dict[str, Outcome]:
        marks = [
            item.callspec.params
            for item in request.session.items
            if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        ]
        chosen = [row["item"] for row in marks if row.get("backend") == backend.name and "item" in row]
        return {outcome.name: outcome for outcome in asyncio.run(run_checks(Lab(backend), chosen))}

    return of


@pytest.mark.parametrize(("backend", "item"), ROWS, indirect=["backend"])
def test_conformance(backend: Backend, item: Check, outcomes: Callable[[Backend], dict[str, Outcome]]) -> None:
    outcome = outcomes(backend)[item.name]
    assert (outcome.status, outcome.reason) == ("pass", ""), f"{item.shows} {outcome.reason}"


def test_there_are_many_checks_and_each_says_what_it_shows() -> None:
    found = checks()
    assert len(found) >= 60
    assert len({item.name for item in found}) == len(found)
    assert all(item.shows.endswith(".") and set(item.needs) <= CONTRACT | ISOLATION | {SERVICES} for item in found)
    for real in (BubblewrapBackend, DockerBackend):
        assert all(set(item.needs) <= real.capabilities for item in found)


def test_checks_are_chosen_by_name_and_by_theme() -> None:
    assert [item.name for item in checks(["exits.codes"])] == ["exits.codes"]
    assert {item.theme for item in checks(["network", "exits.codes"])} == {"exits", "network"}
    with pytest.raises(ConfigError, match=r"no check 'exits\.nonsense'.*streams, exits"):
        checks(["exits.nonsense"])


class Boastful(FakeBackend):
    """Claims to isolate and does not."""

    capabilities = CONTRACT | ISOLATION


READS_ONLY = (
    "network.interfaces",
    "identity.not_root",
    "identity.own_namespaces",
    "host.canary_in_home",
    "host.invisible_processes",
)
"""Checks that do no harm where nothing isolates."""


async def test_a_backend_that_only_claims_to_isolate_fails() -> None:
    backend = Boastful()
    outcomes = await run_checks(Lab(backend), checks(READS_ONLY))
    assert {outcome.name: outcome.status for outcome in outcomes} == dict.fromkeys(READS_ONLY, "fail")
    bombs = await run_checks(Lab(backend), checks(["hostile.kills_init", "limits.fork_bomb"]))
    assert all("nothing hostile is run" in outcome.reason for outcome in bombs)
    await backend.close()


@check("exec")
async def fine(lab: Lab) -> None:
    """Passes."""
    async with lab.box() as box:
        same((await sh(box, "echo x")).stdout, b"x\n", "stdout")


@check("exec")
async def wrong(lab: Lab) -> None:
    """Fails."""
    async with lab.box() as box:
        same((await sh(box, "echo x")).stdout, b"y" * 5000, "stdout")


@check("exec")
async def broken(lab: Lab) -> None:
    """Meets an outage."""
    raise InfraError("sandbox_backend", "the engine is down")


@check("exec")
async def surprised(lab: Lab) -> None:
    """Meets an error that no backend may raise."""
    raise ZeroDivisionError("what")


@check("exec", alone=True)
async def slow(lab: Lab) -> None:
    """Never ends."""
    async with lab.box() as box:
        await sh(box, "sleep 60", seconds=60.0)
        holds(False, "it ended")


@check("exec", "no_network", "oom")
async def beyond(lab: Lab) -> None:
    """Needs more."""


async def test_every_end_of_a_check_is_an_outcome_with_a_reason(fake_backend: Backend) -> None:
    lab, told = Lab(fake_backend), []
    outcomes = await run_checks(lab, (fine, wrong, broken, surprised, beyond), done=lambda outcome: told.append(outcome.name))
    assert sorted(told) == sorted(outcome.name for outcome in outcomes)
    assert [outcome.status for outcome in outcomes] == ["pass", "fail", "fail", "fail", "skip"]
    reasons = [outcome.reason for outcome in outcomes]
    assert reasons[0] == ""
    assert reasons[1].startswith("stdout: expected b'yyyy")
    assert reasons[1].endswith("found b'x\\n'")
    assert len(reasons[1]) < 300
    assert reasons[2] == "InfraError: sandbox_backend: the engine is down"
    assert reasons[3] == "ZeroDivisionError escaped, which is no error of the contract: what"
    assert reasons[4] == "the backend 'fake' does not offer no_network, oom"
    late: Outcome = await run_check(slow, lab, seconds=0.5)
    assert (late.status, late.reason) == ("fail", "did not end within 0.5 s")
    assert not fake_backend.boxes


async def test_checks_that_count_run_alone(fake_backend: Backend) -> None:
    running: set[str] = set()
    together: list[int] = []

    def one(name: str, *, alone: bool) -> Check:
        async def run(lab: Lab) -> None:
            running.add(name)
            await asyncio.sleep(0.05)
            together.append(len(running) if alone else 0)
            running.discard(name)

        return Check(name, "Runs.", (), alone, run)

    chosen = [one("a.1", alone=True), one("a.2", alone=False), one("a.3", alone=False), one("a.4", alone=True)]
    outcomes = await run_checks(Lab(fake_backend), chosen)
    assert [outcome.name for outcome in outcomes] == ["a.1", "a.2", "a.3", "a.4"]
    assert together == [0, 0, 1, 1]


def test_the_page_of_outcomes_has_every_check() -> None:
    """docs/results/conformance.md is what a stranger reads; it may not fall behind the checks."""
    rows = re.findall(r"^\| `([a-z_.0-9]+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert rows == [item.name for item in checks()], "run: python -m tests.conformance.table"
