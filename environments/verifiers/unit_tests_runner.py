"""Runs inside the grading box: pytest with a pinned configuration, one record a test phase. Shipped as data.

Started as `python3 -I -P runner.py`, it starts itself again with exactly the environment below; forked from an interpreter
that was started like this, it takes that environment at once. pytest and the standard
library are imported before the work folder joins the *end* of the path, so that `pytest.py` or `json.py` there shadow nothing.
Records leave over a duplicate of standard output, tagged with the nonce from standard input. Tests import the candidate into
this process (trust `in_process`), so candidate code can reach the nonce and pytest's objects: canaries are what notices.
"""

import json
import os
import sys
from typing import Any

import pytest

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "HOME": "/nonexistent",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
PINNED = ("-c", "/dev/null", "--rootdir", ".", "--noconftest", "-p", "no:cacheprovider", "--import-mode=importlib", "-q", "-s")


class Recorder:
    """Writes every phase report as `[nonce, id, phase, outcome, message]`."""

    def __init__(self, channel: int, nonce: str) -> None:
        self._send = self._sender(channel, nonce)

    @staticmethod
    def _sender(channel: int, nonce: str) -> Any:
        write, dumps = os.write, json.dumps

        def send(*fields: str) -> None:
            data = (dumps([nonce, *fields]) + "\n").encode("ascii")
            while data:
                data = data[write(channel, data) :]

        return send

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = "" if report.passed else str(report.longrepr)[-400:]
        outcome = report.outcome if not hasattr(report, "wasxfail") else "xfail"
        self._send(report.nodeid, report.when or "", outcome, text)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._send(report.nodeid, "collect", "failed", str(report.longrepr)[-400:])


def main() -> None:
    """Reads `{nonce, files}`, runs the files in order."""
    job = json.loads(sys.stdin.buffer.read())
    channel, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    sys.path.append(os.getcwd())
    pytest.main([*PINNED, *job["files"]], plugins=[Recorder(channel, job["nonce"])])


if __name__ == "__main__":
    if sys.flags.isolated:
        os.execve(sys.executable, [sys.executable, "-P", "-s", "-B", os.path.abspath(__file__)], ENVIRONMENT)  # noqa: S606
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    main()
    os._exit(0)
