"""Figures in the shapes that a tracker shows: names, a few short parameters, tables that grow by iteration. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from data_contracts.records import EvalReport

Row = dict[str, Any]
PARAM_LIMIT = 200
"""Characters of one parameter; the whole configuration is an artifact."""


def metric_name(name: str) -> str:
    """A name that trackers accept: letters, digits, and _ - . / ; anything else becomes _."""
    return re.sub(r"[^A-Za-z0-9_\-./]", "_", name)


def overall_reward(report: EvalReport) -> float:
    """Mean held-out reward over domains, each counted once; NaN without domains."""
    return sum(d.mean_reward for d in report.domains) / len(report.domains) if report.domains else math.nan


def short_params(config: Mapping[str, Any]) -> dict[str, str]:
    """What tells campaigns apart in a list of runs, from a campaign's configuration as builtins; absent fields are left out."""
    places = {
        "base_model": ("base_model",),
        "seed": ("seed",),
        "max_staleness": ("max_staleness",),
        "algorithm": ("algorithm", "name"),
        "aggregation": ("algorithm", "aggregation"),
        "learning_rate": ("train", "learning_rate"),
        "groups": ("curate", "groups"),
        "group_size": ("rollout", "group_size"),
        "temperature": ("rollout", "temperature"),
    }
    found: dict[str, str] = {}
    for name, path in places.items():
        value: Any = config
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            found[name] = str(value)[:PARAM_LIMIT]
    domains = [str(d.get("name")) for d in config.get("domains", ()) if isinstance(d, Mapping)]
    if domains:
        found["domains"] = ", ".join(domains)[:PARAM_LIMIT]
    return found


def merge_rows(held: Sequence[Row], fresh: Sequence[Row], *, keys: Sequence[str]) -> list[Row]:
    """`held` with rows of equal keys replaced by `fresh`, sorted by keys: logging an iteration twice changes nothing."""
    replaced = {tuple(row[k] for k in keys) for row in fresh}
    merged = [row for row in held if tuple(row[k] for k in keys) not in replaced] + list(fresh)
    return sorted(merged, key=lambda row: tuple(row[k] for k in keys))


def table_of(rows: Sequence[Row], *, first: Sequence[str]) -> dict[str, Any]:
    """Columns and data in the layout of pandas' "split" form; numbers that JSON cannot hold become null."""
    columns = list(dict.fromkeys([*first, *(column for row in rows for column in row)]))
    return {"columns": columns, "data": [[_finite(row.get(column)) for column in columns] for row in rows]}


def rows_from_table(table: Mapping[str, Any]) -> list[Row]:
    """The inverse of `table_of`; null cells are left out."""
    return [{k: v for k, v in zip(table["columns"], line, strict=True) if v is not None} for line in table["data"]]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
