"""The one configuration tree. YAML profiles, the CLI's overrides and Prefect's form all come from these classes.

Extra fields are refused. Each field is documented once, under it. `load_profile` turns any mistake into a ConfigError
naming file, field and remedy.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of every section: frozen, no unknown fields, docstrings under fields become descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class DomainConfig(Section):
    name: str
    """Registered domain name."""
    weight: float = Field(default=1.0, gt=0)
    """Share of this domain's problems in a batch, relative to the others."""
    level: str = "default"
    """Difficulty level the domain declares."""
    settings: dict[str, Any] = {}
    """Further keyword arguments of the domain's generator."""
    heldout: int = Field(default=16, ge=0)
    """How many fixed held-out problems `evaluate` uses."""


class CurateConfig(Section):
    groups: int = Field(default=8, ge=1)
    """Graded groups one iteration trains on."""
    surplus: int = Field(default=8, ge=0)
    """Further problems handed out for refills."""
    curriculum: bool = True
    """Draw problems that always or never succeed less often."""
    max_prompt_tokens: int = Field(default=1024, ge=16)
    """Problems with longer prompts are left out and counted."""
    sources: list[str] = []
    """Further problem files (JSONL, Parquet or CSV, any fsspec URL)."""


class RolloutConfig(Section):
    group_size: int = Field(default=8, ge=1)
    """G: episodes per problem."""
    temperature: float = Field(default=1.0, ge=0.01)
    """Sampling temperature; top-p and top-k stay off in training, truncation would bias the importance ratio. At least 0.01:
    greedy samples have no gradient, and vLLM raises smaller values to 0.01 while the trainer would not."""
    window: int = Field(default=0, ge=0)
    """Groups in flight; 0 means as many as the batch needs."""
    oversubscribe: int = Field(default=0, ge=0)
    """Extra groups in flight beyond the batch: 0 seals the first usable groups in curated order (reproducible)."""
    max_episode_tokens: int | None = Field(default=None, ge=1)
    """Cap over each problem's own budget."""
    drop_zero_variance: bool = True
    """Refill groups whose rewards are all equal, within the refill budget."""
    refill_budget: int = Field(default=8, ge=0)
    """Groups that may be replaced in one iteration; when it is spent, what exists is sealed."""
    infra_retries: int = Field(default=2, ge=0, le=2)
    """Retries of a group after an infra_failure, then it is dropped and counted."""
    max_infra_share: float = Field(default=0.05, ge=0, le=1)
    """Above this share of dropped groups the stage stops with an alert."""
    sampling_seconds: float = Field(default=120.0, gt=0)
    """Deadline of one model turn."""
    grading_seconds: float = Field(default=60.0, gt=0)
    """Deadline of one verification."""
    episode_seconds: float = Field(default=300.0, gt=0)
    """Deadline of one episode, queueing included."""
    group_seconds: float = Field(default=600.0, gt=0)
    """Deadline of one group."""
    stage_seconds: float = Field(default=3600.0, gt=0)
    """Deadline of the whole stage."""


class RewardConfig(Section):
    weights: dict[str, float] = {"verdict": 1.0}
    """Component name -> weight; the reward is their weighted sum, clipped to `low`..`high`."""
    low: float = 0.0
    """Smallest reward."""
    high: float = 1.0
    """Largest reward."""
    overlong_buffer: int = Field(default=0, ge=0)
    """DAPO overlong shaping buffer in tokens for the component "overlong"; 0 turns it off."""


class AlgorithmConfig(Section):
    name: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """Advantage estimator."""
    ddof: int = Field(default=1, ge=0, le=1)
    """Degrees of freedom of the group's standard deviation."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""
    clip_low: float = Field(default=0.2, ge=0)
    """Lower clip of the ratio: 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """Upper clip of the ratio: 1 + clip_high."""
    dual_clip: float | None = None
    """c of dual clip; None turns it off."""
    tis_cap: float | None = 2.0
    """Cap C of truncated importance sampling against the sampler's log-probabilities; None turns it off."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL to the reference (the base checkpoint); 0 loads no reference."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "dr_grpo"] = "token_mean"
    """How token losses become one number over the global batch."""
    aggregation_length: int = Field(default=1024, ge=1)
    """L_max of the dr_grpo aggregation."""


class TrainConfig(Section):
    learning_rate: float = Field(default=2e-5, gt=0)
    """AdamW learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW betas."""
    warmup_steps: int = Field(default=0, ge=0)
    """Linear warm-up, in optimizer steps."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient clipping by global norm."""
    micro_batch_tokens: int = Field(default=4096, ge=64)
    """Most tokens of one forward pass; larger batches accumulate gradients."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the batch; one optimizer step each."""
    full_state_every: int = Field(default=10, ge=1)
    """K: optimizer state is saved every K iterations and at stop."""
    seconds: float = Field(default=1800.0, gt=0)
    """Deadline of one training job."""


class PublishConfig(Section):
    tolerance: float = Field(default=1e-4, gt=0)
    """fp32: largest |log-probability| distance engine - trainer; bf16 uses a mean distance of 0.02."""
    probe_tokens: int = Field(default=512, ge=1)
    """Decoded tokens compared per replica."""
    seconds: float = Field(default=300.0, gt=0)
    """Deadline of one publish, an engine restart included."""


class EvaluateConfig(Section):
    every: int = Field(default=3, ge=1)
    """Evaluate after every so many iterations; always before the first and after the last."""
    samples: int = Field(default=1, ge=1)
    """Episodes per held-out problem."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    bootstrap: int = Field(default=2000, ge=100)
    """Bootstrap resamples of the intervals."""


class RetentionConfig(Section):
    last: int = Field(default=3, ge=1)
    """Newest checkpoints kept."""
    every: int = Field(default=50, ge=1)
    """Every n-th checkpoint is kept."""


class TrackConfig(Section):
    experiment: str = "bessemer"
    """MLflow experiment."""
    traces_per_iteration: int = Field(default=4, ge=0)
    """Sampled episodes logged as traces."""


class CampaignConfig(Section):
    """One campaign: everything that decides its numbers. The stack it runs on is StackConfig."""

    base_model: str = "smollm2-135m"
    """One of tiny, smollm2-135m, a local path, or a Hugging Face id."""
    iterations: int = Field(default=6, ge=1)
    """Iterations a plain advance runs up to."""
    seed: int = 0
    """Root of every generator's seed."""
    max_staleness: int = Field(default=0, ge=0)
    """d: rollouts of the next d iterations run while one trains; 0 is strictly on-policy."""
    domains: list[DomainConfig] = Field(min_length=1)
    """What the policy learns."""
    curate: CurateConfig = CurateConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    publish: PublishConfig = PublishConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    retention: RetentionConfig = RetentionConfig()
    track: TrackConfig = TrackConfig()


class EngineConfig(Section):
    addresses: list[str] = []
    """Existing replicas; empty: `bessemer up` starts one on loopback."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """KV cache of a CPU replica, GiB."""
    max_model_len: int = Field(default=2048, ge=64)
    """Longest sequence."""
    block_size: int = Field(default=32, multiple_of=16)
    """Tokens in a KV-cache block: prompts of a group share whole blocks only."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences decoded at once."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """float32 on AVX2 CPUs."""
    threads: str = "auto"
    """VLLM_CPU_OMP_THREADS_BIND; "auto" binds all visible cores."""
    startup_seconds: float = 600.0
    """Deadline of a replica's start."""


class SandboxConfig(Section):
    backend: Literal["bubblewrap", "docker", "fake"] = "bubblewrap"
    """Where boxes come from; never falls back to another."""
    concurrency: int = Field(default=4, ge=1)
    """Boxes running commands at once on one worker."""
    runtime: str | None = None
    """Docker runtime by name, for example runsc or kata."""
    warm: int = Field(default=0, ge=0)
    """Boxes of each kind made ahead and kept ready; a Docker box takes half a second to make, a bubblewrap box some 20 ms."""
    outage_wait_seconds: float = Field(default=900.0, ge=0)
    """How long a run waits for a backend that is away (Docker's engine stopped) before it stops and can be resumed."""


class DaskConfig(Section):
    address: str | None = None
    """Existing scheduler; None: `bessemer up` starts a local cluster."""
    workers: int = Field(default=1, ge=1)
    """Local worker processes."""
    slots: int = Field(default=256, ge=1)
    """Coroutine slots (threads) of one worker: groups in flight."""


class StackConfig(Section):
    """What a campaign runs on. Addresses of existing services may be given; the rest is started locally, on loopback."""

    store: str = ""
    """Folder or fsspec URL of the store; empty: <state folder>/store."""
    engine: EngineConfig = EngineConfig()
    sandbox: SandboxConfig = SandboxConfig()
    dask: DaskConfig = DaskConfig()
    trainer_address: str | None = None
    """Existing trainer (http://host:port); None: started locally."""
    trainer_processes: int = Field(default=1, ge=1)
    """Ranks of the local trainer."""
    prefect_api: str | None = None
    """Existing Prefect API URL; None: started locally."""
    mlflow_uri: str | None = None
    """Existing MLflow tracking URI; None: started locally."""
    heartbeat_seconds: float = Field(default=30.0, gt=0)
    """Flow heartbeat; a run silent for three of them is marked Crashed."""


class Profile(Section):
    """One YAML file in flows/profiles/: a campaign and the stack it wants."""

    campaign: CampaignConfig
    stack: StackConfig = StackConfig()
