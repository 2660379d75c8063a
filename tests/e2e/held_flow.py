"""The production flow, deployed as `tests.e2e.held_flow.advance`: while `<BESSEMER_HOME>/hold-flow` exists it stops between a
weight reload and its ledger event, says so with `reached` in that folder, and waits there to be killed."""

import time
from typing import Any

from flows.campaign import advance
from infra.paths import home
from models.serving.vllm_engine import VllmEngine

__all__ = ["advance"]
_ensure_serving = VllmEngine.ensure_serving


def hold(self: VllmEngine, checkpoint: Any, **keywords: Any) -> Any:
    result = _ensure_serving(self, checkpoint, **keywords)
    folder = home() / "hold-flow"
    while checkpoint.version > 1 and folder.is_dir():
        (folder / "reached").touch()
        time.sleep(0.1)
    return result


VllmEngine.ensure_serving = hold  # type: ignore[method-assign]
