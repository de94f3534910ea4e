"""The types of `algorithm:` in the run file: one class an algorithm, chosen by `name`. Torch-free.

`AlgorithmConfig` is their union. A class holds what every algorithm shares (`PolicyOptions`) with the algorithm's own
defaults, and the options that only it has. The formulas stand in services/trainer/algorithms, one file an algorithm, and
docs/algorithms.md compares the defaults with those of other systems. A new algorithm is a class here, a file there, and a
line in its table. Combinations that cannot work are refused by `shared.combinations`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from shared.section import Section

Reduction = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
OldLogprobs = Literal["trainer", "rollout", "interpolated"]


class AdvantageConfig(Section):
    name: Literal["group", "leave_one_out", "reward", "returns", "gae"] = "group"
    """group: reward minus the group's mean. leave_one_out: minus the mean of the others. reward: as it is. returns: sum of the
    discounted token rewards that follow. gae: generalised advantage estimation from a critic's values."""
    scale: Literal["std", "population_std", "batch_std", "mean", "none"] = "std"
    """group: divide by the group's sample deviation, its population deviation, the deviation of all rewards of the update,
    the group's mean (MaxRL), or nothing (Dr.GRPO)."""
    epsilon: float = Field(1e-4, gt=0)
    """Added to the deviation."""
    whiten: bool = False
    """Subtract the mean and divide by the deviation of all trained tokens of the update."""
    gamma: float = Field(1.0, gt=0, le=1)
    """returns and gae: discount a token."""
    lam: float = Field(1.0, ge=0, le=1)
    """gae: 1 is the return minus the value, 0 the one-step error."""


class CorrectionConfig(Section):
    mode: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "none"
    """What multiplies the policy term: w = exp(old - rollout) of a token, or of a sequence's sum. truncate: bring w into
    [low, high] (TIS). mask: 0 outside, w inside (IcePop)."""
    low: float = Field(0.0, ge=0)
    """Lower bound of w."""
    high: float = Field(2.0, gt=0)
    """Upper bound of w."""
    geometric: tuple[float, float] | None = None
    """Leave out a sequence whose geometric mean of exp(old - rollout) is outside these bounds."""
    outlier: tuple[float, float] | None = None
    """Leave out a sequence with any token whose exp(old - rollout) is outside these bounds."""
    opsm: float | None = Field(None, gt=0)
    """Off-policy sequence mask: leave out tokens with a negative advantage where the sequence's mean of rollout - policy
    exceeds this."""


class KlConfig(Section):
    coef: float = Field(0.0, ge=0)
    """Weight of the distance to the reference. Above 0 it needs the section `reference`."""
    estimator: Literal["k1", "k2", "k3", "low_var", "abs"] = "k3"
    """With d = policy - reference: d, d^2/2, exp(-d) - 1 + d, the same clamped to 10, |d|."""
    use: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken from the reward of each token before advantages are computed."""
    unbiased: bool = False
    """loss: multiply the estimate by the ratio policy / rollout, gradient included, so that its gradient is that of the KL."""


class DistillConfig(Section):
    coef: float = Field(0.0, ge=0)
    """Weight of the teacher. Above 0 it needs the section `teacher`."""
    reward_weight: float = Field(1.0, ge=0)
    """Factor on the advantages that come from rewards; 0: the teacher alone."""
    form: Literal["sampled", "top_k"] = "sampled"
    """sampled: teacher - policy of the sampled token is added to its advantage (reverse KL). top_k: a divergence over the
    teacher's `teacher.top_k` likeliest tokens is added to the loss."""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """top_k: KL(policy || teacher), KL(teacher || policy), or the generalised Jensen-Shannon divergence."""
    beta: float = Field(0.5, gt=0, lt=1)
    """jsd: share of the teacher in the mixture."""
    tail: bool = True
    """top_k: count the rest of the vocabulary as one more token."""


class PolicyOptions(Section):
    """What every algorithm has. Each class below repeats a field only to give it another default."""

    name: str
    """The algorithm."""
    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""
    old_logprobs: OldLogprobs = "trainer"
    """Denominator of the ratio. trainer: the policy before the update, so that the ratio is 1 and only `correction` acts on
    stale tokens. rollout: the engine's, so that the ratio holds the staleness. interpolated: the policy one update back,
    estimated between the two by the token's age."""
    correction: CorrectionConfig = CorrectionConfig()
    """Importance weights and masks for what the engine sampled under other numbers or older weights."""
    kl: KlConfig = KlConfig()
    """Distance to a reference policy."""
    distill: DistillConfig = DistillConfig()
    """Distance to a teacher."""
    reduction: Reduction = "token_mean"
    """Over all tokens of the update; over each sequence, then over sequences; sum over each sequence, then mean over sequences;
    sum over sequences, divided by a constant length."""
    max_tokens: int | None = Field(None, ge=1)
    """constant: the length that a sequence is divided by; None: sampling.max_new_tokens."""

    @model_validator(mode="before")
    @classmethod
    def _sections_in_part(cls, data: Any) -> Any:
        """What a nested section of the run file does not say keeps the algorithm's own default, not the section's."""
        if not isinstance(data, dict):
            return data
        defaults = {
            name: field.default for name, field in cls.model_fields.items() if isinstance(field.default, Section)
        }
        return {
            name: {**defaults[name].model_dump(), **value} if name in defaults and isinstance(value, dict) else value
            for name, value in data.items()
        }


TRUNCATED = CorrectionConfig(mode="token_truncate", high=2.0)


class GrpoConfig(PolicyOptions):
    name: Literal["grpo"] = "grpo"
    """Group-relative policy optimisation with a clipped ratio."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.28, ge=0)
    """... and above at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """For a negative advantage the loss is at most this times its size (PPO's dual clip)."""
    delta: float | None = Field(None, gt=1)
    """The unclipped ratio is capped here (two-sided clipping)."""
    correction: CorrectionConfig = TRUNCATED
    """Truncated importance weights by default."""


class DrGrpoConfig(PolicyOptions):
    name: Literal["dr_grpo"] = "dr_grpo"
    """GRPO without its two biases: no division by the deviation, none by the length."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """... and above at 1 + clip_high."""
    advantage: AdvantageConfig = AdvantageConfig(scale="none")
    """Reward minus the group's mean."""
    correction: CorrectionConfig = TRUNCATED
    """Truncated importance weights by default."""
    reduction: Reduction = "constant"
    """A constant length."""


class DapoConfig(PolicyOptions):
    name: Literal["dapo"] = "dapo"
    """GRPO with clip-higher, token mean, dynamic sampling (reward.filters) and overlong shaping."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.28, ge=0)
    """... and above at 1 + clip_high."""
    overlong_buffer: int = Field(0, ge=0)
    """Within the last so many tokens before sampling.max_new_tokens the reward falls linearly by overlong_penalty; 0: off."""
    overlong_penalty: float = Field(1.0, ge=0)
    """Taken from the reward of a completion of full length."""
    correction: CorrectionConfig = TRUNCATED
    """Truncated importance weights by default."""


class GspoConfig(PolicyOptions):
    name: Literal["gspo"] = "gspo"
    """One ratio a sequence, the geometric mean of its tokens' ratios."""
    clip_low: float = Field(3e-4, ge=0, lt=1)
    """The sequence's ratio is clipped below at 1 - clip_low. It lies near 1: a token's clip of 0.2 would never act."""
    clip_high: float = Field(4e-4, ge=0)
    """... and above at 1 + clip_high."""
    form: Literal["sequence", "token"] = "sequence"
    """token: each token's gradient flows to itself alone (GSPO-token), which advantages that differ by token need."""
    old_logprobs: OldLogprobs = "rollout"
    """The ratio holds the staleness."""
    reduction: Reduction = "sequence_mean"
    """Each sequence weighs the same. `sequence_sum` makes it LUSPO."""


class SapoConfig(PolicyOptions):
    name: Literal["sapo"] = "sapo"
    """A smooth gate in place of the clip."""
    tau_pos: float = Field(1.0, gt=0)
    """Temperature of the gate where the advantage is above 0."""
    tau_neg: float = Field(1.05, gt=0)
    """... and elsewhere."""
    level: Literal["token", "sequence"] = "token"
    """Ratio of a token, or one of the sequence as in GSPO."""
    old_logprobs: OldLogprobs = "rollout"
    """The ratio holds the staleness."""
    reduction: Reduction = "sequence_mean"
    """Each sequence weighs the same."""


class CispoConfig(PolicyOptions):
    name: Literal["cispo"] = "cispo"
    """The ratio is capped and taken as a constant weight, so that no token loses its gradient."""
    cap: float = Field(5.0, gt=1)
    """Upper bound of the ratio itself (not of its distance to 1)."""
    floor: float = Field(0.0, ge=0, lt=1)
    """Lower bound of the ratio."""
    old_logprobs: OldLogprobs = "rollout"
    """The ratio holds the staleness."""


class RlooConfig(PolicyOptions):
    name: Literal["rloo"] = "rloo"
    """REINFORCE with the mean of the group's other samples as baseline."""
    advantage: AdvantageConfig = AdvantageConfig(name="leave_one_out", scale="none")
    """Reward minus the mean of the others."""
    correction: CorrectionConfig = TRUNCATED
    """The only place where staleness counts: the loss has no ratio."""


class ReinforcePpConfig(PolicyOptions):
    name: Literal["reinforce_pp"] = "reinforce_pp"
    """REINFORCE++: returns of token rewards, whitened over the update, with PPO's clip."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """... and above at 1 + clip_high."""
    advantage: AdvantageConfig = AdvantageConfig(name="returns", scale="none", whiten=True)
    """Whitened returns."""
    kl: KlConfig = KlConfig(estimator="k1", use="reward")
    """Taken from each token's reward."""
    correction: CorrectionConfig = TRUNCATED
    """Truncated importance weights by default."""


class ReinforcePpBaselineConfig(PolicyOptions):
    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    """REINFORCE++ with the group's mean as baseline, whitened over the update."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """... and above at 1 + clip_high."""
    advantage: AdvantageConfig = AdvantageConfig(scale="none", whiten=True)
    """Reward minus the group's mean, whitened."""
    kl: KlConfig = KlConfig(estimator="k2")
    """A term of the loss of its own."""
    correction: CorrectionConfig = TRUNCATED
    """Truncated importance weights by default."""


class PpoConfig(PolicyOptions):
    name: Literal["ppo"] = "ppo"
    """PPO with a critic. Needs the section `critic`."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """... and above at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """For a negative advantage the loss is at most this times its size."""
    value_clip: float | None = Field(0.2, gt=0)
    """The critic's new value counts at most so far from its old one; None: unclipped."""
    advantage: AdvantageConfig = AdvantageConfig(name="gae", scale="none", whiten=True)
    """Generalised advantage estimation, whitened."""
    kl: KlConfig = KlConfig(estimator="k1", use="reward")
    """Taken from each token's reward."""
    correction: CorrectionConfig = TRUNCATED
    """Truncated importance weights by default."""


class DecoupledPpoConfig(PolicyOptions):
    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    """The clip holds the policy near a recent one, and a weight corrects from there to the one that sampled."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio to the recent policy is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """... and above at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """For a negative advantage the loss is at most this times its size."""
    old_logprobs: OldLogprobs = "interpolated"
    """The recent policy."""
    correction: CorrectionConfig = CorrectionConfig(mode="token_mask", high=5.0)
    """From the recent policy to the one that sampled."""


class M2poConfig(PolicyOptions):
    name: Literal["m2po"] = "m2po"
    """A band around ratio 1, solved once an update so that the second moment of the harmful log-ratios keeps a budget."""
    budget: float = Field(0.04, gt=0)
    """Mean square of the log-ratios that push the policy further from the one that sampled."""
    rule: Literal["mask", "clip"] = "mask"
    """mask: leave out the largest until the mean of the rest keeps the budget (the paper). clip: cap them all so that the mean
    of the capped ones keeps it (the released code)."""
    floor_low: float = Field(0.0, ge=0, lt=1)
    """The band is never tighter than 1 - floor_low."""
    floor_high: float = Field(0.0, ge=0)
    """... and 1 + floor_high."""
    old_logprobs: Literal["rollout"] = "rollout"
    """The ratio is to the policy that sampled."""


class DppoConfig(PolicyOptions):
    name: Literal["dppo"] = "dppo"
    """A trust region on probabilities instead of ratios, with a squared penalty."""
    mask_low: float = Field(0.2, ge=0, le=1)
    """A token with a negative advantage is left out if its probability has fallen by more than this."""
    mask_high: float = Field(0.2, ge=0, le=1)
    """A token with a positive advantage is left out if its probability has risen by more than this."""
    one_sided: bool = True
    """False: leave out a token that moved too far either way, whatever its advantage (IPO, with 0.1)."""
    penalty: float = Field(1e-3, ge=0)
    """Weight of the squared log-ratio."""
    old_logprobs: Literal["rollout"] = "rollout"
    """The ratio is to the policy that sampled."""


class VespoConfig(PolicyOptions):
    name: Literal["vespo"] = "vespo"
    """A smooth weight on the whole sequence's ratio."""
    k_pos: float = Field(2.0, ge=0)
    """Power of the sequence's ratio where the advantage is not negative."""
    lambda_pos: float = Field(3.0, gt=0)
    """Decay of the weight there."""
    k_neg: float = Field(3.0, ge=0)
    """Power of the sequence's ratio where the advantage is negative."""
    lambda_neg: float = Field(2.0, gt=0)
    """Decay of the weight there."""
    old_logprobs: Literal["rollout"] = "rollout"
    """The ratio is to the policy that sampled."""


class OpdConfig(PolicyOptions):
    name: Literal["opd"] = "opd"
    """On-policy distillation. Needs the section `teacher`."""
    advantage: AdvantageConfig = AdvantageConfig(name="reward", scale="none")
    """Counts only with a distill.reward_weight above 0."""
    distill: DistillConfig = DistillConfig(coef=1.0, reward_weight=0.0)
    """The teacher alone."""
    correction: CorrectionConfig = TRUNCATED
    """Truncated importance weights by default."""


MEMBERS: tuple[type[PolicyOptions], ...] = (
    GrpoConfig,
    DrGrpoConfig,
    DapoConfig,
    GspoConfig,
    SapoConfig,
    CispoConfig,
    RlooConfig,
    ReinforcePpConfig,
    ReinforcePpBaselineConfig,
    PpoConfig,
    DecoupledPpoConfig,
    M2poConfig,
    DppoConfig,
    VespoConfig,
    OpdConfig,
)
BY_NAME: dict[str, type[PolicyOptions]] = {member.model_fields["name"].default: member for member in MEMBERS}
"""`algorithm.name` -> its type."""


def _named(value: Any) -> Any:
    """An algorithm without a name is grpo."""
    return {"name": "grpo", **value} if isinstance(value, dict) else value


AlgorithmConfig = Annotated[
    GrpoConfig
    | DrGrpoConfig
    | DapoConfig
    | GspoConfig
    | SapoConfig
    | CispoConfig
    | RlooConfig
    | ReinforcePpConfig
    | ReinforcePpBaselineConfig
    | PpoConfig
    | DecoupledPpoConfig
    | M2poConfig
    | DppoConfig
    | VespoConfig
    | OpdConfig,
    Field(discriminator="name"),
    BeforeValidator(_named),
]
