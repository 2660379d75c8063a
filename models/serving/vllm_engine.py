"""Weight updates on vLLM replicas, each one proven (rule 7).

For every replica that does not already serve the version with a proof of ours: wait until it is healthy (a lone replica may be
restarting; of several, those that do not answer are left out), pause (requests in flight freeze), label it as being proven,
reload from the store, drop the prefix cache, resume, decode probe tokens. Then the trainer scores the same tokens under new and
old weights and `proof.judge` decides. Accepted replicas get the version's label; the others are paused again and named in the
result ("taken out"). Samplers draw again what was drawn in between.

Proofs are remembered by this object only: a new process proves again, which is also what brings a restarted replica up to date.
A failed replica is tried again at the next call.

Gap: replicas load the folder that `store.local_path` gives, so they must see the same file system.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from data_contracts.config import PublishConfig
from data_contracts.errors import InfraError, PublishRefused
from data_contracts.protocols import Store, Trainer
from data_contracts.records import CheckpointRef, Interval, PublishResult, ReplicaProof
from models.serving.proof import judge, refused
from models.serving.versions import PROVING, label_of
from models.serving.vllm_control import ReplicaControl

_PROBES = 16
_PROMPT_TOKENS = 12
_WAITING_SHARE = 0.8
_GRACE_SECONDS = 5.0
_SETTLE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class _Probe:
    """What a replica sampled after its reload: whole sequences (prompt first), log-probabilities of the sampled part."""

    sequences: list[list[int]]
    sampled: list[int]
    logprobs_T: list[float]
    replaced: dict[str, str] | None
    """Checksums before the reload, when the replica then served the parent; else None."""
    checksums: dict[str, str]


class _Patience:
    """How long to wait for replicas that do not answer. All are waited for while none is healthy (a lone replica may be
    restarting), with time kept for the update itself; once one is healthy the others get a short grace."""

    def __init__(self, seconds: float) -> None:
        now = time.monotonic()
        self.deadline = now + seconds
        self._give_up = now + seconds * _WAITING_SHARE
        self._lock = threading.Lock()

    def give_up(self) -> float:
        with self._lock:
            return self._give_up

    def seen_healthy(self) -> None:
        with self._lock:
            self._give_up = min(self._give_up, time.monotonic() + _GRACE_SECONDS)


class VllmEngine:
    """The control side of the replicas at `addresses` (http://host:port each)."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        store: Store,
        trainer: Trainer,
        config: PublishConfig,
        dtype: str = "float32",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.addresses = [address.rstrip("/") for address in addresses]
        self._store, self._trainer, self._config, self._dtype, self._clock = store, trainer, config, dtype, clock
        self._proven: dict[str, tuple[str, str, ReplicaProof]] = {}
        self._updating = threading.Lock()

    def ensure_serving(self, checkpoint: CheckpointRef, *, campaign: str, parent: CheckpointRef | None) -> PublishResult:
        """Make every healthy replica serve `checkpoint` and prove it; replicas that already do are left alone.

        `parent` is the previous version, for the second half of the proof (None for version 0). Raises PublishRefused, naming
        every replica and its reason, when none could prove it. One update at a time: a rollout and an evaluation that both
        miss a replica would reload it under each other's probes.
        """
        if not self.addresses:
            raise PublishRefused(
                "there is no engine replica to publish to; start one with `bessemer up` or set engine.addresses"
            )
        with self._updating:
            return self._ensure(checkpoint, campaign=campaign, parent=parent)

    def _ensure(self, checkpoint: CheckpointRef, *, campaign: str, parent: CheckpointRef | None) -> PublishResult:
        start, patience = self._clock(), _Patience(self._config.seconds)
        label = label_of(campaign, checkpoint.version)
        folder = self._store.local_path(checkpoint.uri)
        prompts = probe_prompts(Path(folder), count=_PROBES, seed=checkpoint.version)

        def load(address: str) -> _Probe | ReplicaProof:
            return self._load(address, checkpoint, parent, campaign=campaign, folder=folder, prompts=prompts, patience=patience)

        with ThreadPoolExecutor(max_workers=len(self.addresses)) as pool:
            outcomes = list(pool.map(load, self.addresses))
        proofs = self._judge(outcomes, checkpoint, parent)
        for address, outcome, proof in zip(self.addresses, outcomes, proofs, strict=True):
            if isinstance(outcome, _Probe):
                self._settle(address, label, checkpoint, proof)
        final = tuple(
            proof
            if address in self._proven or not proof.accepted
            else refused(address, checkpoint.version, "lost after its proof")
            for address, proof in zip(self.addresses, proofs, strict=True)
        )
        if not any(proof.accepted for proof in final):
            reasons = "; ".join(f"{proof.replica}: {proof.reason}" for proof in final)
            raise PublishRefused(
                f"no replica proved that it serves version {checkpoint.version} of campaign '{campaign}'. {reasons}. Restart "
                "the engine (`bessemer down`, `bessemer up`) and resume the campaign; the checkpoint itself is kept"
            )
        return PublishResult(
            version=checkpoint.version,
            proofs=final,
            intervals=(Interval(kind="publish", start=start, stop=self._clock()),),
        )

    # ------------------------------------------------------------------------------------------------------- one replica

    def _load(
        self,
        address: str,
        checkpoint: CheckpointRef,
        parent: CheckpointRef | None,
        *,
        campaign: str,
        folder: str,
        prompts: list[list[int]],
        patience: _Patience,
    ) -> _Probe | ReplicaProof:
        """Reload and probe one replica, or the proof that stands (or says why it could not be reached)."""
        label = label_of(campaign, checkpoint.version)
        try:
            with ReplicaControl(address, deadline=patience.deadline) as replica:
                replica.wait_healthy(patience.give_up)
                patience.seen_healthy()
                known = self._proven.get(address)
                if known and known[:2] == (label, checkpoint.sha256) and replica.label() == label and not replica.is_paused():
                    return known[2]
                self._proven.pop(address, None)
                serves_parent = parent is not None and replica.label() == label_of(campaign, parent.version)
                replica.pause()
                replaced = replica.checksums() if serves_parent else None
                replica.set_label(PROVING + label)
                replica.reload(folder)
                checksums = replica.checksums()
                replica.reset_prefix_cache()
                replica.resume()
                tokens = -(-self._config.probe_tokens // len(prompts))
                decoded = replica.decode(prompts, tokens=tokens)
        except InfraError as error:
            self._take_out(address)
            return refused(address, checkpoint.version, error.detail)
        return _Probe(
            sequences=[prompt + ids for prompt, (ids, _) in zip(prompts, decoded, strict=True)],
            sampled=[len(ids) for ids, _ in decoded],
            logprobs_T=[value for _, values in decoded for value in values],
            replaced=replaced,
            checksums=checksums,
        )

    def _judge(
        self, outcomes: Sequence[_Probe | ReplicaProof], checkpoint: CheckpointRef, parent: CheckpointRef | None
    ) -> list[ReplicaProof]:
        """The trainer scores the sequences of all replicas in one call for each set of weights."""
        probes = [outcome for outcome in outcomes if isinstance(outcome, _Probe)]
        sequences = [sequence for probe in probes for sequence in probe.sequences]
        new = iter(self._trainer.logprobs(checkpoint, sequences) if sequences else [])
        old = iter(self._trainer.logprobs(parent, sequences) if sequences and parent is not None else [])
        proofs: list[ReplicaProof] = []
        for address, outcome in zip(self.addresses, outcomes, strict=True):
            if not isinstance(outcome, _Probe):
                proofs.append(outcome)
                continue
            new_T = [value for count in outcome.sampled for value in _tail(next(new), count)]
            old_T = [value for count in outcome.sampled for value in _tail(next(old), count)] if parent is not None else None
            proof = judge(
                outcome.logprobs_T,
                new_T,
                old_T,
                tolerance=self._config.tolerance,
                dtype=self._dtype,
                replica=address,
                version=checkpoint.version,
            )
            proofs.append(_check_small_step(proof, outcome))
        return proofs

    def _settle(self, address: str, label: str, checkpoint: CheckpointRef, proof: ReplicaProof) -> None:
        if not proof.accepted:
            self._take_out(address)
            return
        with suppress(InfraError), ReplicaControl(address, deadline=time.monotonic() + _SETTLE_SECONDS) as replica:
            replica.set_label(label)
            self._proven[address] = (label, checkpoint.sha256, proof)

    def _take_out(self, address: str) -> None:
        """Paused, and its label still says that it is unproven."""
        self._proven.pop(address, None)
        with suppress(InfraError), ReplicaControl(address, deadline=time.monotonic() + _SETTLE_SECONDS) as replica:
            replica.pause()


def _check_small_step(proof: ReplicaProof, probe: _Probe) -> ReplicaProof:
    """A step too small to see in the tokens must at least have changed what the replica holds."""
    if proof.checksum_only and proof.step_distance > 0 and probe.replaced == probe.checksums:
        why = f"the step ({proof.step_distance:.2e}) is too small to see and no tensor changed in the reload"
        return msgspec.structs.replace(proof, accepted=False, checksum_only=False, reason=why)
    return proof


def accepted_addresses(result: PublishResult) -> list[str]:
    """Where a sampler may send requests after a publish."""
    return [proof.replica for proof in result.proofs if proof.accepted]


def probe_prompts(folder: Path, *, count: int, seed: int) -> list[list[int]]:
    """Short prompts of token ids spread over the whole vocabulary of the model in `folder`, the same for the same seed."""
    size = int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    generator = random.Random(seed)
    return [[generator.randrange(size) for _ in range(_PROMPT_TOKENS)] for _ in range(count)]


def _tail(values: Sequence[float], count: int) -> Sequence[float]:
    return values[len(values) - count :]
