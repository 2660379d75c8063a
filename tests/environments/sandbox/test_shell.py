"""A stateful shell: what stays between turns, how a turn ends, what a deadline kills, on every backend."""

from __future__ import annotations

import asyncio
import os
import statistics
import time

import pytest

from data_contracts.errors import InputError, SandboxLost
from data_contracts.protocols import ExecRequest
from environments.sandbox.base import Backend
from environments.sandbox.conformance.lab import Lab, py, sh

KEPT, GONE = f"1{os.getpid()}", f"2{os.getpid()}"
"""Seconds that nobody else on this host sleeps: the fake's boxes see all processes."""


@pytest.fixture(params=["bubblewrap", "docker", "fake"])
def backend(request: pytest.FixtureRequest) -> Backend:
    found = request.getfixturevalue(f"{request.param}_backend")
    assert isinstance(found, Backend)
    return found


async def test_the_state_of_a_session_stays(backend: Backend) -> None:
    async with Lab(backend).box(env={"FROM_SPEC": "a b"}) as box, await box.shell(env={"MORE": "é"}) as shell:
        first = await shell.run('mkdir -p d && cd d; x=5; declare -A m=([k]=v); f() { echo "f $1"; }; false', 20)
        assert (first.exit_code, first.stdout, first.stderr, first.timed_out, first.alive) == (1, b"", b"", False, True)
        second = await shell.run('echo $? $x ${m[k]} "$FROM_SPEC $MORE"; f 1; basename "$PWD"; echo oops >&2', 20)
        assert (second.stdout, second.stderr, second.exit_code) == ("1 5 v a b é\nf 1\nd\n".encode(), b"oops\n", 0)
        assert (await shell.run("sleep 30 & echo started", 20)).stdout == b"started\n"
        assert b"Running" in (await shell.run("jobs", 20)).stdout
        assert (await shell.run("kill %1; wait %1; echo $?", 20)).stdout.endswith(b"143\n")
        assert 0 < first.wall_seconds < 20


async def test_what_a_command_prints_comes_back_unchanged_and_capped(backend: Backend) -> None:
    async with Lab(backend).box() as box, await box.shell() as shell:
        binary = await shell.run(r"printf '\377\000ok'; printf '\376' >&2", 20)
        assert (binary.stdout, binary.stderr) == (b"\xff\x00ok", b"\xfe")
        capped = await shell.run("echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo last", 20, max_output_bytes=4096)
        assert capped.stdout_truncated
        assert not capped.stderr_truncated
        assert capped.stdout.startswith(b"first\nx")
        assert capped.stdout.endswith(b"xlast\n")
        assert len(capped.stdout) <= 4096
        assert (await shell.run("echo hi", 20, max_output_bytes=0)).stdout == b""
        long = "#" * 100_000
        assert (await shell.run(f"cat <<'END'\nä {long}\nEND\n", 20, max_output_bytes=1 << 20)).stdout == f"ä {long}\n".encode()


async def test_broken_commands_leave_the_session_alone(backend: Backend) -> None:
    async with Lab(backend).box() as box, await box.shell() as shell:
        for command, code in (("if true; then", 2), ("echo 'unclosed", 2), ("no-such-command", 127), (")", 2), ("return 7", 7)):
            turn = await shell.run(command, 20)
            assert (turn.exit_code, turn.alive) == (code, True), command
        assert (await shell.run("cat; read x; echo $?", 20)).stdout == b"1\n"  # stdin is empty
        for command in (
            "IFS=x",
            "set -u",
            "set -f",
            "trap 'echo trapped' ERR",
            "shopt -s extdebug",
            "set -o posix",
            "exec 3>&1",
        ):
            assert (await shell.run(command, 20)).alive
        assert (await shell.run("echo on", 20)).stdout == b"on\n"


async def test_nothing_printed_or_guessed_ends_a_turn(backend: Backend) -> None:
    """Markers on every descriptor that the turn can name, by the shell and by its children, in and out of /proc."""
    forge = (
        "for n in 0 00000000000000000000000000000000; do for fd in $(ls /proc/$$/fd); do"
        " { echo 0; echo \"$n 0\"; printf 'go\\n%s 0\\n' $n; } >&$fd;"
        " bash -c \"echo '$n 0' >&$fd; echo '$n 0' >/proc/$$/fd/$fd\";"
        " done; done 2>/dev/null; set | grep -i nonce; sleep 0.3; echo late; (exit 3)"
    )
    async with Lab(backend).box() as box, await box.shell() as shell:
        for _ in range(2):
            turn = await shell.run(forge, 20)
            assert (turn.exit_code, turn.alive) == (3, True)
            assert turn.stdout.endswith(b"late\n")
        assert (await shell.run("echo next", 20)).stdout.endswith(b"next\n")


async def test_a_child_that_knows_the_line_cannot_end_the_turn(backend: Backend) -> None:
    """The shell hands its own line to a child, which learns the nonce and reports: the kernel names the sender."""
    async with Lab(backend).box() as box, await box.shell() as shell:
        steal = (
            "for fd in /proc/$$/fd/*; do n=${fd##*/}; case $(readlink $fd) in socket*)"
            ' timeout 1 head -n 1 <&$n > nonce; echo "$(cat nonce) 0" > line; cat line >&$n;; esac; done; sleep 0.5; echo late'
        )
        turn = await shell.run(steal, 5)
        # The child has taken the nonce away from the shell: the session is lost, by the policy's doing, and not a success.
        assert turn.stdout == b"late\n"
        assert (turn.timed_out, turn.exit_code) == (True, None)


async def test_a_deadline_kills_the_turn_and_not_the_session(backend: Backend) -> None:
    async with Lab(backend).box() as box, await box.shell() as shell:
        await shell.run(f"y=kept; sleep {KEPT} & echo", 20)
        loops = "g() { while :; do sleep 60; done; }; g; echo no", "while :; do :; done", "sleep 60 | cat; sleep 60; echo no"
        daemons = f"setsid sleep {GONE} & (setsid sleep {GONE} & sleep {GONE} &) ; trap '' TERM INT HUP; sleep {GONE}"
        for command in (*loops, daemons, "(while :; do :; done)", "x=$(sleep 60); sleep 60", f"sleep {GONE} & wait"):
            began = time.monotonic()
            turn = await shell.run(f"echo begun; {command}", 0.7)
            assert (turn.timed_out, turn.exit_code, turn.alive) == (True, None, True), command
            assert turn.stdout.startswith(b"begun\n")
            assert time.monotonic() - began < 6
        after = await shell.run("echo $y; for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; done 2>/dev/null", 20)
        assert after.stdout.startswith(b"kept\n")
        assert f"sleep {KEPT}".encode() in after.stdout
        assert f"sleep {GONE}".encode() not in after.stdout


async def test_a_shell_that_cannot_be_stopped_is_lost_and_says_so(backend: Backend) -> None:
    async with Lab(backend).box() as box:
        shell = await box.shell()
        turn = await shell.run(f"trap '' 39; (sleep {GONE} &) ; echo begun; while :; do :; done", 0.5)
        assert (turn.timed_out, turn.exit_code, turn.alive, turn.stdout) == (True, None, False, b"begun\n")
        assert not shell.alive
        with pytest.raises(InputError, match="has ended"):
            await shell.run("true", 5)
        left = (await sh(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout
        assert f"sleep {GONE}".encode() not in left
        async with await box.shell() as another:
            assert (await another.run("echo usable", 20)).stdout == b"usable\n"
        await shell.close()


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("echo bye; exit 3", 3),
        ("echo bye; exec sh -c 'exit 4'", 4),
        ("echo bye; kill -9 $$", 137),
        ("set -e; echo bye; false", 1),
    ],
)
async def test_a_policy_that_ends_its_shell_is_told_so(backend: Backend, command: str, code: int) -> None:
    async with Lab(backend).box() as box, await box.shell() as shell:
        turn = await shell.run(command, 20)
        assert (turn.exit_code, turn.stdout, turn.timed_out, turn.alive) == (code, b"bye\n", False, False)
        assert (await sh(box, "echo usable")).stdout == b"usable\n"


async def test_a_shell_that_dies_between_turns_is_reported_by_the_next(backend: Backend) -> None:
    async with Lab(backend).box() as box, await box.shell() as shell:
        await shell.run("pid=$$; (sleep 0.2; kill -9 $pid) & :", 20)
        await asyncio.sleep(0.6)
        turn = await shell.run("echo not run", 20)
        assert (turn.exit_code, turn.stdout, turn.timed_out, turn.alive) == (137, b"", False, False)


async def test_background_output_comes_with_the_next_turn(backend: Backend) -> None:
    async with Lab(backend).box() as box, await box.shell() as shell:
        await shell.run("(sleep 0.2; head -c 200000 /dev/zero | tr '\\0' y; echo done > flag) & :", 20)
        await asyncio.sleep(0.8)
        turn = await shell.run("cat flag", 20)
        assert turn.stdout.endswith(b"done\n")
        assert b"yyy" in turn.stdout
        assert turn.stdout_truncated


async def test_sessions_are_apart_and_turns_of_one_queue(backend: Backend) -> None:
    async with Lab(backend).box() as box, await box.shell() as one, await box.shell() as two:
        await asyncio.gather(one.run("x=1", 20), two.run("x=2", 20))
        turns = await asyncio.gather(*(one.run(f"sleep 0.1; echo $x {n} $((x=x+1))", 20) for n in range(3)))
        assert [turn.stdout for turn in turns] == [b"1 0 2\n", b"2 1 3\n", b"3 2 4\n"]
        assert (await two.run("echo $x", 20)).stdout == b"2\n"
        assert (await sh(box, "echo beside")).stdout == b"beside\n"
        assert (await one.run("echo $x", 20)).stdout == b"4\n"


async def test_closing_freezing_and_destroying_end_a_session(backend: Backend) -> None:
    async with Lab(backend).box() as box:
        shell = await box.shell()
        await shell.run(f"sleep {GONE} & echo x > file", 20)
        await shell.close()
        await shell.close()
        assert GONE.encode() not in (await sh(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | sed 's/cat.*//'")).stdout
        shell = await box.shell()
        await box.freeze()
        assert [item.content for item in await box.collect(["file"], max_bytes=100)] == [b"x\n"]
        with pytest.raises(InputError, match="frozen"):
            await shell.run("true", 5)
        with pytest.raises(InputError, match="frozen"):
            await box.shell()


async def test_a_cancelled_turn_is_killed(backend: Backend) -> None:
    async with Lab(backend).box() as box:
        shell = await box.shell()
        turn = asyncio.ensure_future(shell.run("while :; do echo x >> beat; sleep 0.01; done", 60))
        await asyncio.sleep(0.6)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        before = (await sh(box, "wc -c < beat")).stdout
        await asyncio.sleep(0.2)
        assert int(before) > 0
        assert (await sh(box, "wc -c < beat")).stdout == before
        assert not shell.alive


async def test_wrong_requests_are_refused(backend: Backend) -> None:
    async with Lab(backend).box() as box:
        with pytest.raises(InputError, match=r"no shell|did not start"):
            await box.shell(cwd="no/such/folder")
        with pytest.raises(InputError, match="environment variable"):
            await box.shell(env={"A B": "x"})
        with pytest.raises(InputError, match="user"):
            await box.exec(ExecRequest(argv=("true",), deadline_seconds=5, user="root"))
        async with await box.shell() as shell:
            for arguments in (("true", 0.0), ("true", float("inf")), ("a\0b", 1.0)):
                with pytest.raises(InputError):
                    await shell.run(*arguments)


async def test_sessions_leave_no_descriptor_and_no_process(backend: Backend) -> None:
    async with Lab(backend).box() as box:
        async with await box.shell() as shell:
            await shell.run("true", 20)
        await asyncio.sleep(0.1)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            async with await box.shell() as shell:
                await shell.run(f"sleep {GONE} & true", 20)
        await asyncio.sleep(0.1)
        assert len(os.listdir("/proc/self/fd")) <= before
        assert GONE.encode() not in (await sh(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | sed 's/cat.*//'")).stdout


@pytest.mark.parametrize("name", ["bubblewrap", "docker"])
async def test_bombs_in_a_session_hit_the_limits(request: pytest.FixtureRequest, name: str) -> None:
    backend: Backend = request.getfixturevalue(f"{name}_backend")
    async with Lab(backend).box(pids=24, memory_bytes=1 << 26) as box, await box.shell() as shell:
        memory = await shell.run("python3 -c 'x = b\"x\" * (1 << 28)'; echo $?", 30)
        assert memory.oom_killed
        assert not memory.timed_out
        if memory.alive:
            assert memory.stdout == b"137\n"
    async with Lab(backend).box(pids=24) as box:
        shell = await box.shell()
        forks = await shell.run("b() { b | b & }; b; while :; do sleep 1; done", 1.5)
        assert forks.timed_out
        await shell.close()
        try:
            assert (await sh(box, "echo usable", seconds=30)).stdout == b"usable\n"
        except SandboxLost:
            assert name == "docker"


@pytest.mark.parametrize("name", ["docker"])
async def test_a_policy_that_stops_the_agent_loses_its_session_only(request: pytest.FixtureRequest, name: str) -> None:
    backend: Backend = request.getfixturevalue(f"{name}_backend")
    async with Lab(backend).box() as box:
        shell = await box.shell()
        assert (await shell.run("cat /proc/$PPID/environ; ls /proc/$PPID/fd; echo 0 > /proc/$PPID/fd/1", 20)).stdout == b""
        killed = await shell.run("kill -9 $PPID; sleep 60", 5)
        assert (killed.alive, killed.exit_code) == (False, None)
        assert (await sh(box, "echo usable")).stdout == b"usable\n"


async def test_a_turn_costs_little_on_bubblewrap(bubblewrap_backend: Backend) -> None:
    async with Lab(bubblewrap_backend).box() as box, await box.shell() as shell:
        for _ in range(20):
            await shell.run(":", 20)
        seconds = []
        for _ in range(200):
            began = time.perf_counter()
            await shell.run(":", 20)
            seconds.append(time.perf_counter() - began)
        print(f"median of a turn: {statistics.median(seconds) * 1000:.2f} ms")
        assert statistics.median(seconds) < 0.005
        assert (await py(box, "print(1)")).stdout == b"1\n"
