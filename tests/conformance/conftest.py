"""The backends by name; each is opened once per session (tests/plugins/sandbox.py)."""

from __future__ import annotations

import pytest

from environments.sandbox.base import Backend


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    """The backend whose name is the (indirect) parameter."""
    found = request.getfixturevalue(f"{request.param}_backend")
    assert isinstance(found, Backend)
    return found
