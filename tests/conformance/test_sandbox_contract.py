"""The part of the sandbox contract that every backend keeps, the fake included."""

from __future__ import annotations

import asyncio
import time

import pytest

from data_contracts.config import SandboxConfig
from data_contracts.errors import CapabilityError, InputError
from data_contracts.protocols import ExecRequest
from data_contracts.records import SandboxLimits, SandboxSpec
from environments.sandbox import open_backend
from environments.sandbox.base import Backend
from tests.conformance.sandbox_boxes import a_box, py, sh


@pytest.fixture(params=["bubblewrap", "docker", "fake"])
def backend(request: pytest.FixtureRequest) -> Backend:
    found = request.getfixturevalue(f"{request.param}_backend")
    assert isinstance(found, Backend)
    return found


async def test_streams_exit_code_and_stdin_come_through(backend: Backend) -> None:
    async with a_box(backend) as box:
        big = bytes(range(256)) * 4096
        result = await sh(box, "cat; echo problem >&2; exit 7", stdin=b"abc")
        assert (result.exit_code, result.stdout, result.stderr) == (7, b"abc", b"problem\n")
        assert not any((result.timed_out, result.oom_killed, result.stdout_truncated, result.stderr_truncated))
        assert 0 < result.wall_seconds < 20
        assert (await sh(box, "wc -c", stdin=big)).stdout.split() == [str(len(big)).encode()]
        assert (await sh(box, "cat", stdin=b"")).stdout == b""


async def test_what_cannot_start_and_what_dies_by_a_signal_are_results(backend: Backend) -> None:
    async with a_box(backend) as box:
        missing = await box.exec(ExecRequest(argv=("no-such-command",), deadline_seconds=20))
        assert missing.exit_code == 127
        assert missing.stderr
        killed = await sh(box, "kill -9 $$")
        assert (killed.exit_code, killed.timed_out, killed.oom_killed) == (137, False, False)


async def test_only_allowed_variables_reach_a_command(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "hunter2")
    monkeypatch.setenv("LD_PRELOAD", "")
    async with a_box(backend, env={"FROM_SPEC": "a=b c"}) as box:
        result = await box.exec(ExecRequest(argv=("/usr/bin/env",), deadline_seconds=20, env={"FROM_REQUEST": "é"}))
        seen = dict(row.split("=", 1) for row in result.stdout.decode().splitlines())
        fixed = {
            "PATH", "HOME", "TMPDIR", "USER", "LANG", "LC_ALL", "TZ", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE",
        }  # fmt: skip
        assert set(seen) == fixed | {"FROM_SPEC", "FROM_REQUEST"}
        assert (seen["FROM_SPEC"], seen["FROM_REQUEST"]) == ("a=b c", "é")
        assert (seen["TZ"], seen["LANG"], seen["PYTHONHASHSEED"]) == ("UTC", "C.UTF-8", "0")
        with pytest.raises(InputError, match="environment variable"):
            await box.exec(ExecRequest(argv=("true",), deadline_seconds=1, env={"A B": "x"}))


async def test_output_beyond_the_cap_keeps_head_and_tail(backend: Backend) -> None:
    async with a_box(backend) as box:
        result = await sh(box, "echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo last; echo short >&2", cap=4096)
        assert result.stdout_truncated
        assert not result.stderr_truncated
        assert len(result.stdout) <= 4096
        assert result.stdout.startswith(b"first\nxxx")
        assert result.stdout.endswith(b"xxxlast\n")
        assert b"bytes dropped" in result.stdout
        exact = await sh(box, "head -c 1000 /dev/zero", cap=1000)
        assert (len(exact.stdout), exact.stdout_truncated) == (1000, False)
        assert (await sh(box, "echo hi", cap=0)).stdout == b""


async def test_endless_output_ends_at_the_deadline(backend: Backend) -> None:
    async with a_box(backend) as box:
        started = time.monotonic()
        result = await sh(box, "yes | tr -d '\\n'", seconds=1.0)
        assert result.timed_out
        assert result.exit_code is None
        assert result.stdout_truncated
        assert time.monotonic() - started < 8


async def test_bytes_that_are_no_text_come_through_unchanged(backend: Backend) -> None:
    async with a_box(backend) as box:
        result = await sh(box, r"printf '\377\376\000\200ok'")
        assert result.stdout == b"\xff\xfe\x00\x80ok"


async def test_a_command_that_stops_itself_or_ignores_signals_times_out(backend: Backend) -> None:
    async with a_box(backend) as box:
        for script in ("kill -STOP $$; sleep 60", "trap '' TERM INT HUP; while :; do sleep 60; done"):
            started = time.monotonic()
            result = await sh(box, f"echo begun; {script}", seconds=0.8)
            assert (result.timed_out, result.exit_code, result.oom_killed) == (True, None, False)
            assert result.stdout == b"begun\n"
            assert time.monotonic() - started < 8


async def test_a_background_child_does_not_hold_the_command(backend: Backend) -> None:
    async with a_box(backend) as box:
        started = time.monotonic()
        result = await sh(box, "sleep 50 & echo done")
        assert (result.exit_code, result.stdout, result.timed_out) == (0, b"done\n", False)
        assert time.monotonic() - started < 8


async def test_files_stay_between_commands_and_are_collected(backend: Backend) -> None:
    async with a_box(backend) as box:
        await box.put_files({"a/b/in.bin": bytes(range(256)), "a/other": b"1"})
        await sh(box, "cat a/b/in.bin a/other > out.bin; mkdir sub; echo x > sub/x")
        await box.put_files({"a/other": b"replaced"})
        assert (await sh(box, "cat a/other")).stdout == b"replaced"
        await box.freeze()
        await box.freeze()
        found = await box.collect(["out.bin", "missing", "sub/x", "a/other", "sub/x/deeper"], max_bytes=10_000)
        assert {item.name: item.content for item in found} == {
            "out.bin": bytes(range(256)) + b"1", "sub/x": b"x\n", "a/other": b"replaced",
        }  # fmt: skip
        assert all(item.size == len(item.content) and len(item.sha256) == 64 for item in found)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a//b", "", ".", "a/../b", "a/./b", "a/", "a\0b", "x" * 300, "\ud800"])
async def test_names_that_leave_the_work_folder_are_refused(
    fake_backend: Backend, bubblewrap_backend: Backend, name: str
) -> None:
    for backend in (fake_backend, bubblewrap_backend):
        async with a_box(backend) as box:
            with pytest.raises(InputError, match="file name"):
                await box.put_files({name: b""})
            await box.freeze()
            with pytest.raises(InputError, match="file name"):
                await box.collect([name], max_bytes=10)


async def test_only_regular_files_are_collected(backend: Backend) -> None:
    async with a_box(backend) as box:
        await sh(
            box,
            "echo s > real; ln -s real link; ln -s /etc/passwd passwd; ln -s /etc etc; mkfifo fifo; mkdir folder;"
            " ln -s . here; echo s > locked; chmod 0 locked; ln -s /proc/self/environ env; ln -s loop loop",
        )
        await box.freeze()
        names = ["link", "passwd", "etc/passwd", "fifo", "folder", "here/real", "env", "loop", "real"]
        assert [item.name for item in await box.collect(names, max_bytes=10_000)] == ["real"]


async def test_writing_never_follows_what_the_policy_left(backend: Backend) -> None:
    async with a_box(backend) as box:
        await sh(box, "echo keep > target; ln -s target link; mkdir d; ln -s d dlink; mkdir taken")
        await box.put_files({"link": b"new"})
        for name in ("dlink/x", "taken"):
            with pytest.raises(InputError, match="cannot write"):
                await box.put_files({name: b"new"})
        assert (await sh(box, "cat target link; ls d taken")).stdout == b"keep\nnewd:\n\ntaken:\n"


async def test_collecting_more_than_the_cap_is_an_error(backend: Backend) -> None:
    async with a_box(backend) as box:
        await sh(box, "head -c 600 /dev/zero > a; head -c 600 /dev/zero > b; truncate -s 1T huge")
        await box.freeze()
        assert len(await box.collect(["a", "b"], max_bytes=1200)) == 2
        for names in (["a", "b"], ["huge"]):
            with pytest.raises(InputError, match="exceed the cap"):
                await box.collect(names, max_bytes=1199)


async def test_nothing_changes_after_the_freeze(backend: Backend) -> None:
    async with a_box(backend) as box:
        await sh(box, "(while :; do date +%N >> log; echo x > late; done) > /dev/null 2>&1 & sleep 0.2")
        await box.freeze()
        first = await box.collect(["log", "late"], max_bytes=1 << 24)
        await asyncio.sleep(0.3)
        assert await box.collect(["log", "late"], max_bytes=1 << 24) == first
        assert first
        with pytest.raises(InputError, match="frozen"):
            await sh(box, "true")
        with pytest.raises(InputError, match="frozen"):
            await box.put_files({"x": b""})


async def test_a_box_is_single_use(backend: Backend) -> None:
    async with a_box(backend) as box:
        with pytest.raises(InputError, match="frozen box only"):
            await box.collect(["x"], max_bytes=10)
        await box.destroy()
        await box.destroy()
        for call in (sh(box, "true"), box.put_files({"x": b""}), box.collect(["x"], max_bytes=1), box.freeze()):
            with pytest.raises(InputError):
                await call


async def test_what_a_backend_does_not_offer_is_refused(backend: Backend) -> None:
    with pytest.raises(CapabilityError, match="teleport"):
        await backend.acquire(SandboxSpec(needs=("exec", "teleport")))
    with pytest.raises(CapabilityError, match="workdir"):
        await backend.acquire(SandboxSpec(workdir="/etc"))
    with pytest.raises(CapabilityError, match="limits"):
        await backend.acquire(SandboxSpec(limits=SandboxLimits(pids=0)))
    async with a_box(backend) as box:
        with pytest.raises(InputError, match="deadline"):
            await box.exec(ExecRequest(argv=("true",), deadline_seconds=float("inf")))
        with pytest.raises(InputError, match="command"):
            await box.exec(ExecRequest(argv=(), deadline_seconds=1))


async def test_a_cancelled_command_is_killed(backend: Backend) -> None:
    async with a_box(backend) as box:
        command = asyncio.ensure_future(sh(box, "while :; do echo x >> beat; sleep 0.01; done"))
        await asyncio.sleep(0.6)
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command
        await asyncio.sleep(0.5)
        before = await sh(box, "wc -c < beat")
        await asyncio.sleep(0.2)
        assert int(before.stdout) > 0
        assert (await sh(box, "wc -c < beat")).stdout == before.stdout


def test_the_fake_says_that_it_does_not_isolate_and_is_never_a_fall_back(fake_backend: Backend) -> None:
    assert not fake_backend.capabilities & {"isolation", "limits", "oom", "no_network"}
    with pytest.raises(CapabilityError, match="isolation"):
        asyncio.run(fake_backend.acquire(SandboxSpec(needs=("isolation",))))
    for name in ("bubblewrap", "docker", "fake"):
        assert open_backend(SandboxConfig(backend=name)).name == name  # type: ignore[arg-type]


async def test_concurrency_bounds_running_commands_not_boxes(fake_backend: Backend) -> None:
    backend = type(fake_backend)(concurrency=2)
    boxes = [await backend.acquire(SandboxSpec()) for _ in range(4)]
    started = time.monotonic()
    results = await asyncio.gather(*(sh(box, "sleep 0.3", seconds=0.6) for box in boxes))
    assert time.monotonic() - started >= 0.6
    assert not any(result.timed_out for result in results)
    await backend.close()
    assert not backend.boxes


async def test_a_python_program_runs(backend: Backend) -> None:
    async with a_box(backend) as box:
        assert (await py(box, "print(6 * 7)")).stdout == b"42\n"


async def test_a_command_that_ended_in_time_did_not_time_out_because_its_child_talks_on(backend: Backend) -> None:
    async with a_box(backend) as box:
        result = await sh(box, "(while sleep 0.05; do echo beat; done) & echo done", seconds=1.5)
        assert (result.exit_code, result.timed_out) == (0, False)
        assert b"done\n" in result.stdout
