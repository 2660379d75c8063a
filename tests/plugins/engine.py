"""Session fixture: a Docker engine of the tests' own, beside the host's, that a test may stop, kill and start again.

It has its own data, containerd and socket, no bridge and no firewall rules, so that two engines do not meet; only root can
start it. It runs without `live-restore`, as engines do by default: its containers end with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.docker_engine import engine_reachable
from infra.rootfs import ensure_image

START_SECONDS = 60.0


class PrivateEngine:
    """`address` is for DOCKER_HOST."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"unix://{folder}/socket"

    def start(self) -> None:
        """Returns when it answers; at once when it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        (self._folder / "pid").unlink(missing_ok=True)  # of one that was killed
        path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        command = [
            "dockerd", f"--host={self.address}", f"--data-root={self._folder}/data", f"--exec-root={self._folder}/exec",
            f"--pidfile={self._folder}/pid", "--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-masq=false",
            "--shutdown-timeout=5",
        ]  # fmt: skip
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {"PATH": path},
            )  # fmt: skip
        with self.chosen():
            limit = time.monotonic() + START_SECONDS
            while not engine_reachable():
                if self._process.poll() is not None or time.monotonic() > limit:
                    pytest.fail(f"a second Docker engine does not start:\n{(self._folder / 'log').read_text()[-2000:]}")
                time.sleep(0.05)

    def stop(self) -> None:
        """As `systemctl stop docker` does: the engine ends its containers, then itself."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """It vanishes with its containerd; its containers live until it is started again."""
        self._end(signal.SIGKILL)
        # Until somebody has waited for the dead containerd, the next engine would take it for alive, by its pid.
        (self._folder / "exec" / "containerd" / "containerd.pid").unlink()

    def pause(self) -> None:
        """It hangs: its socket takes connections that nobody answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(timeout=60)

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Whoever asks for Docker's engine in this block, in this process or one started in it, gets this one."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_HOST", self.address)
            yield


@pytest.fixture(scope="session")
def private_engine(rootfs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateEngine]:
    """Started, with the sandbox image. Leave it running."""
    from infra.apt import install

    install(docker=True, progress=print)
    folder = tmp_path_factory.mktemp("engine")
    engine = PrivateEngine(folder)
    engine.start()
    with engine.chosen():
        ensure_image(progress=print)
    yield engine
    engine.start()  # what a test's outage left behind ends with a proper stop only
    engine.stop()
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in [mount for mount in reversed(mounts) if mount.startswith(f"{folder}/")]:  # of an engine that was killed
        subprocess.run(["umount", "--lazy", mount], check=True)
    shutil.rmtree(folder)
