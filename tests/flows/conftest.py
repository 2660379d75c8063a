"""A state folder per test, and the double in place of engine, trainer and pool."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import flows.services
from tests.flows import double


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BESSEMER_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def stand_ins(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(flows.services, "open_services", double.open_double)
    return home
