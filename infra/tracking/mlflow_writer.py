"""Writes tracking operations to MLflow: the only file that imports it, and only when something is written.

Contract: every operation is idempotent, runs and traces are found again by tag, run ids are explicit (the fluent active run is
per thread and never used). Anything MLflow or the network raises passes through; infra/tracking/outbox.py deals with it.

Gap: traces go through MLflow's process-wide tracking URI, so one process writes to one server.
"""

from __future__ import annotations

import base64
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from data_contracts.protocols import to_json
from data_contracts.records import CheckpointRef, EvalReport
from infra.tracking import plots
from infra.tracking.figures import merge_rows, metric_name, overall_reward, rows_from_table, short_params, table_of
from infra.tracking.outbox import Operation
from infra.tracking.trace_plan import SpanPlan, TracePlan

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run, Span

MAX_METRICS = 60
"""Overall metrics on the campaign's run; more would make comparison pages unreadable."""
MODEL_PREFIX = "bessemer-"

log = logging.getLogger("bessemer.tracking")


class MlflowWriter:
    """Operations of one campaign against one tracking URI."""

    def __init__(self, uri: str, *, experiment: str, campaign: str) -> None:
        self.uri, self.experiment, self.campaign = uri, experiment, campaign
        self.experiment_id = ""
        self.runs: dict[str, str] = {}
        """"campaign" or an iteration's number -> run id, as far as known."""
        self._client_: MlflowClient | None = None

    def perform(self, operation: Operation) -> None:
        """Carry out one operation; raises what MLflow raises."""
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # the terminal shows our lines
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        import mlflow

        client = self._client()
        mlflow.set_tracking_uri(self.uri)
        getattr(self, f"_do_{operation['kind']}")(client, operation["body"], int(operation["at"] * 1000))

    def registered_checkpoints(self) -> set[str]:
        """Store keys that registered versions of any campaign name."""
        versions: list[Any] = []
        token = None
        while True:
            page = self._client().search_model_versions(f"name LIKE '{MODEL_PREFIX}%'", max_results=200, page_token=token)
            versions.extend(page)
            token = page.token
            if not token:
                return {v.tags["bessemer.checkpoint"] for v in versions if "bessemer.checkpoint" in v.tags}

    def _client(self) -> MlflowClient:
        if self._client_ is None:
            defaults = {
                "MLFLOW_DISABLE_TELEMETRY": "true",
                "DO_NOT_TRACK": "true",
                "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
                "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
                "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false",  # a full queue drops traces silently; four a time need none
                "GIT_PYTHON_REFRESH": "quiet",
            }
            for name, value in defaults.items():
                os.environ.setdefault(name, value)
            from mlflow import MlflowClient

            self._client_ = MlflowClient(self.uri)
        return self._client_

    def _experiment(self, client: MlflowClient) -> str:
        if not self.experiment_id:
            found = client.get_experiment_by_name(self.experiment)
            self.experiment_id = str(found.experiment_id if found else client.create_experiment(self.experiment))
        return self.experiment_id

    def _run(self, client: MlflowClient, iteration: int | None = None) -> str:
        """Id of the campaign's run or of one iteration's child run: remembered, found by tag, or created."""
        key = "campaign" if iteration is None else str(iteration)
        if key not in self.runs:
            tags = {"bessemer.campaign": self.campaign, "bessemer.kind": "campaign" if iteration is None else "iteration"}
            if iteration is not None:
                tags["bessemer.iteration"] = key
            search = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
            found = client.search_runs(
                [self._experiment(client)], search, max_results=1, order_by=["attributes.start_time ASC"]
            )
            if found:
                self.runs[key] = found[0].info.run_id
            else:
                name = self.campaign if iteration is None else f"{self.campaign} iteration {iteration:04d}"
                if iteration is not None:
                    tags["mlflow.parentRunId"] = self._run(client)
                made: Run = client.create_run(self._experiment(client), run_name=name, tags=tags)
                self.runs[key] = made.info.run_id
        return self.runs[key]

    def _do_start(self, client: MlflowClient, body: dict[str, Any], at: int) -> None:
        import yaml

        run = self._run(client)
        client.update_run(run, status="RUNNING")
        name = "config.yaml" if not body["resumed"] else f"config-resumed-{at}.yaml"
        client.log_text(run, yaml.safe_dump(body["config"], sort_keys=False, allow_unicode=True), name)
        have = client.get_run(run).data.params
        for key, value in short_params(body["config"]).items():
            if key not in have:
                client.log_param(run, key, value)

    def _do_iteration(self, client: MlflowClient, body: dict[str, Any], at: int) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag, Metric

        iteration = int(body["iteration"])
        parent, child = self._run(client), self._run(client, iteration)
        named = {metric_name(k): v for k, v in sorted(body["metrics"].items())}
        overall = dict(list(named.items())[:MAX_METRICS])
        if len(named) > MAX_METRICS:
            log.warning(
                "%d metrics given, %d shown on the campaign's run; the rest is with the iteration", len(named), MAX_METRICS
            )
        client.log_batch(parent, metrics=[Metric(k, v, at, iteration) for k, v in overall.items()])
        client.log_batch(child, metrics=[Metric(k, v, at, iteration) for k, v in list(named.items())[:1000]])
        inputs = []
        for name, where in body["datasets"].items():
            source, _, sha256 = where.rpartition("@")
            source_json = msgspec.json.encode({"uri": source or name, "sha256": sha256}).decode()
            dataset = Dataset(name=name, digest=sha256[:36], source_type="bessemer-store", source=source_json)
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", "training")]))
        if inputs:
            client.log_inputs(child, datasets=inputs)
        for name, encoded in body["artifacts"].items():
            self._put(client, child, name, base64.b64decode(encoded))
        rows = [{"iteration": iteration, "domain": domain, **figures} for domain, figures in body["per_domain"].items()]
        training = self._table(client, "per_domain.json", rows, keys=("iteration", "domain"))
        self._draw(client, training, self._table(client, "heldout.json", [], keys=("version", "domain")))
        client.set_terminated(child, "FINISHED")

    def _do_episodes(self, client: MlflowClient, body: dict[str, Any], at: int) -> None:
        child = self._run(client, int(body["iteration"]))
        self._put(client, child, "episodes/store.json", msgspec.json.format(to_json(body["ref"]), indent=2))
        self._put(client, child, "episodes/sample.jsonl", body["lines"].encode())
        for plan in msgspec.convert(body["traces"], type=tuple[TracePlan, ...]):
            self._trace(client, child, plan)

    def _do_evaluation(self, client: MlflowClient, body: dict[str, Any], at: int) -> None:
        from mlflow.entities import Metric

        report = msgspec.convert(body["report"], type=EvalReport)
        rows = [
            {"version": report.version, "step": body["step"], **{k: v for k, v in d.items() if k != "rewards"}}
            for d in msgspec.to_builtins(report.domains)
        ]
        run = self._run(client)
        client.log_batch(run, metrics=[Metric("heldout/mean_reward", overall_reward(report), at, int(body["step"]))])
        heldout = self._table(client, "heldout.json", rows, keys=("version", "domain"))
        self._put(client, run, f"evaluations/v{report.version:06d}.json", msgspec.json.format(to_json(report), indent=2))
        self._draw(client, self._table(client, "per_domain.json", [], keys=("iteration", "domain")), heldout)

    def _do_candidate(self, client: MlflowClient, body: dict[str, Any], at: int) -> None:
        from mlflow.exceptions import MlflowException

        checkpoint = msgspec.convert(body["checkpoint"], type=CheckpointRef)
        report = msgspec.convert(body["report"], type=EvalReport)
        name, run = f"{MODEL_PREFIX}{self.campaign}", self._run(client)
        folder = f"candidates/v{checkpoint.version:06d}"
        self._put(client, run, f"{folder}/reference.json", msgspec.json.format(to_json(checkpoint), indent=2))
        try:
            client.get_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            client.create_registered_model(name, description=f"Policy versions of the Bessemer campaign '{self.campaign}'.")
        known = {v.tags.get("bessemer.version"): v for v in client.search_model_versions(f"name = '{name}'")}
        version = known.get(str(checkpoint.version))
        if version is None:
            tags = {
                "bessemer.version": str(checkpoint.version),
                "bessemer.checkpoint": checkpoint.uri,
                "bessemer.sha256": checkpoint.sha256,
                "bessemer.bytes": str(checkpoint.size),
                "bessemer.mean_reward": repr(overall_reward(report)),
            }
            source = f"{client.get_run(run).info.artifact_uri}/{folder}"
            version = client.create_model_version(name, source, run_id=run, tags=tags, await_creation_for=0)
            known[str(checkpoint.version)] = version
        client.set_registered_model_alias(name, "candidate", version.version)
        best = max(known.values(), key=lambda v: (float(v.tags.get("bessemer.mean_reward", "-inf")), int(v.version)))
        client.set_registered_model_alias(name, "best", best.version)

    def _do_finish(self, client: MlflowClient, body: dict[str, Any], at: int) -> None:
        client.set_terminated(self._run(client), body["status"], end_time=at)

    # -------------------------------------------------------------------------------------------------------- pieces

    def _put(self, client: MlflowClient, run: str, name: str, data: bytes) -> None:
        folder, _, file = name.rpartition("/")
        with tempfile.TemporaryDirectory(prefix="bessemer-") as temporary:
            path = Path(temporary) / file
            path.write_bytes(data)
            client.log_artifact(run, str(path), folder or None)

    def _table(
        self, client: MlflowClient, name: str, rows: list[dict[str, Any]], *, keys: tuple[str, ...]
    ) -> list[dict[str, Any]]:
        """All rows of a table artifact of the campaign's run, after `rows` replaced those of equal keys."""
        run = self._run(client)
        held: list[dict[str, Any]] = []
        if any(item.path == name for item in client.list_artifacts(run)):
            with tempfile.TemporaryDirectory(prefix="bessemer-") as temporary:
                table = msgspec.json.decode(Path(client.download_artifacts(run, name, temporary)).read_bytes())
            held = rows_from_table(table)
        if not rows:
            return held
        merged = merge_rows(held, rows, keys=keys)
        self._put(client, run, name, msgspec.json.encode(table_of(merged, first=keys)))
        shown = msgspec.json.encode([{"path": n, "type": "table"} for n in ("per_domain.json", "heldout.json")]).decode()
        client.set_tag(run, "mlflow.loggedArtifacts", shown)
        return merged

    def _draw(self, client: MlflowClient, training: list[dict[str, Any]], heldout: list[dict[str, Any]]) -> None:
        run = self._run(client)
        drawn = [row for row in training if "mean_reward" in row]
        if drawn or heldout:
            self._put(client, run, "plots/reward_per_domain.png", plots.over_iterations(drawn, heldout))
        if drawn:
            self._put(client, run, "plots/reward_heat_map.png", plots.heat_map(drawn))

    def _trace(self, client: MlflowClient, run: str, plan: TracePlan) -> None:
        """One trace, unless an earlier delivery made it; its reward as feedback."""
        import mlflow
        from mlflow.entities import AssessmentSource

        mark = f"tags.`bessemer.episode` = '{plan.episode_id}'"
        found = client.search_traces(locations=[self._experiment(client)], filter_string=mark, max_results=1)
        if found:
            trace_id, rated = found[0].info.trace_id, bool(found[0].info.assessments)
        else:
            root = client.start_trace(
                name=plan.root.name,
                span_type=plan.root.kind,
                inputs=plan.root.inputs,
                attributes=plan.root.attributes,
                tags=dict(plan.tags),
                experiment_id=self._experiment(client),
                start_time_ns=_ns(plan.root.start),
                run_id=run,
            )
            trace_id, rated = root.trace_id, False
            for child in plan.root.children:
                self._span(client, root, child)
            client.end_trace(trace_id, outputs=plan.root.outputs, status=_status(plan.root), end_time_ns=_ns(plan.root.stop))
        if plan.reward is not None and not rated:
            source = AssessmentSource(source_type="CODE", source_id="bessemer")
            mlflow.log_feedback(trace_id=trace_id, name="reward", value=plan.reward, source=source, rationale=plan.rationale)

    def _span(self, client: MlflowClient, parent: Span, plan: SpanPlan) -> None:
        span = client.start_span(
            plan.name,
            parent.trace_id,
            parent.span_id,
            span_type=plan.kind,
            inputs=plan.inputs,
            attributes=plan.attributes,
            start_time_ns=_ns(plan.start),
        )
        for child in plan.children:
            self._span(client, span, child)
        client.end_span(span.trace_id, span.span_id, plan.outputs, status=_status(plan), end_time_ns=_ns(plan.stop))


def _ns(seconds: float) -> int:
    return int(seconds * 1_000_000_000)


def _status(plan: SpanPlan) -> str:
    return "ERROR" if plan.failed else "OK"
