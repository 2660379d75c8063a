"""Boxes for policies and graders: one interface (data_contracts/protocols.py), one file a backend, no fall-back between them.

`open_backend` imports the chosen backend only, so that importing this package stays light.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from data_contracts.config import SandboxConfig
from data_contracts.errors import CapabilityError
from data_contracts.protocols import to_json
from data_contracts.records import Problem

if TYPE_CHECKING:
    from environments.sandbox.base import Backend


def open_backend(config: SandboxConfig) -> Backend:
    """The backend that `config` names, with boxes made ahead where it says so. Call its `check()` before, `close()` after."""
    backend = _backend(config)
    if config.warm == 0:
        return backend
    from environments.sandbox.pool import WarmBackend

    return WarmBackend(backend, warm=config.warm)


def require_boxes(config: SandboxConfig, problems: Iterable[Problem]) -> None:
    """Raises CapabilityError naming the first problem that needs a box which the chosen backend cannot make. Starts nothing."""
    backend, seen = _backend(config), set[bytes]()
    for problem in problems:
        for spec in (problem.environment.sandbox, problem.verifier.sandbox):
            if spec is None or (key := to_json(spec)) in seen:
                continue
            seen.add(key)
            try:
                backend.check_spec(spec)
            except CapabilityError as error:
                raise CapabilityError(f"problem {problem.id}: {error}") from error


def _backend(config: SandboxConfig) -> Backend:
    if config.backend == "bubblewrap":
        from environments.sandbox.bubblewrap import BubblewrapBackend

        return BubblewrapBackend(concurrency=config.concurrency)
    if config.backend == "docker":
        from environments.sandbox.docker import DockerBackend

        return DockerBackend(concurrency=config.concurrency, runtime=config.runtime)
    from environments.sandbox.fake import FakeBackend

    return FakeBackend(concurrency=config.concurrency)
