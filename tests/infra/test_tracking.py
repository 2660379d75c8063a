"""The tracker against a real MLflow server."""

import json
import logging
from pathlib import Path

import msgspec
import pytest
from mlflow import MlflowClient

from data_contracts import tables
from data_contracts.config import TrackConfig
from data_contracts.records import (
    BatchManifest,
    Check,
    CheckpointRef,
    DomainEval,
    Episode,
    EpisodesRef,
    EpisodeTelemetry,
    EvalReport,
    GroupShard,
    Interval,
    Message,
    ToolCall,
    Turn,
    Verdict,
    VersionSpan,
)
from infra import processes
from infra.store import MemoryStore
from infra.tracking import MlflowTracker, NullTracker, TrackerUnreachable, open_tracker
from tests.plugins.mlflow import MlflowServer

CONFIG = {
    "base_model": "tiny",
    "seed": 7,
    "domains": [{"name": "calculator", "settings": {"note": "x" * 20_000}}],
    "algorithm": {"name": "grpo"},
}


def episode(member: int, *, score: float, iteration: int = 0) -> Episode:
    call = ToolCall(call_id="c1", name="calculator", arguments='{"expression": "1+"}')
    turns = (
        Turn(
            index=0,
            message=Message(role="assistant", content="", tool_calls=(call,)),
            token_start=3,
            token_stop=5,
            finish_reason="stop",
            observations=(Message(role="tool", content="error: incomplete", tool_call_id="c1", name="calculator"),),
        ),
        Turn(
            index=1,
            message=Message(role="assistant", content="42"),
            token_start=6,
            token_stop=8,
            finish_reason="stop",
        ),
    )
    return Episode(
        id=f"it{iteration}-g0-{member}",
        group_id="g0",
        problem_id="calculator/1",
        domain="calculator",
        split="train",
        campaign="c",
        iteration=iteration,
        member=member,
        prompt=(Message(role="user", content="What is 6 * 7?"),),
        tools=(),
        token_ids_T=(1, 2, 3, 4, 5, 6, 7, 8),
        loss_mask_T=(0, 0, 0, 1, 1, 0, 1, 1),
        logprobs_T=(0.0, 0.0, 0.0, -0.5, -0.5, 0.0, -0.1, -0.1),
        prompt_length=3,
        spans=(VersionSpan(start=3, stop=8, version=0),),
        turns=turns,
        stop_reason="answered",
        outcome="scored",
        verdict=Verdict(
            verifier="exact_answer",
            trust="cases",
            score=score,
            passed=score == 1.0,
            checks=(Check(id="answer", passed=score == 1.0),),
        ),
    )


def telemetry(one: Episode) -> EpisodeTelemetry:
    kinds = ("sampling", "environment", "sampling", "grading")
    return EpisodeTelemetry(
        episode_id=one.id,
        attempt_id="a",
        attempt=1,
        worker="w",
        engine="e",
        started_at=1_700_000_000.0,
        finished_at=1_700_000_004.0,
        sampled_tokens=4,
        intervals=tuple(
            Interval(kind=kind, start=1_700_000_000.0 + n, stop=1_700_000_001.0 + n) for n, kind in enumerate(kinds)
        ),
    )


def sealed(store: MemoryStore, *, iteration: int = 0) -> EpisodesRef:
    group = [episode(member, score=float(member % 2), iteration=iteration) for member in range(4)]
    folder = f"campaigns/c/iterations/{iteration:06d}"
    ref = tables.put_group(store, f"{folder}/groups/0000-aaaa.parquet", group)
    telemetry_uri = f"{folder}/groups/0000-aaaa.telemetry.json"
    store.put(telemetry_uri, tables.write_telemetry(telemetry(one) for one in group))
    shard = GroupShard(
        group_id="g0",
        problem_id="calculator/1",
        domain="calculator",
        order=0,
        uri=ref.uri,
        sha256=ref.sha256,
        rows=4,
        telemetry_uri=telemetry_uri,
        disposition="kept",
        rewards_G=(0.0, 1.0, 0.0, 1.0),
        outcomes_G=("scored",) * 4,
        sampled_tokens=16,
    )
    manifest = BatchManifest(campaign="c", iteration=iteration, shards=(shard,), discarded=(), unused_problem_ids=())
    return tables.put_manifest(store, f"{folder}/episodes.json", manifest)


def report(version: int, reward: float) -> EvalReport:
    domain = DomainEval(
        domain="calculator",
        episodes=4,
        mean_reward=reward,
        low=reward - 0.1,
        high=reward + 0.1,
        pass_rate=reward,
        rewards={"p": reward},
    )
    return EvalReport(campaign="c", version=version, domains=(domain,), episodes=EpisodesRef(uri="e", sha256="0" * 64, rows=4))


def checkpoint(campaign: str, version: int) -> CheckpointRef:
    return CheckpointRef(uri=f"campaigns/{campaign}/checkpoints/v{version:06d}", sha256="a" * 64, version=version, size=1234)


def log_one_iteration(tracker: MlflowTracker, iteration: int, *, reward: float) -> None:
    tracker.log_iteration(
        iteration,
        metrics={"reward/mean": reward, "loss": 0.1, "odd name (%)": 1.0},
        per_domain={"calculator": {"mean_reward": reward, "groups": 4.0}},
        datasets={"episodes": f"campaigns/c/iterations/{iteration:06d}/episodes.json@{'b' * 64}"},
        artifacts={"report.md": b"# hello"},
    )


def run_of(client: MlflowClient, experiment: str, campaign: str, kind: str):
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    where = f"tags.`bessemer.campaign` = '{campaign}' and tags.`bessemer.kind` = '{kind}'"
    return client.search_runs([found.experiment_id], where)


def test_a_campaign_leaves_runs_tables_plots_datasets_traces_and_a_registered_version(
    mlflow_server: MlflowServer, tmp_path: Path
) -> None:
    tracker = MlflowTracker(mlflow_server.uri, experiment="whole", home=tmp_path)
    store = MemoryStore()
    tracker.start_campaign("whole", config=CONFIG, resumed=False)
    for iteration, reward in enumerate((0.25, 0.5)):
        log_one_iteration(tracker, iteration, reward=reward)
        tracker.log_episodes(iteration, sealed(store, iteration=iteration), store=store, sample=2)
        tracker.log_evaluation(report(iteration, reward), step=iteration)
        tracker.register_candidate(checkpoint("whole", iteration), report=report(iteration, 0.9 - reward))
    tracker.finish_campaign("FINISHED")

    client = MlflowClient(mlflow_server.uri)
    (parent,) = run_of(client, "whole", "whole", "campaign")
    assert parent.info.status == "FINISHED"
    assert [m.value for m in client.get_metric_history(parent.info.run_id, "reward/mean")] == [0.25, 0.5]
    assert [m.step for m in client.get_metric_history(parent.info.run_id, "heldout/mean_reward")] == [0, 1]
    assert "odd_name____" in parent.data.metrics
    assert parent.data.params["domains"] == "calculator"
    names = {item.path for item in client.list_artifacts(parent.info.run_id)}
    assert {"config.yaml", "per_domain.json", "heldout.json", "plots"} <= names
    config = Path(client.download_artifacts(parent.info.run_id, "config.yaml", str(tmp_path))).read_text()
    assert "x" * 20_000 in config
    table = json.loads(Path(client.download_artifacts(parent.info.run_id, "per_domain.json", str(tmp_path))).read_text())
    assert table["data"] == [[0, "calculator", 0.25, 4.0], [1, "calculator", 0.5, 4.0]]
    plots = {item.path: item.file_size for item in client.list_artifacts(parent.info.run_id, "plots")}
    assert set(plots) == {"plots/reward_per_domain.png", "plots/reward_heat_map.png"}
    assert all(size > 3_000 for size in plots.values())

    children = run_of(client, "whole", "whole", "iteration")
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {parent.info.run_id}
    assert {child.info.status for child in children} == {"FINISHED"}
    assert len(children) == 2
    (given,) = client.get_run(children[0].info.run_id).inputs.dataset_inputs
    assert given.dataset.name == "episodes"
    assert given.dataset.digest == "b" * 36
    sample = client.download_artifacts(children[0].info.run_id, "episodes/sample.jsonl", str(tmp_path))
    shown = [msgspec.json.decode(line, type=Episode) for line in Path(sample).read_bytes().splitlines()]
    assert [one.verdict.score for one in shown if one.verdict] == [1.0, 0.0]

    traces = client.search_traces(locations=[parent.info.experiment_id])
    assert len(traces) == 4
    trace = client.get_trace(traces[0].info.trace_id)
    assert [span.name for span in trace.data.spans][1:] == ["turn 0", "calculator", "turn 1", "verify: exact_answer"]
    assert [span.span_type for span in trace.data.spans] == ["AGENT", "CHAT_MODEL", "TOOL", "CHAT_MODEL", "EVALUATOR"]
    assert trace.data.spans[0].start_time_ns == 1_700_000_000 * 10**9
    assert trace.info.execution_duration == 4_000
    (feedback,) = trace.info.assessments
    assert (feedback.name, feedback.feedback.value in (0.0, 1.0)) == ("reward", True)

    assert client.get_model_version_by_alias("bessemer-whole", "candidate").tags["bessemer.version"] == "1"
    assert client.get_model_version_by_alias("bessemer-whole", "best").tags["bessemer.version"] == "0"
    assert {checkpoint("whole", 0).uri, checkpoint("whole", 1).uri} <= tracker.registered_checkpoints()
    assert tracker.links()["mlflow_run"].endswith(parent.info.run_id)
    assert not list((tmp_path / "tracking_buffer").glob("*"))


def test_a_resumed_campaign_goes_on_in_its_run_and_repeats_nothing(mlflow_server: MlflowServer, tmp_path: Path) -> None:
    store = MemoryStore()
    for resumed in (False, True):
        tracker = MlflowTracker(mlflow_server.uri, experiment="resumed", home=tmp_path)
        tracker.start_campaign("resumed", config={**CONFIG, "seed": int(resumed)}, resumed=resumed)
        log_one_iteration(tracker, 0, reward=0.5)
        tracker.log_episodes(0, sealed(store), store=store, sample=1)
        tracker.register_candidate(checkpoint("resumed", 1), report=report(1, 0.5))
    client = MlflowClient(mlflow_server.uri)
    (parent,) = run_of(client, "resumed", "resumed", "campaign")
    assert parent.info.status == "RUNNING"
    assert len(run_of(client, "resumed", "resumed", "iteration")) == 1
    assert len(client.search_traces(locations=[parent.info.experiment_id])) == 1
    assert len(client.search_model_versions("name = 'bessemer-resumed'")) == 1
    table = json.loads(Path(client.download_artifacts(parent.info.run_id, "per_domain.json", str(tmp_path))).read_text())
    assert len(table["data"]) == 1


def test_an_outage_is_buffered_reported_once_and_replayed(
    mlflow_server: MlflowServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away = f"http://127.0.0.1:{processes.free_port()}"
    tracker = MlflowTracker(away, experiment="outage", home=tmp_path)
    store = MemoryStore()
    with caplog.at_level(logging.WARNING, logger="bessemer.tracking"):
        tracker.start_campaign("outage", config=CONFIG, resumed=False)
        log_one_iteration(tracker, 0, reward=0.5)
        tracker.log_episodes(0, sealed(store), store=store, sample=1)
        tracker.register_candidate(checkpoint("outage", 1), report=report(1, 0.5))
    assert len(caplog.records) == 1
    assert "training goes on" in caplog.text
    assert tracker.links() == {"mlflow": away}
    with pytest.raises(TrackerUnreachable, match="bessemer up"):
        tracker.registered_checkpoints()

    later = MlflowTracker(mlflow_server.uri, experiment="outage", home=tmp_path)  # back, and seen by another process
    later.start_campaign("outage", config=CONFIG, resumed=True)
    assert later.flush() == 0
    client = MlflowClient(mlflow_server.uri)
    (parent,) = run_of(client, "outage", "outage", "campaign")
    assert client.get_metric_history(parent.info.run_id, "loss")[0].step == 0
    assert len(client.search_traces(locations=[parent.info.experiment_id])) == 1
    assert checkpoint("outage", 1).uri in later.registered_checkpoints()


def test_what_a_healthy_server_refuses_is_set_aside_and_holds_nothing_up(mlflow_server: MlflowServer, tmp_path: Path) -> None:
    tracker = MlflowTracker(mlflow_server.uri, experiment="refused", home=tmp_path)
    tracker.start_campaign("refused", config=CONFIG, resumed=False)
    tracker.finish_campaign("NO SUCH STATUS")
    for iteration in range(3):
        log_one_iteration(tracker, iteration, reward=0.5)
    (kept,) = (tmp_path / "tracking_buffer").iterdir()
    assert kept.name == "refused.rejected.jsonl"
    (parent,) = run_of(MlflowClient(mlflow_server.uri), "refused", "refused", "campaign")
    assert parent.data.metrics["loss"] == 0.1


def test_no_address_means_a_tracker_that_tracks_nothing(tmp_path: Path) -> None:
    tracker = open_tracker(None, TrackConfig(), tmp_path)
    assert isinstance(tracker, NullTracker)
    tracker.start_campaign("none", config={}, resumed=False)
    assert tracker.links() == {}
    assert tracker.registered_checkpoints() == set()


def test_unreadable_episodes_are_reported_not_raised(
    mlflow_server: MlflowServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = MlflowTracker(mlflow_server.uri, experiment="gone", home=tmp_path)
    tracker.start_campaign("gone", config=CONFIG, resumed=False)
    tracker.log_episodes(3, EpisodesRef(uri="absent.json", sha256="0" * 64, rows=1), store=MemoryStore(), sample=1)
    assert "absent.json" in caplog.text
