"""`docker run --rm`, the yardstick of the benchmark: what most would write, with the limits that our boxes have.

Contract: a box is a folder on the host until its one command starts; the command then runs in a container of its own with that
folder as its work folder, and the container is gone when `exec` returns. The flags are those of docker.py as far as the command
line has them, so that both sides of a comparison isolate alike. Never used for grading: a bind mount is not a box.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_contracts.errors import CapabilityError, InfraError
from data_contracts.protocols import ExecRequest, ExecResult
from data_contracts.records import Artifact, SandboxSpec
from environments.sandbox.base import SCRATCH_BYTES, Backend, Box
from environments.sandbox.files import read_files, write_files
from environments.sandbox.shell import Wire
from environments.sandbox.surroundings import environment
from infra.rootfs import BOX_UID, image_name


class DockerRun(Backend):
    name = "docker run --rm"
    capabilities = frozenset({"exec", "files"})

    async def check(self) -> None:
        """The Docker backend's own check is the one that counts."""

    def reap(self) -> int:
        return 0

    async def _acquire(self, spec: SandboxSpec) -> Box:
        return RunBox(self, spec, f"run-{uuid.uuid4().hex[:12]}")


class RunBox(Box):
    def __init__(self, backend: Backend, spec: SandboxSpec, box_id: str) -> None:
        super().__init__(backend, spec, box_id)
        self._folder = Path(tempfile.mkdtemp(prefix="bessemer-run-"))

    async def _exec(self, request: ExecRequest, env: Mapping[str, str]) -> ExecResult:
        limits, scratch = self.spec.limits, f"rw,nosuid,nodev,exec,size={SCRATCH_BYTES}"
        variables = [word for name, value in environment(self.spec, env).items() for word in ("-e", f"{name}={value}")]
        command = [
            "docker", "run", "--rm", "-i", "--name", f"bessemer-{self.id}", "--network", "none", "--read-only",
            "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{BOX_UID}:{BOX_UID}",
            "--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes), "--cpus", str(limits.cpus),
            "--pids-limit", str(limits.pids), "--tmpfs", f"/tmp:{scratch}", "-v", f"{self._folder}:{self.spec.workdir}",  # noqa: S108
            "-w", self.spec.workdir, *variables, image_name(self.spec.image), *request.argv,
        ]  # fmt: skip
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        out, err = await asyncio.wait_for(process.communicate(request.stdin), request.deadline_seconds + 60)
        if process.returncode == 125:  # the engine's own
            raise InfraError("sandbox_backend", err.decode(errors="replace")[-500:])
        return ExecResult(exit_code=process.returncode, stdout=out, stderr=err)

    async def _put(self, files: Mapping[str, bytes]) -> None:
        root = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            write_files(root, files)
        finally:
            os.close(root)
        for folder, _, names in os.walk(self._folder):
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                os.chown(path, BOX_UID, BOX_UID)

    async def _shell(self, cwd: str, env: Mapping[str, str]) -> Wire:
        raise CapabilityError("`docker run --rm` ends with its one command and has no shell; use a real backend")

    async def _probe(self) -> None:
        """There is nothing to inspect before the command starts."""

    async def _freeze(self) -> None:
        """Nothing runs after `exec`."""

    async def _collect(self, names: Sequence[str], max_bytes: int) -> tuple[Artifact, ...]:
        root = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return read_files(root, names, max_bytes=max_bytes)
        finally:
            os.close(root)

    async def _destroy(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
