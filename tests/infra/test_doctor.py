"""The doctor names what is missing and the command that gets it, quickly and without importing anything heavy."""

import subprocess
import sys
from pathlib import Path

import pytest

from infra import doctor
from infra.lockfile import Lock, Pin


def test_a_missing_and_a_wrong_package_are_named(tmp_path: Path) -> None:
    (tmp_path / "Right_Name-1.0.dist-info").mkdir()
    (tmp_path / "old-1.0.dist-info").mkdir()
    pins = {name: Pin(name, version, "") for name, version in {"right-name": "1.0", "old": "2.0", "absent": "3.0"}.items()}
    finding = doctor.packages(Lock(pins, "3.11", ""), tmp_path)
    assert not finding.ok
    assert "old is 1.0, locked 2.0" in finding.detail
    assert "absent missing" in finding.detail
    assert "right-name" not in finding.detail
    assert finding.remedy == "make setup"


def test_this_environment_is_as_locked() -> None:
    assert doctor.packages() == doctor.Finding("packages", True, doctor.packages().detail, "")


def test_an_absent_command_gives_the_command_that_gets_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = doctor.bubblewrap()
    assert (finding.ok, finding.remedy) == (False, "apt-get install -y bubblewrap")


def test_an_empty_cache_asks_for_root_file_system_and_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BESSEMER_CACHE", str(tmp_path))
    assert doctor.root_file_system().remedy == "python -m infra.rootfs"
    assert doctor.model("tiny").remedy == "python -m models.base_model tiny"


def test_a_model_folder_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BESSEMER_CACHE", str(tmp_path))
    folder = tmp_path / "models" / "tiny-0123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert doctor.model("tiny").ok


def test_a_report_imports_nothing_heavy() -> None:
    code = (
        "import sys; from infra import doctor; found = doctor.report();"
        "heavy = {'torch', 'vllm', 'mlflow', 'prefect', 'dask', 'docker', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy; assert all(f.ok or f.remedy for f in found), found; print(len(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 10
