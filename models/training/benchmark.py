"""Seconds of one training step on synthetic groups, packed against separate rows: `python -m models.training.benchmark --help`.

Tokens are random, which training time does not notice, but sharing does: only the prompts are shared, as with a policy that
never says the same thing twice. Prints one JSON line a measurement; CPU seconds (over all threads) are the figure to compare
on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from typing import Any

import numpy as np
import torch

from data_contracts.config import AlgorithmConfig, TrainConfig
from models.base_model import resolve
from models.training.batch import TokenSequence, TrainBatch
from models.training.group import deterministic
from models.training.learner import Learner
from models.training.step import train_step


def synthetic_batch(
    *, groups: int, size: int, prompt: int, shortest: int, longest: int, vocabulary: int, seed: int = 0
) -> TrainBatch:
    """`groups` x `size` episodes with one prompt a group and completions of `shortest` to `longest` tokens."""
    rng = np.random.default_rng(seed)
    sequences, advantages = [], []
    for group in range(groups):
        shared = rng.integers(10, vocabulary, prompt)
        for member in range(size):
            written = int(rng.integers(shortest, longest + 1))
            sequences.append(
                TokenSequence(
                    episode_id=f"{group}/{member}",
                    group_id=str(group),
                    token_ids=np.concatenate([shared, rng.integers(10, vocabulary, written)]),
                    targets=np.arange(prompt, prompt + written),
                    logprobs=np.full(written, -10.0),
                )
            )
            advantages.append(1.0 if member % 2 else -1.0)
    return TrainBatch(
        sequences_E=tuple(sequences),
        rewards_E=np.maximum(np.array(advantages), 0),
        advantages_E=np.array(advantages),
    )


def measure(learner: Learner, batch: TrainBatch, *, budget: int, share: bool) -> dict[str, Any]:
    """One step with a negligible learning rate; returns its figures."""
    train = TrainConfig(learning_rate=1e-9, micro_batch_tokens=budget)
    start, cpu = time.perf_counter(), time.process_time()
    metrics = train_step(learner, batch, train=train, algorithm=AlgorithmConfig(), share=share).metrics
    return {
        "share": share,
        "micro_batch_tokens": budget,
        "seconds": round(time.perf_counter() - start, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "trained_tokens": int(metrics["trained_tokens"]),
        "forward_tokens": int(metrics["forward_tokens"]),
        "trained_tokens_per_second": round(metrics["tokens_per_second"], 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of one training step")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=44)
    parser.add_argument("--shortest", type=int, default=16)
    parser.add_argument("--longest", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budgets", type=int, nargs="+", default=[4096])
    parser.add_argument("--ways", choices=["packed", "separate", "both"], default="both")
    chosen = parser.parse_args()
    deterministic(chosen.threads)
    learner = Learner(resolve(chosen.model))
    batch = synthetic_batch(
        groups=chosen.groups,
        size=chosen.size,
        prompt=chosen.prompt,
        shortest=chosen.shortest,
        longest=chosen.longest,
        vocabulary=learner.model.config.vocab_size,
    )
    warm = synthetic_batch(
        groups=1, size=2, prompt=8, shortest=4, longest=4, vocabulary=learner.model.config.vocab_size, seed=1
    )
    measure(learner, warm, budget=4096, share=True)  # the optimizer's state is allocated here
    shares = {"packed": [True], "separate": [False], "both": [True, False]}[chosen.ways]
    for budget in chosen.budgets:
        for share in shares:
            figures = measure(learner, batch, budget=budget, share=share)
            about = {"model": chosen.model, "groups": chosen.groups, "size": chosen.size, "prompt": chosen.prompt}
            sys.stdout.write(json.dumps(about | {"threads": torch.get_num_threads()} | figures) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
