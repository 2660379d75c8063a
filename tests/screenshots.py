"""Screenshots of the real UIs with headless Chromium: `python -m tests.screenshots CAMPAIGN [FOLDER]` beside a running stack.

Four pages of the last run of CAMPAIGN: the Prefect flow run, the report among its artifacts, MLflow's comparison of runs, and
one trace. Everything is on loopback; the browser's own background requests are turned off. FOLDER is docs/images by default.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Page, sync_playwright

from flows.artifacts import key
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
SETTLE_MS = 7000
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
    experiments = _post(f"{mlflow}/api/2.0/mlflow/experiments/search", max_results=100)["experiments"]
    for experiment in (entry["experiment_id"] for entry in experiments):
        query = f"tags.`bessemer.campaign` = '{campaign}'"
        found = _post(f"{mlflow}/api/2.0/mlflow/runs/search", experiment_ids=[experiment], filter=query, max_results=1)
        if found.get("runs"):
            return {
                "prefect-run.png": f"{prefect}/runs/flow-run/{runs[0]['id']}",
                "prefect-artifacts.png": f"{prefect}/artifacts/artifact/{_report(prefect, campaign)}",
                "mlflow-compare.png": f"{mlflow}/#/experiments/{experiment}/runs?compareRunsMode=CHART",
                "mlflow-trace.png": f"{mlflow}/#/experiments/{experiment}/traces",
            }
    raise LookupError(f"MLflow knows no run of campaign '{campaign}'")


def _report(prefect: str, campaign: str) -> str:
    """Id of the newest version of the campaign's markdown report."""
    name = {"key": {"any_": [key(campaign, "report")]}}
    found = _post(f"{prefect}/api/artifacts/filter", artifacts=name, sort="CREATED_DESC", limit=1)
    if not found:
        raise LookupError(f"Prefect holds no report of campaign '{campaign}'")
    return str(found[0]["id"])


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
            if name == "mlflow-trace.png":
                _open_first_trace(page)
            page.screenshot(path=str(folder / name))
            print(f"{folder / name}: {url}")


def _open_first_trace(page: Page) -> None:
    link = page.locator("a[aria-label^='Open trace']").first.get_attribute("href", timeout=20_000)
    page.goto(f"{page.url.partition('#')[0]}{link}", wait_until="load", timeout=60_000)
    page.wait_for_timeout(SETTLE_MS)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else "docs/images"))
