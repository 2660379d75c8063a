"""Screenshots of the real UIs with headless Chromium: `python -m tests.screenshots CAMPAIGN [FOLDER]` beside a running stack.

Four pages of the last run of CAMPAIGN: the Prefect flow run, its artifacts, the comparison of its iterations in MLflow, and one
trace. Everything is on loopback; the browser's own background requests are turned off. FOLDER is docs/images by default.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Page, sync_playwright

from infra import stack
from infra.paths import home

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SIZE = {"width": 1440, "height": 1000}
SETTLE_MS = 4000
"""Single-page applications draw their charts after the last request."""


@contextmanager
def browser_page(executable: str = "/usr/bin/chromium") -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        try:
            yield browser.new_page(viewport=SIZE)
        finally:
            browser.close()


def pages(campaign: str) -> dict[str, str]:
    """File name -> address of every page, from the running stack's own APIs. Raises LookupError when something is missing."""
    state = stack.running(home())
    if state is None:
        raise LookupError(f"no stack is running in {home()}; run `bessemer up` first")
    prefect, mlflow = state.address("prefect"), state.address("mlflow")
    if prefect is None or mlflow is None:
        raise LookupError("the stack runs without Prefect or MLflow")
    runs = _post(f"{prefect}/api/flow_runs/filter", flow_runs={"name": {"any_": [campaign]}}, sort="START_TIME_DESC", limit=1)
    if not runs:
        raise LookupError(f"Prefect knows no run of campaign '{campaign}'")
    flow_run = f"{prefect}/runs/flow-run/{runs[0]['id']}"
    names = [e["experiment_id"] for e in _post(f"{mlflow}/api/2.0/mlflow/experiments/search", max_results=100)["experiments"]]
    children: list[dict[str, Any]] = []
    for experiment in names:
        found = _post(
            f"{mlflow}/api/2.0/mlflow/runs/search",
            experiment_ids=[experiment],
            filter=f"tags.`bessemer.campaign` = '{campaign}'",
            max_results=100,
        ).get("runs", [])
        children += [run for run in found if any(tag["key"] == "mlflow.parentRunId" for tag in run["data"].get("tags", []))]
    if not children:
        raise LookupError(f"MLflow knows no iterations of campaign '{campaign}'")
    experiment = children[0]["info"]["experiment_id"]
    chosen = ",".join(f'"{run["info"]["run_id"]}"' for run in children[:8])
    return {
        "prefect-run.png": flow_run,
        "prefect-artifacts.png": f"{flow_run}?tab=Artifacts",
        "mlflow-compare.png": f'{mlflow}/#/compare-runs?runs=[{chosen}]&experiments=["{experiment}"]',
        "mlflow-traces.png": f"{mlflow}/#/experiments/{experiment}/traces",
    }


def _post(url: str, **body: Any) -> Any:
    answer = httpx.post(url, json=body, timeout=30)
    answer.raise_for_status()
    return answer.json()


def main(campaign: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    wanted = pages(campaign)
    with browser_page() as page:
        for name, url in wanted.items():
            page.goto(url, wait_until="load", timeout=60_000)
            page.wait_for_timeout(SETTLE_MS)
            if name == "mlflow-traces.png":
                _open_first_trace(page)
            page.screenshot(path=str(folder / name))
            print(f"{folder / name}: {url}")


def _open_first_trace(page: Page) -> None:
    page.locator("a[href*='selectedEvaluationId'], a[href*='traceId'], td a, tr button").first.click(timeout=20_000)
    page.wait_for_timeout(SETTLE_MS)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else "docs/images"))
