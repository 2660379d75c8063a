"""The gate: whether a table keeps its contract. The only home of Great Expectations, imported when a batch is checked.

Two readings of the same rules (data_contracts/suites/):
- `check_problems`, `check_group`, `check_scores`, `check_train_batch`: plain Python, microseconds an episode, no import; for
  rollout workers, which call it as a group is sealed, and for the start of a stage.
- `check_batch`: Great Expectations over the sealed tables of one iteration, with the Data Docs page that people read. About
  15 ms a rule; it may run in a thread beside training (`warm` imports ahead of time), one at a time.

All of them return findings; `quarantine.decide` says which groups go and whether the iteration stops. Nothing here sends
anything anywhere: analytics off, no cloud context, no progress bars. Data Docs pages load their style sheets from a public
CDN when a browser opens them; without a network they are plain but complete. One process at a time writes to a folder.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_contracts.records import Episode, Problem, Record, Score
from data_contracts.suites import episodes as episodes_suite
from data_contracts.suites import problems as problems_suite
from data_contracts.suites import scores as scores_suite
from data_contracts.suites import train_batch as train_batch_suite
from data_contracts.suites.rules import KEYS, Columns, Rule, Suite, Violation

KEEP_RUNS = 30
"""Passing runs of one table that Data Docs keeps; runs with findings stay for ever."""

_LOCK = threading.Lock()
_CONTEXTS: dict[Path, Any] = {}
_CHECKPOINTS: dict[tuple[Path, str], tuple[Suite, Any]] = {}


class TableReport(Record, frozen=True, kw_only=True):
    """What Great Expectations found in one table."""

    table: str
    rows: int
    expectations: int
    violations: tuple[Violation, ...]


class BatchReport(Record, frozen=True, kw_only=True):
    """One run of the gate over the tables of an iteration. `page` is the index.html of Data Docs on this machine."""

    run_name: str
    tables: tuple[TableReport, ...]
    page: str
    seconds: float

    @property
    def violations(self) -> tuple[Violation, ...]:
        return tuple(violation for table in self.tables for violation in table.violations)


# ----------------------------------------------------------------------------------------------------------------- cheap


def check_problems(
    problems: Sequence[Problem],
    *,
    domains: Collection[str] = (),
    max_prompt_tokens: int | None = None,
    prompt_tokens: Mapping[str, int] | None = None,
) -> list[Violation]:
    """The problem rules on a list of problems; the group of a problem is its own id."""
    suite = problems_suite.suite(domains=domains, max_prompt_tokens=max_prompt_tokens)
    return suite.violations(problems_suite.project(problems, prompt_tokens=prompt_tokens))


def check_group(episodes: Sequence[Episode], *, domains: Collection[str] = ()) -> list[Violation]:
    """The episode rules on one graded group (or several); cheap enough for the worker's event loop."""
    return episodes_suite.suite(domains=domains).violations(episodes_suite.project(episodes))


def check_scores(
    scores: Sequence[Score], *, episodes: Sequence[Episode] | None = None, low: float = 0.0, high: float = 1.0
) -> list[Violation]:
    """The score rules; with `episodes` also that exactly the graded episodes have one."""
    return scores_suite.suite(low=low, high=high).violations(scores_suite.project(scores, episodes=episodes))


def check_train_batch(
    episodes: Sequence[Episode],
    scores: Sequence[Score],
    *,
    max_tokens: int | None = None,
    vocabulary: int | None = None,
    versions: tuple[int, int] | None = None,
) -> list[Violation]:
    """The rules of the train batch, just before the trainer gets it. `versions`: oldest and newest policy version that may
    have sampled it."""
    suite = train_batch_suite.suite(max_tokens=max_tokens, vocabulary=vocabulary)
    return suite.violations(train_batch_suite.project(episodes, scores, versions=versions))


# ---------------------------------------------------------------------------------------------------- great expectations


def check_batch(
    folder: str | Path,
    *,
    run_name: str,
    problems: Sequence[Problem] | None = None,
    episodes: Sequence[Episode] | None = None,
    scores: Sequence[Score] | None = None,
    domains: Collection[str] = (),
    low: float = 0.0,
    high: float = 1.0,
    max_tokens: int | None = None,
    vocabulary: int | None = None,
    versions: tuple[int, int] | None = None,
) -> BatchReport:
    """Validate the given tables with Great Expectations and build their Data Docs pages below `folder`, once.

    The train batch is checked when both `episodes` and `scores` are given. `run_name` ("iteration 000003") heads the page.
    """
    tables: list[tuple[Suite, Columns]] = []
    if problems is not None:
        tables.append((problems_suite.suite(domains=domains), problems_suite.project(problems)))
    if episodes is not None:
        tables.append((episodes_suite.suite(domains=domains), episodes_suite.project(episodes)))
    if scores is not None:
        tables.append((scores_suite.suite(low=low, high=high), scores_suite.project(scores, episodes=episodes)))
    if scores is not None and episodes is not None:
        suite = train_batch_suite.suite(max_tokens=max_tokens, vocabulary=vocabulary)
        tables.append((suite, train_batch_suite.project(episodes, scores, versions=versions)))
    return validate(folder, run_name=run_name, tables=tables)


def validate(folder: str | Path, *, run_name: str, tables: Sequence[tuple[Suite, Columns]]) -> BatchReport:
    """Run Great Expectations over projections and build Data Docs once; the core of `check_batch`."""
    began = time.perf_counter()
    with _LOCK:
        root = Path(folder).resolve()
        context = _context(root)
        reports, pages = [], []
        for suite, columns in tables:
            report, page = _validate_one(root, context, suite, columns, run_name=run_name)
            reports.append(report)
            pages.append(page)
        _prune(root, tables=[suite.table for suite, _ in tables])
        context.build_data_docs(resource_identifiers=pages)
    index = root / "gx" / "uncommitted" / "data_docs" / "local_site" / "index.html"
    return BatchReport(run_name=run_name, tables=tuple(reports), page=str(index), seconds=time.perf_counter() - began)


def warm() -> None:
    """Import Great Expectations (4 s) ahead of the first `check_batch`, for example in a thread at start."""
    _great_expectations()


def _great_expectations() -> Any:
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    return importlib.import_module("great_expectations")


def _context(root: Path) -> Any:
    """The file context below `root`, opened once a process. Results and pages of earlier runs stay; definitions are written
    anew, because they come from the suites of this release."""
    if root not in _CONTEXTS:
        gx = _great_expectations()
        root.mkdir(parents=True, exist_ok=True)
        for stale in ("expectations", "validation_definitions", "checkpoints"):
            shutil.rmtree(root / "gx" / stale, ignore_errors=True)
        for stale in ("great_expectations.yml", "uncommitted/config_variables.yml"):
            (root / "gx" / stale).unlink(missing_ok=True)
        context = gx.get_context(mode="file", project_root_dir=str(root), cloud_mode=False)
        base = importlib.import_module("great_expectations.data_context.types.base")
        context.variables.progress_bars = base.ProgressBarsConfig(globally=False, metric_calculations=False)
        context.variables.analytics_enabled = False
        site = dict(context.variables.data_docs_sites["local_site"])
        site["show_how_to_buttons"] = False
        context.variables.data_docs_sites = {"local_site": site}
        context.variables.save()
        context.data_sources.add_pandas("tables")
        _CONTEXTS[root] = context
    return _CONTEXTS[root]


def _prune(root: Path, *, tables: Sequence[str]) -> None:
    """Forget passing runs beyond the newest `KEEP_RUNS` of a table: the index reads every result that is left."""
    for table in tables:
        results = root / "gx" / "uncommitted" / "validations" / table
        pages = root / "gx" / "uncommitted" / "data_docs" / "local_site" / "validations" / table
        runs = sorted(results.glob("*/*"), key=lambda run: run.name)
        for run in runs[:-KEEP_RUNS]:
            if all(json.loads(result.read_bytes())["success"] for result in run.glob("*.json")):
                for folder in (run, pages / run.parent.name / run.name):
                    shutil.rmtree(folder, ignore_errors=True)


def _checkpoint(root: Path, context: Any, suite: Suite) -> Any:
    """The stored checkpoint of a suite; declared again only when the suite differs from the one this process declared."""
    key = (root, suite.table)
    declared = _CHECKPOINTS.get(key)
    if declared is not None and declared[0] == suite:
        return declared[1]
    gx = _great_expectations()
    source = context.data_sources.get("tables")
    if declared is not None:
        for store in (context.checkpoints, context.validation_definitions, context.suites):
            store.delete(suite.table)
        source.delete_asset(suite.table)
    batch = source.add_dataframe_asset(suite.table).add_batch_definition_whole_dataframe("all")
    expectations = [gx.expectations.ExpectTableRowCountToBeBetween(min_value=suite.min_rows)]
    expectations += [_expectation(gx, rule) for rule in suite.rules]
    stored = context.suites.add(gx.ExpectationSuite(name=suite.table, expectations=expectations))
    definition = context.validation_definitions.add(gx.ValidationDefinition(name=suite.table, data=batch, suite=stored))
    checkpoint = context.checkpoints.add(
        gx.Checkpoint(
            name=suite.table,
            validation_definitions=[definition],
            actions=[],
            result_format={"result_format": "COMPLETE", "unexpected_index_column_names": list(KEYS)},
        )
    )
    _CHECKPOINTS[key] = (suite, checkpoint)
    return checkpoint


def _expectation(gx: Any, rule: Rule) -> Any:
    """The one expectation that says what `rule` says."""
    about = {"notes": f"{rule.field}: {rule.expected}. {rule.remedy}."}
    if rule.kind == "between":
        return gx.expectations.ExpectColumnValuesToBeBetween(
            column=rule.column, min_value=rule.low, max_value=rule.high, **about
        )
    if rule.kind == "unique":
        return gx.expectations.ExpectColumnValuesToBeUnique(column=rule.column, **about)
    values = list(rule.values) if rule.kind == "one_of" else [True]
    return gx.expectations.ExpectColumnValuesToBeInSet(column=rule.column, value_set=values, **about)


def _validate_one(root: Path, context: Any, suite: Suite, columns: Columns, *, run_name: str) -> tuple[TableReport, Any]:
    gx = _great_expectations()
    frame = importlib.import_module("pandas").DataFrame(columns)
    checkpoint = _checkpoint(root, context, suite)
    result = checkpoint.run(batch_parameters={"dataframe": frame}, run_id=gx.RunIdentifier(run_name=run_name))
    ((page, outcome),) = result.run_results.items()
    violations: list[Violation] = []
    rules: dict[tuple[str, str], Rule] = {(rule.column, rule.kind): rule for rule in suite.rules}
    for item in outcome.results:
        if item.success:
            continue
        setting = item.expectation_config
        if "column" not in setting.kwargs:
            violations.append(suite.too_few(len(frame)))
            continue
        rule = rules[setting.kwargs["column"], _kind(setting.type, setting.kwargs)]
        places = item.result.get("unexpected_index_list")
        if places is None:  # the expectation itself could not be computed
            violations.append(_broken(suite, rule, item))
            continue
        for place in places:
            violations.append(suite.violation(rule, columns, int(place["row"]) - 1))
    report = TableReport(table=suite.table, rows=len(frame), expectations=len(outcome.results), violations=tuple(violations))
    return report, page


def _kind(kind: str, kwargs: Mapping[str, Any]) -> str:
    if kind.endswith("_in_set"):
        return "holds" if list(kwargs["value_set"]) == [True] else "one_of"
    return "unique" if kind.endswith("_unique") else "between"


def _broken(suite: Suite, rule: Rule, item: Any) -> Violation:
    return Violation(
        table=suite.table,
        row=None,
        row_id="",
        group_id="",
        field=rule.field,
        found=f"a column that cannot be checked ({str(item.exception_info)[:200]})",
        expected=rule.expected,
        remedy=rule.remedy,
    )
