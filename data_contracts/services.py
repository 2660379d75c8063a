"""Companion services of a sandbox box, as data: a database, an internal HTTP API, recorded HTTP.

Contract: a `SandboxSpec` names its services; each one runs beside the box in isolation of its own, and the box reaches it at
127.0.0.1:`port` and nowhere else. Everything that can be wrong with one is found when the record is made or decoded, as
`InputError` that names the field and the remedy (from a file: with the path to the field). A recording is JSON lines:

    {"method": "GET", "path": "/orders/7?full=1", "status": 200, "json": {"state": "sent"}}
    {"method": "POST", "path": "/refunds", "request": {"order": 7}, "status": 201, "headers": {"X-A": "b"}, "body": "done"}

`method` is GET and `status` 200 when left out; the order of a query's parameters does not matter; `request` is the body that
a request must have (text, or JSON that is compared as JSON), and a row without it fits every body; `json` or `body` is the
answer.
Gaps: seed files are text, 1 MiB in all (more belongs into a root file system variant); services speak TCP.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import msgspec

from data_contracts.errors import InputError

ServiceKind = Literal["command", "image", "recorded"]
MAX_FILES_BYTES = 1024 * 1024
FIRST_FREE_PORT = 1024
_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_METHOD = re.compile(r"[A-Z]{1,20}")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_OURS = {"content-length", "connection", "transfer-encoding", "date", "server"}


def _words(argv: tuple[str, ...], field: str) -> None:
    if any("\0" in word for word in argv) or (argv and (not argv[0] or "=" in argv[0])):
        raise InputError("not a command", field=field, remedy="Give a program's name and its words, without NUL")


class _Declared(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Like records.Record, which this module cannot import: records.py imports it."""


class HealthCheck(_Declared, frozen=True, kw_only=True):
    """When a service is ready: an HTTP path that answers 2xx or 3xx, or a command inside it that ends with 0, or, with neither,
    its port that accepts (for an image: its own HEALTHCHECK, where it has one). Asked again and again until the deadline."""

    http: str = ""
    command: tuple[str, ...] = ()
    deadline_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.http and (not re.fullmatch(r"/[!-~]*", self.http)):
            raise InputError(f"{self.http!r} is not an HTTP path", field="health.http", remedy="Write it as '/health'")
        if self.http and self.command:
            raise InputError(
                "a service has one health check, not two", field="health.command", remedy="Leave health.http or it out"
            )
        _words(self.command, "health.command")
        if not (math.isfinite(self.deadline_seconds) and self.deadline_seconds > 0):
            raise InputError(
                "a health check needs a finite deadline above 0", field="health.deadline_seconds", remedy="Write 30.0, say"
            )


class ServiceLimits(_Declared, frozen=True, kw_only=True):
    """Hard limits of one service, apart from the box's. It lives as long as its box."""

    memory_bytes: int = 256 * 1024 * 1024
    pids: int = 64
    disk_bytes: int = 64 * 1024 * 1024
    cpus: float = 1.0


class ServiceSpec(_Declared, frozen=True, kw_only=True):
    """One companion service of a box."""

    name: str
    port: int
    """Where the box reaches it: 127.0.0.1:port."""
    kind: ServiceKind = "command"
    """command: `argv`, in a box of its own; recorded: answers from the recordings in `files`; image: a Docker image."""
    image: str = "base"
    """The root file system variant of a command, or the name of a Docker image that the engine has."""
    argv: tuple[str, ...] = ()
    """A program that stays in the foreground; it listens on 127.0.0.1. For an image: instead of its CMD."""
    listens: int = 0
    """The port inside the service; 0: the same as `port`."""
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    """Text files that its work folder holds before it starts; for recorded: the recordings, read in order of their names."""
    seed: tuple[str, ...] = ()
    """A command inside the service, run once when it is healthy and before the box is handed out."""
    writable: tuple[str, ...] = ()
    """Folders of an image that must be writable, each a tmpfs of limits.disk_bytes; its VOLUMEs are anyhow."""
    health: HealthCheck = HealthCheck()
    limits: ServiceLimits = ServiceLimits()
    strict: bool = False
    """For recorded: every row answers once. Otherwise the last row that fits answers again and again."""
    end: Literal["infra", "policy"] = "infra"
    """Whose failure it is when the service ends during an episode. `policy` for one that its clients can shut down or starve:
    otherwise an episode that goes badly can be voided by ending it."""

    @property
    def target(self) -> int:
        return self.listens or self.port

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InputError(
                f"{self.name!r} cannot be a service's name", field="name", remedy="Use lower-case letters, digits and '-'"
            )
        _check_ports(self)
        for name, value in self.env.items():
            if not _VARIABLE.fullmatch(name) or "\0" in value:
                raise InputError(
                    f"{name!r} cannot be an environment variable", field="env", remedy="Use letters, digits and '_'"
                )
        _words(self.argv, "argv")
        _words(self.seed, "seed")
        _check_files(self)
        _check_kind(self)
        limits = self.limits
        if min(limits.memory_bytes >> 23, limits.pids, limits.disk_bytes >> 12, limits.cpus * 100) < 1:
            raise InputError(
                f"{limits} cannot be enforced", field="limits",
                remedy="Give at least 8 MiB of memory, 1 process, 4 KiB of disk and 0.01 CPU",
            )  # fmt: skip


def check_services(services: tuple[ServiceSpec, ...]) -> None:
    """Raises InputError for two services with one name or one port."""
    for field in ("name", "port"):
        values = [getattr(service, field) for service in services]
        if twice := sorted({value for value in values if values.count(value) > 1}):
            raise InputError(
                f"two services have the {field} {twice[0]!r}", field=f"services.{field}", remedy="Give each its own"
            )


def recording(text: str, *, file: str) -> list[dict[str, Any]]:
    """The rows of a recording, in the order of the file, with all fields filled in. Raises InputError naming file and row."""
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line.encode(), type=_Recorded)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise InputError(
                f"not a recorded request: {error}", file=file, row=number, field="files",
                remedy='Write {"method": "GET", "path": "/x", "status": 200, "json": {}}',
            ) from None  # fmt: skip
        row.check(file, number)
        answer = msgspec.json.encode(row.json).decode() if row.json is not msgspec.UNSET else row.body
        headers = dict(row.headers)
        if row.json is not msgspec.UNSET and "content-type" not in {name.lower() for name in headers}:
            headers["Content-Type"] = "application/json"
        any_body = row.request is msgspec.UNSET
        rows.append(
            {
                "method": row.method, "path": row.path, "any": any_body, "request": None if any_body else row.request,
                "status": row.status, "headers": headers, "body": answer,
            }
        )  # fmt: skip
    if not rows:
        raise InputError("no request is recorded", file=file, field="files", remedy="Give at least one row, or drop the file")
    return rows


class _Recorded(_Declared, frozen=True, kw_only=True):
    path: str
    method: str = "GET"
    request: Any = msgspec.UNSET
    status: int = 200
    headers: dict[str, str] = {}
    body: str = ""
    json: Any = msgspec.UNSET

    def check(self, file: str, row: int) -> None:
        def wrong(problem: str, field: str, remedy: str) -> InputError:
            return InputError(problem, file=file, row=row, field=field, remedy=remedy)

        if not _METHOD.fullmatch(self.method):
            raise wrong(f"{self.method!r} is not an HTTP method", "method", "Write it in capitals, as GET")
        if not re.fullmatch(r"/[!-~]*", self.path):
            raise wrong(f"{self.path!r} is not an HTTP path", "path", "Begin with '/', encode everything but plain ASCII")
        if not 200 <= self.status <= 599:
            raise wrong(f"{self.status} is not a final HTTP status", "status", "Use 200 to 599")
        if self.body and self.json is not msgspec.UNSET:
            raise wrong("an answer has a `body` or `json`, not both", "json", "Leave one out")
        for name, value in self.headers.items():
            if not _HEADER.fullmatch(name) or not re.fullmatch(r"[\t\x20-\x7e]*", value):
                raise wrong(f"the header {name!r} cannot be sent", "headers", "Use plain ASCII without line ends")
            if name.lower() in _OURS:
                raise wrong(f"the header {name!r} is the server's own", "headers", "Leave it out")


def _check_ports(service: ServiceSpec) -> None:
    if not 1 <= service.port <= 65535:
        raise InputError(f"{service.port} is not a TCP port", field="port", remedy="Use 1 to 65535")
    if not 1 <= service.target <= 65535:
        raise InputError(f"{service.listens} is not a TCP port", field="listens", remedy="Use 1024 to 65535, or leave it out")
    if service.kind != "image" and service.target < FIRST_FREE_PORT:
        raise InputError(
            f"a service has no right to listen at {service.target}", field="listens",
            remedy=f"Set listens to {FIRST_FREE_PORT} or more; `port` may stay",
        )  # fmt: skip


def _check_files(service: ServiceSpec) -> None:
    for name in service.files:
        if not name or any(part in {"", ".", ".."} for part in name.split("/")) or "\0" in name:
            raise InputError(
                f"{name!r} is not a file name inside the work folder", field="files", remedy="Use plain relative paths"
            )
    room = min(MAX_FILES_BYTES, service.limits.disk_bytes)
    if (size := sum(len(text.encode()) for text in service.files.values())) > room:
        raise InputError(
            f"{size} bytes of files, more than {room}", field="files",
            remedy="Put large data into a root file system variant, or raise limits.disk_bytes",
        )  # fmt: skip


def _check_kind(service: ServiceSpec) -> None:
    for field in {"command": ("writable", "strict"), "recorded": ("writable", "argv"), "image": ("files", "strict")}[
        service.kind
    ]:
        if getattr(service, field):
            remedy = "Bring files in the image, or pass what it needs by env and seed" if field == "files" else "Leave it out"
            raise InputError(f"a service of kind {service.kind} has no {field}", field=field, remedy=remedy)
    if service.kind == "command" and not service.argv:
        raise InputError("a command service needs a program", field="argv", remedy="Give its words, as in ('redis-server',)")
    if service.kind == "recorded":
        if not service.files:
            raise InputError("nothing is recorded", field="files", remedy="Give at least one file of JSON lines")
        for name, text in service.files.items():
            recording(text, file=name)
    if service.kind == "image":
        for path in service.writable:
            if not re.fullmatch(r"(/[A-Za-z0-9._-]+)+", path) or ".." in path:
                raise InputError(f"{path!r} is not a folder", field="writable", remedy="Give absolute plain paths")
        if not service.image or service.image.startswith("-") or any(letter.isspace() for letter in service.image):
            raise InputError(f"{service.image!r} is not an image's name", field="image", remedy="Write it as 'name:tag'")
        if service.image == "base":
            raise InputError("no Docker image is named", field="image", remedy="Write it as 'name:tag'")
