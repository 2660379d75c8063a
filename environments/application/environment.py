"""An application as the world of an episode: its operations are the tools, its audit log and final state are what is graded.

`Collected.state`: {"answer", "calls", "seal"}; `seal` is a digest of the log and the final content. The content itself is not
stored: it follows from the calls (replay.py), and the seal says whether it did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from data_contracts.errors import InfraError, InputError
from data_contracts.records import Message, Problem
from environments.application.base import Application, Operation
from environments.application.database import MAX_CALL_CHARS, Database, seal, whole
from environments.base import Collected, Domain, Environment, EnvironmentContext
from environments.registry import domain_of
from environments.tools import Tool, ToolEnvironment


class ApplicationEnvironment(ToolEnvironment):
    """One episode with one fresh database."""

    max_argument_chars = MAX_CALL_CHARS

    def __init__(self, problem: Problem, context: EnvironmentContext, application: Application) -> None:
        super().__init__(problem, context)
        self._application = application
        self._database: Database | None = None
        self._tools: tuple[Tool, ...] = ()

    async def reset(self) -> tuple[Message, ...]:
        try:
            self._tools = tuple(map(self._tool, self._application.offered(self.problem).values()))
            self._database = await asyncio.to_thread(self._open)
        except InputError as error:  # found in a problem that was stored before the application changed
            raise InfraError("environment_error", str(error)) from error
        return await super().reset()

    def _open(self) -> Database:
        return Database(self._application, self._application.start_of(self.problem))

    def tools(self) -> Sequence[Tool]:
        return self._tools

    def _tool(self, operation: Operation) -> Tool:
        async def run(arguments: dict[str, Any]) -> Any:
            found = whole(arguments, operation.spec.parameters)
            return self._opened().call(operation, found, at=len(self._calls))

        return Tool(spec=operation.spec, run=run)

    def _opened(self) -> Database:
        if self._database is None:
            raise RuntimeError("reset() opens the database")
        return self._database

    async def collect(self) -> Collected:
        state = (await super().collect()).state
        database = self._opened()
        sealed = await asyncio.to_thread(lambda: seal(database.snapshot(), state["calls"]))
        return Collected(state={**state, "seal": sealed})

    async def close(self) -> None:
        if self._database is not None:
            self._database.close()


class ApplicationDomain(Domain):
    """A domain whose world is an application."""

    application: ClassVar[Application]

    def environment(self, problem: Problem, context: EnvironmentContext) -> Environment:
        return ApplicationEnvironment(problem, context, self.application)


def application_of(problem: Problem) -> Application:
    """The application that a problem acts on. Raises InputError where its domain has none."""
    found = domain_of(problem)
    if not isinstance(found, ApplicationDomain):
        raise InputError(
            f"domain '{problem.domain}' has no application, so there are no calls to replay", field="verifier.kind",
            remedy="Use a verifier that fits the domain, or a domain that is an ApplicationDomain",
        )  # fmt: skip
    return found.application
