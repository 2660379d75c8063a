"""Pictures of the reward per domain, as PNG bytes. Drawn without a display and without pyplot's global state.

A row is one domain's figures at one step. Drawn are `mean_reward` of training rows (as tasks/report.py names it) and
`mean_reward`, `low`, `high` of held-out rows (as DomainEval does).
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def over_iterations(training: Sequence[Row], heldout: Sequence[Row]) -> bytes:
    """Mean reward of each domain over iterations: training as a line, held-out as points with their 95 % interval.

    `training` rows have iteration, domain, mean_reward; `heldout` rows have version, domain, mean_reward, low, high. Version v
    is drawn at x = v: it is what iteration v rolls out.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    domains = sorted({str(row["domain"]) for row in [*training, *heldout]})
    for number, domain in enumerate(domains):
        color = f"C{number % 10}"
        line = sorted((row["iteration"], row["mean_reward"]) for row in training if row["domain"] == domain)
        if line:
            axes.plot(*zip(*line, strict=True), color=color, marker=".", label=f"{domain}, training")
        points = sorted((r["version"], r["mean_reward"], r["low"], r["high"]) for r in heldout if r["domain"] == domain)
        if points:
            at, mean, low, high = (list(column) for column in zip(*points, strict=True))
            below = [max(m - v, 0.0) for m, v in zip(mean, low, strict=True)]
            above = [max(v - m, 0.0) for m, v in zip(mean, high, strict=True)]
            axes.errorbar(at, mean, yerr=[below, above], color=color, fmt="s", capsize=4, label=f"{domain}, held out")
    axes.set(xlabel="iteration (policy version)", ylabel="mean reward", title="Reward per domain")
    axes.grid(alpha=0.3)
    if domains:
        axes.legend(fontsize=8)
    return _png(figure)


def heat_map(training: Sequence[Row]) -> bytes:
    """Mean reward as a grid: a row per domain, a column per iteration, empty where a domain had no group."""
    from matplotlib.figure import Figure

    domains = sorted({str(row["domain"]) for row in training})
    iterations = sorted({int(row["iteration"]) for row in training})
    value = {(str(row["domain"]), int(row["iteration"])): float(row["mean_reward"]) for row in training}
    grid = [[value.get((domain, iteration), float("nan")) for iteration in iterations] for domain in domains]
    figure = Figure(figsize=(max(5.0, 1.5 + 0.4 * len(iterations)), 1.2 + 0.4 * len(domains)), layout="constrained")
    axes = figure.subplots()
    if grid:
        image = axes.imshow(grid, aspect="auto", vmin=0.0, vmax=1.0, cmap="viridis", interpolation="nearest")
        figure.colorbar(image, ax=axes, label="mean reward")
    every = max(1, len(iterations) // 20)
    axes.set_xticks(range(0, len(iterations), every), [str(i) for i in iterations[::every]])
    axes.set_yticks(range(len(domains)), domains)
    axes.set_xlabel("iteration")
    return _png(figure)


def _png(figure: Any) -> bytes:
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=110)
    return sink.getvalue()
