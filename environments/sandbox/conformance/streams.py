"""Arguments and stdin into a command, stdout and stderr out of it: every byte, or a flag that says what is missing."""

from __future__ import annotations

import hashlib

from data_contracts.errors import InputError
from data_contracts.protocols import ExecRequest
from environments.sandbox.conformance.check import check, holds, refused, same
from environments.sandbox.conformance.lab import SECONDS, Lab, py, sh

EVERY_BYTE = bytes(range(256))


@check("exec")
async def apart(lab: Lab) -> None:
    """stdout, stderr and the exit code come back apart, unflagged, with the time it took."""
    async with lab.box() as box:
        result = await sh(box, "cat; echo problem >&2; sleep 0.2; exit 7", stdin=b"abc")
        same((result.exit_code, result.stdout, result.stderr), (7, b"abc", b"problem\n"), "exit code, stdout, stderr")
        flags = (result.timed_out, result.oom_killed, result.stdout_truncated, result.stderr_truncated)
        same(flags, (False, False, False, False), "flags of timeout, memory and truncation")
        holds(0.2 <= result.wall_seconds < SECONDS, f"{result.wall_seconds} s are reported for a command that sleeps 0.2 s")


@check("exec")
async def no_text(lab: Lab) -> None:
    """Invalid UTF-8, NULs and every other byte pass through both streams unchanged."""
    async with lab.box() as box:
        result = await sh(box, "cat > f; cat f; cat f >&2", stdin=EVERY_BYTE + b"\xff\xfe\0\x80ok")
        same(result.stdout, EVERY_BYTE + b"\xff\xfe\0\x80ok", "stdout")
        same(result.stderr, EVERY_BYTE + b"\xff\xfe\0\x80ok", "stderr")


@check("exec")
async def large_stdin(lab: Lab) -> None:
    """A MiB of stdin arrives byte for byte, and then ends."""
    async with lab.box() as box:
        result = await sh(box, "sha256sum", stdin=EVERY_BYTE * 4096)
        same(result.stdout.split()[:1], [hashlib.sha256(EVERY_BYTE * 4096).hexdigest().encode()], "digest of stdin")


@check("exec")
async def no_stdin(lab: Lab) -> None:
    """A command without stdin reads its end at once."""
    async with lab.box() as box:
        result = await sh(box, "cat; echo end", seconds=10.0)
        same((result.stdout, result.timed_out), (b"end\n", False), "output after reading an empty stdin")


@check("exec")
async def unread_stdin(lab: Lab) -> None:
    """A command that ends without reading its large stdin is neither an error nor a hang."""
    async with lab.box() as box:
        result = await sh(box, "echo ignored; exit 3", stdin=b"x" * (4 << 20))
        same((result.exit_code, result.stdout), (3, b"ignored\n"), "exit code and stdout")


@check("exec")
async def large_stdout(lab: Lab) -> None:
    """Two MiB below the cap come back byte for byte."""
    async with lab.box() as box:
        program = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 8192)"
        result = await py(box, program, cap=4 << 20)
        same((result.stdout == EVERY_BYTE * 8192, result.stdout_truncated), (True, False), "stdout is whole, and flagged")


@check("exec")
async def capped(lab: Lab) -> None:
    """Output beyond the cap keeps its head and its tail, says how much is gone and is flagged."""
    async with lab.box() as box:
        script = "echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo last"
        result = await sh(box, script, cap=4096)
        same((result.stdout_truncated, result.exit_code), (True, 0), "truncation flag and exit code")
        holds(len(result.stdout) <= 4096, f"{len(result.stdout)} bytes came back under a cap of 4096")
        ends = result.stdout.startswith(b"first\nxxx"), result.stdout.endswith(b"xxxlast\n"), b"bytes dropped" in result.stdout
        same(ends, (True, True, True), "head kept, tail kept, and a line between that says what is gone")


@check("exec")
async def capped_apart(lab: Lab) -> None:
    """The cap holds for each stream by itself: a flood on one takes nothing from the other."""
    async with lab.box() as box:
        result = await sh(box, "echo short; head -c 300000 /dev/zero >&2", cap=1000)
        same((result.stdout, result.stdout_truncated), (b"short\n", False), "stdout beside a flood on stderr")
        flood = (result.stderr_truncated, len(result.stderr) <= 1000)
        same(flood, (True, True), "stderr is flagged, and within the cap of 1000 bytes")


@check("exec")
async def capped_exactly(lab: Lab) -> None:
    """Output of just the cap is whole and unflagged, one byte more is flagged, a cap of 0 keeps nothing."""
    async with lab.box() as box:
        for size, cap, kept, flagged in ((1000, 1000, 1000, False), (1001, 1000, None, True), (3, 0, 0, True)):
            result = await sh(box, f"head -c {size} /dev/zero", cap=cap)
            same(result.stdout_truncated, flagged, f"truncation flag of {size} bytes under a cap of {cap}")
            holds(kept is None or len(result.stdout) == kept, f"{len(result.stdout)} of {size} bytes kept under a cap of {cap}")


@check("exec")
async def closed(lab: Lab) -> None:
    """A command that closes its streams and goes on is waited for."""
    async with lab.box() as box:
        result = await sh(box, "echo early; exec 1>&- 2>&-; sleep 0.7; exit 5")
        same((result.exit_code, result.stdout), (5, b"early\n"), "exit code and stdout")


@check("exec")
async def arguments(lab: Lab) -> None:
    """Arguments arrive as they are: empty, quoted, several lines, dashes, dollars and non-ASCII; nothing expands them."""
    words = ("", " ", "a'b\"c", "two\nlines", "--", "-n", "$HOME `id` $(id) *", "\\n", "é漢😀", "a=b")
    async with lab.box() as box:
        result = await py(box, "import sys; print(ascii(tuple(sys.argv[1:])))", *words)
        same(result.stdout.decode().strip(), ascii(words), "arguments")


@check("exec")
async def large_arguments(lab: Lab) -> None:
    """Ten arguments of 100 kB and a thousand small ones arrive whole."""
    words = [f"{number:06}" * 16_666 for number in range(10)] + [str(number) for number in range(1000)]
    async with lab.box() as box:
        program = "import hashlib, sys; print(hashlib.sha256('|'.join(sys.argv[1:]).encode()).hexdigest())"
        result = await py(box, program, *words)
        same(result.stdout.decode().strip(), hashlib.sha256("|".join(words).encode()).hexdigest(), "digest of the arguments")


@check("exec")
async def impossible_arguments(lab: Lab) -> None:
    """An argument beyond the kernel's limit is a result with a message; a NUL and an empty command are refused."""
    async with lab.box() as box:
        result = await py(box, "pass", "x" * 300_000)
        holds(result.exit_code and result.stderr, f"exit code {result.exit_code}, stderr {result.stderr!r}")
        for argv in ((), ("echo", "a\0b")):
            with refused(InputError, "NUL", f"the command {argv!r}"):
                await box.exec(ExecRequest(argv=argv, deadline_seconds=10))
