"""The server of recorded HTTP: it answers what was recorded and says so when nothing was. Runs inside a companion.

Contract: standard library only; called as RECORDINGS PORT strict|"", in the work folder. RECORDINGS is JSON, rows as
data_contracts/services.py `recording` makes them. A request fits a row of its method, path and query (parameters in any
order) and body (JSON is compared as JSON). Rows that fit answer in their order; the last one answers again and again, or, when
strict, none does. What fits no row is answered with 404 and JSON: what was asked for and what is recorded. Every request adds
a line of JSON to requests.jsonl (method, path, status, whether it was recorded), up to LOG_BYTES.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

LISTED = 50
BODY_BYTES = 4 * 1024 * 1024
LOG = "requests.jsonl"
LOG_BYTES = 4 * 1024 * 1024


class Recordings:
    """Which row answers; the state of one server."""

    def __init__(self, rows: list[dict[str, Any]], *, strict: bool) -> None:
        self._strict = strict
        self._left: list[dict[str, Any]] = list(rows)
        self._said: list[dict[str, Any]] = []
        self.known = sorted({f"{row['method']} {row['path']}" for row in rows})

    def answer(self, method: str, path: str, body: bytes) -> dict[str, Any] | None:
        for number, row in enumerate(self._left):
            if fits(row, method, path, body):
                del self._left[number]
                self._said.append(row)
                return row
        if self._strict:
            return None
        return next((row for row in reversed(self._said) if fits(row, method, path, body)), None)


def fits(row: dict[str, Any], method: str, path: str, body: bytes) -> bool:
    if row["method"] != method or place(row["path"]) != place(path):
        return False
    if row["any"]:
        return True
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return False
    if text == row["request"]:
        return True
    try:
        return bool(_exact(json.loads(text), row["request"]))
    except (ValueError, RecursionError):
        return False


def place(path: str) -> tuple[str, list[tuple[str, str]]]:
    parts = urlsplit(path)
    return parts.path, sorted(parse_qsl(parts.query, keep_blank_values=True))


def _exact(one: Any, other: Any) -> bool:
    """Equal as JSON: true is not 1, and a float that is whole is the same number."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_exact(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_exact, one, other))
    return bool(one == other)


def handler(recordings: Recordings) -> type[BaseHTTPRequestHandler]:
    import threading

    lock, log = threading.Lock(), open(LOG, "ab", buffering=0)  # noqa: SIM115  open as long as the server

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60

        def reply(self) -> None:
            length = self.headers.get("Content-Length", "0")
            if not length.isascii() or not length.isdigit() or int(length) > BODY_BYTES or "Transfer-Encoding" in self.headers:
                self.close_connection = True
                self.send({"status": 413, "headers": {}, "body": f"a request has a Content-Length of at most {BODY_BYTES}\n"})
                return
            body = self.rfile.read(int(length))
            with lock:
                row = recordings.answer(self.command, self.path, body)
                known = row is not None
                if row is None:
                    asked = f"{self.command} {self.path}"
                    found = {"error": f"no recording of {asked[:500]} with this body", "recorded": recordings.known[:LISTED]}
                    row = {"status": 404, "headers": {"Content-Type": "application/json"}, "body": json.dumps(found)}
                line = {"method": self.command, "path": self.path[:2000], "status": row["status"], "recorded": known}
                if log.tell() < LOG_BYTES:
                    log.write(json.dumps(line).encode() + b"\n")
            self.send(row)

        def send(self, row: dict[str, Any]) -> None:
            body = row["body"].encode()
            self.send_response(row["status"])
            for name, value in row["headers"].items():
                self.send_header(name, value)
            if row["status"] not in {204, 304}:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD" and row["status"] not in {204, 304}:
                self.wfile.write(body)

        def date_time_string(self, timestamp: float | None = None) -> str:
            return "Thu, 01 Jan 1970 00:00:00 GMT"  # the same answer on every date

        def log_message(self, format: str, *args: object) -> None:
            """requests.jsonl is the log."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("do_"):  # whatever method was recorded
                return self.reply
            raise AttributeError(name)

    return Handler


def main() -> None:
    with open(sys.argv[1]) as file:
        recordings = Recordings(json.load(file), strict=sys.argv[3] == "strict")
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), handler(recordings))
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
