"""Writes docs/results/conformance.md: every conformance check, and what came of it on each backend of this host.

python -m tests.conformance.table
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

from environments.sandbox.conformance.suite import checks

PAGE = Path(__file__).parents[2] / "docs" / "results" / "conformance.md"
BACKENDS = ("bubblewrap", "docker", "fake")
HEAD = """# Conformance of the sandboxes

    bessemer sandbox check --backend bubblewrap
    bessemer sandbox check --backend docker
    python -m tests.conformance.table        # all backends, and this page

{counts}. Linux {kernel}, control groups version {version}, as root. The fake isolates nothing and is held only to what needs no
isolation; it is never a fall-back. Figures and what is not covered: [sandboxes](sandboxes.md).

| check | shows | bubblewrap | Docker | fake |
|---|---|---|---|---|
"""


def outcomes(backend: str) -> dict[str, dict[str, str]]:
    command = [sys.executable, "-m", "flows.cli", "sandbox", "check", "--backend", backend, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return {row["name"]: row for row in map(json.loads, ran.stdout.splitlines())}


def render(found: dict[str, dict[str, dict[str, str]]]) -> str:
    count = {name: [row["status"] for row in rows.values()] for name, rows in found.items()}
    counts = "; ".join(
        f"{name}: {states.count('pass')} passed, {states.count('fail')} failed, {states.count('skip')} skipped"
        for name, states in count.items()
    )
    version = 2 if Path("/sys/fs/cgroup/cgroup.controllers").exists() else 1
    text = HEAD.format(counts=counts, kernel=platform.release().split("-")[0], version=version)
    for item in checks():
        states = [found[name].get(item.name, {"status": "not run", "reason": ""}) for name in BACKENDS]
        cells = " | ".join(f"**fail**: {row['reason']}" if row["status"] == "fail" else row["status"] for row in states)
        text += f"| `{item.name}` | {item.shows} | {cells} |\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(render({name: outcomes(name) for name in BACKENDS}))
    sys.stdout.write(f"{PAGE}\n")
