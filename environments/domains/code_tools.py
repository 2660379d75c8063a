"""File tools in a box for problems of the domain `code` that come with files: list, read, write, replace, run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data_contracts.errors import InputError
from data_contracts.records import Message
from environments.domains.code_repair import _PATH, LIST_FILES, READ_FILE, REPLACE, WRITE_FILE, CodeRepairEnvironment, _spec
from environments.tools import Tool

RUN = _spec("run", "Runs a Python file and returns what it printed.", path=_PATH)
TOOLS = (LIST_FILES, READ_FILE, WRITE_FILE, REPLACE, RUN)


class CodeFilesEnvironment(CodeRepairEnvironment):
    """One box with the row's files; a message without a call ends the episode."""

    async def reset(self) -> tuple[Message, ...]:
        spec = self.problem.environment.sandbox
        if spec is None:
            raise InputError(f"problem {self.problem.id} has no sandbox", field="environment.sandbox", remedy="Give it one")
        self._box = await self.context.acquire(spec)
        files = self.problem.environment.settings["files"]
        await self.box.put_files({name: text.encode() for name, text in files.items()})
        return self.problem.messages

    def tools(self) -> Sequence[Tool]:
        runs = (self._list, self._read, self._write, self._replace, self._run)
        return tuple(Tool(spec=spec, run=run) for spec, run in zip(TOOLS, runs, strict=True))

    async def _run(self, arguments: dict[str, Any]) -> str:
        return await self._shown("python3", "-B", arguments["path"])
