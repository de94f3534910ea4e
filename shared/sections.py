"""The sections of a run file, one a service or concern. `shared/config.py` puts them together and checks them against each other.

Each field is followed by its explanation, which is also its line in `docs/run-file.md`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from shared.section import Section


class ModelConfig(Section):
    path: str
    """Hugging Face folder: config.json, tokenizer, safetensors. Written by `build` if it does not exist. May hold `{seed}`."""
    build: str | None = None
    """Dotted path of `build(path, seed)`, called once when `path` does not exist (tiny models made on the spot)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of the trainer and of the engine. float32 on a CPU: bfloat16 is several times slower there."""


class DataConfig(Section):
    source: str
    """A .jsonl or .parquet file, a dotted path of `prompts(seed, index) -> {prompt, answer, ...}`, or
    `reasoning_gym:NAME` for a procedural task of that package."""
    prompt_key: str = "prompt"
    """Field that holds the prompt: a string, or a list of chat messages."""
    answer_key: str = "answer"
    """Field handed to the reward as `answer`; a record without it gets None."""
    size: int | None = Field(None, ge=1)
    """Use the first `size` records; for a procedural source the number of prompts in an epoch."""
    shuffle: bool = True
    """Draw a new order each epoch, from the run's seed."""
    options: dict[str, Any] = Field({})
    """Passed to the procedural source."""
    system_prompt: str | None = None
    """Put in front of string prompts as a system message; the tokenizer's chat template is then used."""


class SamplingConfig(Section):
    temperature: float = Field(1.0, gt=0, le=5)
    """Sampling temperature. The trainer's log-probabilities are taken at the same temperature."""
    top_p: float = Field(1.0, ge=1, le=1)
    """Only 1: a truncated distribution renormalises log-probabilities that the trainer cannot reproduce."""
    max_new_tokens: int = Field(1024, ge=1)
    """Completion tokens at most; what is cut off there ends with finish `length`."""
    max_prompt_tokens: int = Field(4096, ge=1)
    """A longer prompt is dropped with reason `prompt_too_long`."""


class EvalConfig(Section):
    prompts: DataConfig | None = None
    """Held-out prompts. None: no evaluation."""
    every: int = Field(0, ge=0)
    """Steps between evaluations; 0: only before the first and after the last step."""
    samples: int = Field(1, ge=1)
    """Samples a prompt."""
    temperature: float = Field(0.0, ge=0, le=5)
    """0 is greedy."""
    min_reward: float | None = None
    """Refuse to train if the evaluation before the first step is below this: a policy that never succeeds learns nothing."""


class RewardFunction(Section):
    path: str
    """Dotted path of `reward(prompt, completion, answer, **context) -> float`, sync or async."""
    name: str | None = None
    """Name in metrics; the function's own by default."""
    weight: float = 1.0
    """Factor in the sum that is trained on."""
    options: dict[str, Any] = Field({})
    """Passed as keyword arguments."""


class RewardConfig(Section):
    functions: list[RewardFunction] = Field(min_length=1)
    """Their weighted sum is the reward."""
    workers: int = Field(1, ge=1)
    """Scoring processes of a reward replica."""
    timeout_s: float = Field(10.0, gt=0)
    """A call that takes longer is killed with its process; the sample counts as unscorable."""
    memory_mb: int = Field(4096, ge=64)
    """A scoring process that holds more, by a leak or in a call, is replaced; what did it alone counts as unscorable."""
    on_error: Literal["zero", "unscorable"] = "unscorable"
    """What a reward function that raises, returns NaN or runs out of time gives: reward 0, or no advantage for that sample."""
    filters: list[Literal["zero_variance", "truncated", "unscorable"]] = Field(["unscorable"])
    """Groups dropped before training, each a counted reason: all rewards equal; every sample cut off; no sample scored."""
    replicas: int = Field(1, ge=1)
    """Reward processes that `slipstream up` starts."""
    max_deliveries: int = Field(5, ge=1)
    """Tries before a group goes to the dead letters."""


class OptimizerConfig(Section):
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """From the peak down to `min_lr_ratio` over the run's steps."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Last learning rate as a share of the peak."""
    warmup_steps: int = Field(0, ge=0)
    """Linear from 0."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's."""
    eps: float = Field(1e-8, gt=0)
    """Adam's."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled (AdamW)."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest norm of the gradient; 0: no clipping."""


class WarmStartConfig(Section):
    source: str
    """A .jsonl file of {prompt, completion}, or a dotted path of `demonstrations(seed, index) -> {prompt, completion}`."""
    steps: int = Field(..., ge=1)
    """Supervised updates before reinforcement learning starts."""
    batch: int = Field(64, ge=1)
    """Demonstrations an update."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3, betas=(0.9, 0.98), schedule="linear", warmup_steps=30)
    """Its own; the moments are not carried over."""


class PreferencesConfig(Section):
    source: str
    """A .jsonl file of {prompt, chosen, rejected}, or a dotted path of `preferences(seed, index) -> {...}` with these keys."""
    steps: int = Field(..., ge=1)
    """Updates."""
    batch: int = Field(32, ge=1)
    """Pairs an update."""
    beta: float = Field(0.1, gt=0)
    """Strength of the hold on the policy that the phase begins with."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs that count the other way round (conservative DPO)."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6)
    """Its own; the moments are not carried over."""


class CheckpointConfig(Section):
    every: int = Field(10, ge=1)
    """Steps between checkpoints. What came after the last one is trained again from the queue if the trainer dies."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""
    keep_every: int = Field(0, ge=0)
    """Those at multiples of so many steps are kept for good; 0: none."""
    keep_best: int = Field(0, ge=0)
    """So many with the highest mean reward since the one before are kept too."""


class TrainerConfig(Section):
    micro_batch_tokens: int = Field(8192, ge=1)
    """Token budget of a packed micro-batch; also the longest sequence that can be trained."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Of the policy."""
    warm_start: WarmStartConfig | None = None
    """A supervised phase of the same trainer before the first step."""
    preferences: PreferencesConfig | None = None
    """A preference phase (DPO) after it, before the first step."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save and what to keep."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    threads: int = Field(1, ge=1)
    """Torch threads on a CPU. More than one spins at barriers when the cores are shared."""
    ranks: int = Field(1, ge=1)
    """Processes that train together, one a GPU. How they share the model is in `megatron`; what is left makes replicas."""
    rank_timeout_s: float = Field(600.0, gt=0)
    """Deadline of an exchange between ranks: when one is dead or hangs, all end."""
    megatron: dict[str, Any] = Field({})
    """Options of Megatron under their own names, such as `tensor_model_parallel_size: 2`."""


class ReferenceConfig(Section):
    path: str | None = None
    """Hugging Face folder; None: the policy as it was before the first update. May hold `{seed}`."""
    place: Literal["service", "trainer"] = "service"
    """A process of its own, or inside the trainer's (hybrid: no message more, but the trainer waits for it)."""
    refresh_every: int = Field(0, ge=0)
    """Updates after which the reference becomes the policy of that moment; 0: never."""


class TeacherConfig(Section):
    path: str
    """Hugging Face folder with the policy's tokenizer. May hold `{seed}`."""
    replicas: int = Field(1, ge=1)
    """Teacher processes that `slipstream up` starts."""
    top_k: int = Field(0, ge=0)
    """The likeliest tokens that travel with each token; 0: only the sampled one's log-probability."""


class CriticConfig(Section):
    path: str | None = None
    """Hugging Face folder of the policy's architecture; None: the policy as it was before the first update."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """Of the critic."""
    warmup_steps: int = Field(0, ge=0)
    """Updates of the critic alone before the policy moves."""


class RolloutConfig(Section):
    replicas: int = Field(1, ge=1)
    """Rollout processes that `slipstream up` starts."""
    engine: Literal["light", "sglang", "external"] = "light"
    """light: a small batched sampler on plain torch with SGLang's HTTP API; sglang: SGLang itself, as the replica's child;
    external: an SGLang server that somebody else runs, at `url`."""
    url: str | None = None
    """Of an external server, which must see the replica's files. `{replica}` and `{index}` (the number at the end of the
    replica's name) are filled in: each replica needs a server of its own."""
    max_running_groups: int = Field(16, ge=1)
    """Prompt groups that a replica works on at once; it never holds more than these."""
    on_new_weights: Literal["retract", "in_place", "abort"] = "retract"
    """Running requests at a switch: recompute their KV cache under the new weights, keep it, or end them and continue from
    their tokens in a new request."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine runs."""
    threads: int = Field(1, ge=1)
    """Torch threads of a CPU engine."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Deadline of one generate request."""
    apart_from_tokens: int = Field(512, ge=1)
    """Where `sampling.max_new_tokens` is this or more, a group's samples are asked for one by one, so that those which are
    finished need not be drawn again when the replica dies."""
    keep_after_s: float = Field(5.0, ge=0)
    """They are stored for that if they are finished later than so long after their group was begun."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Deadline of the engine's start."""
    max_deliveries: int = Field(5, ge=1)
    """Tries before a prompt goes to the dead letters. Deaths that it was only there for do not count."""
    light: dict[str, Any] = Field({})
    """Options of the light engine's command line, without the dashes."""
    sglang: dict[str, Any] = Field({})
    """Options of `sglang.launch_server` under their own names."""
    sglang_python: str | None = None
    """Interpreter of SGLang's environment. None: that of `make install-sglang`, else the replica's own."""
    sglang_hooks: bool = True
    """False: SGLang without our endpoints for weights; versions then come as files, and generation pauses while they load."""


class DcsConfig(Section):
    host: str = "127.0.0.1"
    """Address that the DCS listens on and that others reach it at."""
    port: int = Field(0, ge=0, le=65535)
    """0: a free one; it is told through the registry."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Transport of the broadcast group."""
    timeout_s: float = Field(60.0, gt=0)
    """Deadline of one broadcast, joining included; whoever misses it is left out and pulls."""
    bucket_mb: int = Field(64, ge=1)
    """Tensors are sent in buckets of about this size."""
    keep_snapshots: int = Field(3, ge=2)
    """Newest snapshots kept for newcomers."""
    keep_deltas: int = Field(8, ge=0)
    """Newest deltas kept for receivers that pull: what changed from one version to the next. 0: none are made."""
    broadcast: bool = True
    """False: no replica takes part in a broadcast; all pull snapshots or deltas, as those do that cannot be reached."""
    store: str = Field("", pattern=r"^((s3|gs|az)://.+)?$")
    """Object store for snapshots and deltas, so that pulling does not load the DCS's host: `s3://bucket/prefix` (also `gs://`, `az://`).
    Only the DCS has its credentials, from the usual variables (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`,
    `AWS_ENDPOINT_URL`); the others are sent signed addresses."""
    shared_folder: bool = True
    """Whoever pulls and sees `<workdir>/snapshots` on a disk of its own takes the files there instead of through HTTP."""
    cuda_ipc: bool = False
    """With `placement: colocate` on a GPU: engines copy the weights within the GPU's memory, in place of shared memory."""


class AutoscaleConfig(Section):
    mode: Literal["dry_run", "on"] = "dry_run"
    """dry_run: decisions are events, and nothing else happens."""
    min_replicas: int = Field(1, ge=1)
    """Rollouts at least."""
    max_replicas: int = Field(8, ge=1)
    """Rollouts at most."""
    every_s: float = Field(5.0, gt=0)
    """Between two looks at the run."""
    idle_out: float = Field(0.2, ge=0, le=1)
    """The trainer waits for groups more than this share of its time: too few rollouts."""
    idle_in: float = Field(0.05, ge=0, le=1)
    """It waits less than this: perhaps too many."""
    busy_out: float = Field(0.8, ge=0, le=1)
    """Engines that work on more than this share of `rollout.max_running_groups` are as good as full."""
    busy_in: float = Field(0.5, ge=0, le=1)
    """Engines below this have room."""
    slack_in: float = Field(0.1, ge=0)
    """Samples that age to within so many updates of `max_staleness` before they are trained on were made too early."""
    hold_out_s: float = Field(30.0, ge=0)
    """So long it must be so before more are started."""
    hold_in_s: float = Field(120.0, ge=0)
    """So long it must be so before one leaves."""
    pause_out_s: float = Field(60.0, ge=0)
    """After a decision, until the next one to start some."""
    pause_in_s: float = Field(300.0, ge=0)
    """After a decision, until the next one to let one leave."""
    most_at_once: int = Field(4, ge=1)
    """Rollouts started by one decision."""

    @model_validator(mode="after")
    def _bounds(self) -> AutoscaleConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas: {self.min_replicas} exceeds max_replicas: {self.max_replicas}")
        if self.idle_in > self.idle_out:
            raise ValueError(
                f"idle_in: {self.idle_in} exceeds idle_out: {self.idle_out}; it would start and end replicas in turn"
            )
        return self


class ControllerConfig(Section):
    host: str = "127.0.0.1"
    """Address of the REST API."""
    port: int = Field(0, ge=0, le=65535)
    """0: a free one; it is told through the registry."""
    autoscale: AutoscaleConfig | None = None
    """Start and end rollouts by the run's load. None: only when asked."""


class RayConfig(Section):
    resources: dict[str, dict[str, float]] = Field({})
    """What an actor asks the cluster for, by service: `rollout: {num_gpus: 1, num_cpus: 8}`. Names that are not Ray's own are
    custom resources; a service that is not named asks for nothing."""
    runtime_env: dict[str, Any] = Field({})
    """Ray's own, for every actor."""


class BrokerConfig(Section):
    url: str | None = None
    """nats://host:port of a broker with JetStream. None: `slipstream up` starts a private one on loopback."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the private broker; 0: a free one."""
    max_bytes: int = Field(4 << 30, ge=64 << 20)
    """Disk that the run's streams may take together."""
    durability: Literal["process", "power"] = "process"
    """process: survives the death of any process. power: every write is synced to disk, about 5 times slower."""
    replicas: Literal[1, 3, 5] = 1
    """Nodes of a cluster that each hold all of the run's streams; 3 survives the loss of one node with its disk."""
    options: dict[str, Any] = Field({})
    """Further options of the private nats-server under their own names."""
