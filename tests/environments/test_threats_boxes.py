"""What a policy does to the box it acts in, and to what is collected from it, earns nothing and is never an outage.

An episode of `code_repair` is played on a real box: the attempt runs as the policy's own file, then the episode ends as usual.
It must come to a verdict of 0 or to `policy_failure`; an InfraError would be retried, which is what a losing policy wants.
"""

# ruff: noqa: E501  the attempts are one a line

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

import msgspec
import pytest

from data_contracts.protocols import SandboxBackend
from data_contracts.records import Problem, SandboxLimits
from environments.registry import domain
from environments.scripted import ScriptedEpisode, calls, plays, run_scripted, says

_SOLUTION = "import os, socket, stat\ntry: os.remove('solution.py')\nexcept OSError: pass\n"
ATTEMPTS = {
    "kills its box": "import os\nos.kill(-1, 9)\nos.kill(1, 9)\n",
    "fills its memory and stays": "import os\nif os.fork() == 0:\n    os.setsid()\n    x = []\n    while True: x.append(bytearray(1 << 20))\n",
    "uses up its processes": "import os, time\nfor _ in range(99):\n    try:\n        if os.fork() == 0: os.setsid(); time.sleep(600)\n    except OSError: break\n",
    "fills its disk": "n = 0\nfor d in ('/work', '/tmp', '/dev/shm'):\n    try:\n        while True: open(f'{d}/{n}', 'wb').write(bytes(1 << 20)); n += 1\n    except OSError: pass\n",
    "stops and kills what comes later": "import os, signal\nif os.fork() == 0:\n    os.setsid()\n    while True:\n        for p in os.listdir('/proc'):\n            if p.isdigit() and int(p) not in (1, os.getpid()):\n                try: os.kill(int(p), signal.SIGKILL)\n                except OSError: pass\n",
    "closes its folder": "import os\nos.chmod('/work', 0)\n",
    "floods": "import os\nwhile True: os.write(1, b'\\xff\\0' * 32768)\n",
    "a link in place of the file": _SOLUTION + "os.symlink('/usr/lib/python3.11/abc.py', 'solution.py')\n",
    "a chain of links": _SOLUTION + "os.symlink('b', 'solution.py')\nos.symlink('solution.py', 'b')\n",
    "a pipe in place of the file": _SOLUTION + "os.mkfifo('solution.py')\n",
    "a folder in place of the file": _SOLUTION + "os.mkdir('solution.py')\n",
    "a socket in place of the file": _SOLUTION + "socket.socket(socket.AF_UNIX).bind('solution.py')\n",
    "a sparse file of a TiB": _SOLUTION + "os.truncate(os.open('solution.py', os.O_CREAT | os.O_RDWR), 1 << 40)\n",
    "a hard link to a tool": _SOLUTION + "try: os.link('/usr/bin/env', 'solution.py')\nexcept OSError: pass\n",
    "a file nobody may read": "import os\nos.chmod('solution.py', 0)\n",
    "a right file too late": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    while True:\n        try: open('solution.py', 'a').write('\\n# later\\n')\n        except OSError: pass\n",
}  # fmt: skip
BACKENDS = ("bubblewrap", "docker")
Ends = dict[str, ScriptedEpisode | BaseException]


def posed() -> Problem:
    """A problem whose box and budgets are small, so that attempts meet their limits soon."""
    found = next(domain("code_repair").problems("train", seed=0))
    spec = found.environment.sandbox
    assert spec is not None
    limits = SandboxLimits(memory_bytes=160 << 20, pids=24, disk_bytes=16 << 20, lifetime_seconds=600.0)
    box = msgspec.structs.replace(spec, limits=limits)
    budgets = msgspec.structs.replace(found.budgets, tool_call_seconds=3.0, tool_seconds_total=12.0)
    environment = msgspec.structs.replace(found.environment, sandbox=box)
    return msgspec.structs.replace(found, environment=environment, budgets=budgets)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> SandboxBackend:
    found: SandboxBackend = request.getfixturevalue(f"{request.param}_backend")
    return found


@pytest.fixture(scope="module")
def ended() -> Callable[[SandboxBackend], Ends]:
    @functools.cache
    def of(backend: SandboxBackend) -> Ends:
        return asyncio.run(_play(backend))

    return of


async def _play(backend: SandboxBackend) -> Ends:
    turn, problem, repair = asyncio.Semaphore(6), posed(), domain("code_repair")

    async def one(attempt: str) -> ScriptedEpisode:
        policy = plays(
            calls("write_file", {"path": "conftest.py", "text": attempt}, call_id="a"), calls("run_tests", {}, call_id="b"),
            calls("run_tests", {}, call_id="c"), calls("read_file", {"path": "solution.py"}, call_id="d"), says("Done."),
        )  # fmt: skip
        async with turn:
            return await run_scripted(repair, problem, policy, backend=backend, deadline_seconds=120.0)

    ends = await asyncio.gather(*map(one, ATTEMPTS.values()), return_exceptions=True)
    return dict(zip(ATTEMPTS, ends, strict=True))


@pytest.mark.parametrize("attempt", ATTEMPTS)
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_box_in_ruins_is_the_policys_own_failure(
    backend: SandboxBackend, attempt: str, ended: Callable[[SandboxBackend], Ends]
) -> None:
    episode = ended(backend)[attempt]
    assert isinstance(episode, ScriptedEpisode), f"an outage that would be retried: {episode!r}"
    assert episode.score == 0.0
    assert episode.outcome == "policy_failure" or episode.verdict is not None
