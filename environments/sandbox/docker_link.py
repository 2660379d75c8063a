"""The way to Docker's engine, and whether it was away: what tells an outage from a box that a policy ended.

Contract: `era` asks the engine over a new connection and answers a number that changes when the engine was stopped, killed or
restarted; boxes of an earlier era ended with it. The evidence is of the control plane's own: one connection is held open beside
the work (a stream of events that match nothing), and it ends with the engine's process, however that ends. An engine that is
stopping takes no new connections, but still answers on old ones, with containers that it has already ended: whatever decides
about fault is asked over a new one. Nothing here can be caused from inside a box. Everything blocks, for threads.
Gap: a proxy before the engine that cuts idle connections looks like an engine that was restarted; a box that a policy ends in
such an era is retried (at most `infra_retries` times, then its group is dropped).
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from data_contracts.errors import InfraError

if TYPE_CHECKING:
    from docker import DockerClient

ANSWER_SECONDS = 10.0
"""An engine that does not answer a ping for so long is away."""
CALL_SECONDS = 60.0
_NOTHING = {"label": "bessemer.nothing-has-this-label"}


class EngineLink:
    def __init__(self, *, connections: int) -> None:
        self._connections = connections
        self._lock = threading.Lock()
        self._client: DockerClient | None = None
        self._fresh: DockerClient | None = None
        self._held: Any = None
        self._era = 0

    @property
    def client(self) -> DockerClient:
        """For the work: connections are kept and used again."""
        with self._lock:
            if self._client is None:
                self._client = self._open(CALL_SECONDS)
            return self._client

    def era(self) -> int:
        """Raises InfraError("sandbox_unreachable") when the engine does not answer."""
        import docker
        import requests

        try:
            fresh = self._asked()
            with self._lock:
                if self._held is None or _ended(self._held):
                    self._drop()
                    self._held, self._era = fresh.api.events(filters=_NOTHING), self._era + 1
                return self._era
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            _unreachable(error)

    def require(self, era: int, what: str) -> None:
        """Raises InfraError("sandbox_unreachable") unless the engine answers now and was there all the time since `era`."""
        if self.era() != era:
            raise InfraError("sandbox_unreachable", f"Docker's engine was stopped or restarted while {what}")

    def ended(self, era: int) -> bool:
        """Whether the engine of `era` is gone. Does not ask it: one that hangs, or is just stopping, is still there."""
        with self._lock:
            return era != self._era or self._held is None or _ended(self._held)

    def state(self, container: str) -> Mapping[str, Any]:
        """A container's state, over a new connection. Raises the SDK's errors."""
        with self._lock:
            fresh = self._fresh
        about: dict[str, Any] = (fresh or self._asked()).api.inspect_container(container)
        state: dict[str, Any] = about["State"]
        return state

    def close(self) -> None:
        with self._lock:
            self._drop()
            for client in (self._client, self._fresh):
                if client is not None:
                    client.close()
            self._client = self._fresh = None

    def _asked(self) -> DockerClient:
        """The client whose every call is a new connection; the engine has just answered it."""
        with self._lock:
            if self._fresh is None:
                self._fresh = self._open(ANSWER_SECONDS)
                self._fresh.api.headers["Connection"] = "close"
            fresh = self._fresh
        fresh.ping()
        return fresh

    def _open(self, seconds: float) -> DockerClient:
        import docker

        try:
            return docker.from_env(timeout=int(seconds), max_pool_size=self._connections)
        except docker.errors.DockerException as error:
            _unreachable(error)

    def _drop(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            with contextlib.suppress(Exception):
                held.close()


def _ended(held: Any) -> bool:
    """Whether the engine's end of a stream is closed. Nothing is ever written to it, so nothing has to be read."""
    poll = select.poll()
    poll.register(held._response.raw._fp.fp.raw.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def _unreachable(error: Exception) -> NoReturn:
    place = os.environ.get("DOCKER_HOST") or "its usual socket"
    raise InfraError(
        "sandbox_unreachable",
        f"no Docker engine answers at {place} ({error}); start it, as root: systemctl start docker, or"
        " python -m infra.rootfs --docker",
    ) from error
