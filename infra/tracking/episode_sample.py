"""The few episodes of a sealed batch that are worth showing, read from the store without reading all of it."""

from __future__ import annotations

import msgspec

from data_contracts.errors import InputError
from data_contracts.protocols import Store, to_json
from data_contracts.records import EpisodesRef, EpisodeTelemetry, GroupShard
from data_contracts.tables import read_manifest, read_shard, read_telemetry
from infra.tracking.trace_plan import TracePlan, choose, plan, rewards_of


def sample_traces(store: Store, episodes: EpisodesRef, count: int, *, now: float) -> tuple[tuple[TracePlan, ...], bytes]:
    """`count` episodes as traces, and the same as JSON lines (files that the policy wrote are left out, the store has them).

    Raises what reading the store raises: ContractError or FileNotFoundError naming the object. Missing telemetry is no error.
    """
    manifest = read_manifest(store, episodes)
    rewards: dict[str, float | None] = {}
    domains: dict[str, str] = {}
    places: dict[str, tuple[GroupShard, int]] = {}
    for shard in manifest.shards:
        for member, reward in enumerate(rewards_of(shard)):
            key = f"{shard.group_id}/{member}"
            rewards[key], domains[key], places[key] = reward, shard.domain, (shard, member)
    traces: list[TracePlan] = []
    lines: list[bytes] = []
    for key in choose(rewards, domains, count):
        shard, member = places[key]
        group = read_shard(store, shard.uri, sha256=shard.sha256)
        episode = next((e for e in group if e.member == member), None)
        if episode is None:
            continue
        timing = _telemetry(store, shard).get(episode.id)
        traces.append(plan(episode, telemetry=timing, reward=rewards[key], now=now))
        lines.append(to_json(msgspec.structs.replace(episode, artifacts=())) + b"\n")
    return tuple(traces), b"".join(lines)


def _telemetry(store: Store, shard: GroupShard) -> dict[str, EpisodeTelemetry]:
    try:
        found = read_telemetry(store.get(shard.telemetry_uri), file=shard.telemetry_uri)
    except (FileNotFoundError, InputError):
        return {}
    return {entry.episode_id: entry for entry in found}
