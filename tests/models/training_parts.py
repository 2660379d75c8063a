"""What the trainer's tests share: a small random Llama in float32 and stored-looking episodes of one or more groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data_contracts.protocols import Store
from data_contracts.records import BatchManifest, Episode, EpisodesRef, GroupShard, Score, ScoresRef, Verdict
from data_contracts.tables import put_group, put_manifest, put_scores

VOCABULARY = 97


def small_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).float().eval()


def small_folder(folder: Path, seed: int = 0) -> Path:
    """A model folder as the base-model resolver leaves it: weights, config, and something that stands for a tokenizer."""
    small_model(seed).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def make_episode(ids: list[int], mask: list[int], *, group: str, member: int, seed: int = 0, **changes: Any) -> Episode:
    noise = np.random.default_rng([seed, member]).uniform(-0.1, 0.1, len(ids))
    fields: dict[str, Any] = {
        "id": f"{group}/{member}",
        "group_id": group,
        "problem_id": f"echo/train/{group}",
        "domain": "echo",
        "split": "train",
        "campaign": "c",
        "iteration": 0,
        "member": member,
        "prompt": (),
        "tools": (),
        "token_ids_T": tuple(ids),
        "loss_mask_T": tuple(mask),
        "logprobs_T": tuple(float(-4 + n) if m else 0.0 for n, m in zip(noise, mask, strict=True)),
        "prompt_length": mask.index(1) if 1 in mask else len(mask),
        "spans": (),
        "turns": (),
        "stop_reason": "answered",
        "outcome": "scored",
        "verdict": Verdict(verifier="v", trust="cases", score=0.0, passed=False, checks=()),
    }
    return Episode(**(fields | changes))


def make_group(group: str, *, size: int = 4, prompt: int = 7, seed: int = 0, turns: int = 1, **changes: Any) -> list[Episode]:
    """Episodes with one prompt; with several turns, observation tokens (mask 0) lie between what the policy wrote."""
    rng = np.random.default_rng([seed, *group.encode()])
    shared = rng.integers(0, VOCABULARY, prompt).tolist()
    episodes = []
    for member in range(size):
        ids, mask = list(shared), [0] * prompt
        for turn in range(turns):
            length = int(rng.integers(2, 9))
            ids += rng.integers(0, 5 if turn == 0 else VOCABULARY, length).tolist()
            mask += [1] * length
            if turn + 1 < turns:
                ids += [90, 91, 92]
                mask += [0] * 3
        episodes.append(make_episode(ids, mask, group=group, member=member, seed=seed, **changes))
    return episodes


def make_scores(episodes: list[Episode], seed: int = 0, rewards: list[float] | None = None) -> list[Score]:
    drawn = rewards or np.random.default_rng(seed).integers(0, 3, len(episodes)).astype(float).tolist()
    return [
        Score(
            episode_id=e.id, group_id=e.group_id, problem_id=e.problem_id, domain=e.domain, reward=r, components={"verdict": r}
        )
        for e, r in zip(episodes, drawn, strict=True)
    ]


def store_batch(
    store: Store, *, iteration: int, groups: int = 3, seed: int = 0, rewards: list[float] | None = None
) -> tuple[EpisodesRef, ScoresRef]:
    """A sealed batch and its scores, as the rollout and score stages leave them."""
    shards, everything = [], []
    for order in range(groups):
        episodes = make_group(f"g{order}", seed=seed + 100 * iteration, iteration=iteration)
        uri = f"campaigns/c/iterations/{iteration:06d}/groups/{order:04d}.parquet"
        ref = put_group(store, uri, episodes)
        everything += episodes
        shards.append(
            GroupShard(
                group_id=f"g{order}",
                problem_id=f"echo/train/g{order}",
                domain="echo",
                order=order,
                uri=ref.uri,
                sha256=ref.sha256,
                rows=ref.rows,
                telemetry_uri="",
                disposition="kept",
                rewards_G=(),
                outcomes_G=("scored",) * len(episodes),
                sampled_tokens=0,
            )
        )
    manifest = BatchManifest(campaign="c", iteration=iteration, shards=tuple(shards), discarded=(), unused_problem_ids=())
    scores = make_scores(everything, seed=seed + iteration, rewards=rewards)
    return (
        put_manifest(store, f"campaigns/c/iterations/{iteration:06d}/episodes.json", manifest),
        put_scores(store, f"campaigns/c/iterations/{iteration:06d}/scores.parquet", scores),
    )
