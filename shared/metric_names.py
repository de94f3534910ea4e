"""Every metric of a run: which services emit it, its unit, its kind and what it means. The one place where they are declared.

`docs/make_metrics.py` writes docs/metrics.md from it, the sinks take kind and help from it, and tests/e2e/test_run.py fails when
a real run emits a name that is not here. A name that ends in `.*` stands for a family: what follows the dot says which one.

counter  grows for as long as the process lives, and begins anew with the next one; gauge: the value at that moment
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter"]
ANY = ("controller", "dcs", "reference", "reward", "rollout", "teacher", "trainer")
SCORERS = ("reference", "teacher")


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric, or a family of them."""

    name: str
    services: tuple[str, ...]
    kind: Kind
    unit: str
    help: str

    @property
    def family(self) -> str:
        """`wait_s` of `wait_s.*`, '' for a single metric."""
        return self.name.removesuffix(".*") if self.name.endswith(".*") else ""


def _gauge(services: tuple[str, ...], unit: str, **help: str) -> list[Declared]:
    return [Declared(name.replace("__", "."), services, "gauge", unit, text) for name, text in help.items()]


def _counter(services: tuple[str, ...], unit: str, **help: str) -> list[Declared]:
    names = {name: name.removesuffix("__each") + ".*" if name.endswith("__each") else name for name in help}
    return [Declared(names[name], services, "counter", unit, text) for name, text in help.items()]


COLOCATED = ("rollout", "trainer")
TRAINER, CONTROLLER, DCS, ROLLOUT, REWARD = ("trainer",), ("controller",), ("dcs",), ("rollout",), ("reward",)

DECLARED: tuple[Declared, ...] = (
    *_counter(
        ANY,
        "seconds",
        busy_s="working: an update, a group being sampled, a call being scored",
        wait_s__each="waiting, by what for: `groups`, `weights`, `checkpoint`, `prompts`, `receipts`, `reward`, `turn`, ...",
        cpu_s="CPU time of the process and all its children",
    ),
    *_counter(
        COLOCATED,
        "count",
        sleeps_total="times it left the device to the others (`placement: colocate`)",
        wakes_total="times it took it again",
    ),
    *_counter(
        COLOCATED,
        "seconds",
        sleep_s_total="what leaving the device took: weights and cache, or models and optimiser, given back",
        wake_s_total="what taking it again took; of an engine with its new weights",
    ),
    *_gauge(
        TRAINER,
        "1",
        reward="mean over the samples of the update",
        loss="of the update, over its denominator (docs/algorithms.md)",
        ratio="mean of policy / old log-probabilities, as the algorithm takes the ratio",
        ratio_max="largest of them",
        clip_fraction="share of tokens that the clip (or gate) holds back",
        tis_weight="mean correction weight of a token",
        rejected="share of tokens whose correction weight is 0",
        updated="1 if the policy moved, 0 if the update had no signal or was the critic's alone",
        pair_accuracy="preference pairs that the policy ranks as the data does, share",
        critic_loss="of the critic, over its denominator",
        critic_value="mean value over tokens",
        critic_return="mean return over tokens",
        critic_error="mean squared error of the values",
        critic_clip_fraction="share of tokens whose value is held back",
        critic_grad_norm="norm of the critic's gradient before clipping",
        critic_lr="the critic's learning rate in this update",
        grad_norm="norm of the gradient before clipping",
        lr="learning rate of this update",
        warm_start_loss="loss of the newest update of the warm start",
        preferences_loss="loss of the newest update of the preference phase",
    ),
    *_gauge(
        TRAINER,
        "nats",
        mismatch_kl="k3 estimate of KL(engine, trainer) over the sampled tokens",
        mismatch_abs="mean |log-probability in the trainer - in the engine|",
        mismatch_max="largest of them",
        entropy="mean entropy of the policy at a token",
        kl="k3 estimate of KL(policy, reference)",
        teacher_kl="k3 estimate of KL(policy, teacher)",
    ),
    *_gauge(
        TRAINER,
        "count",
        tokens="completion tokens of the update",
        denominator="what the loss was divided by (tokens, sequences or constants, by `algorithm.reduction`)",
        sequences="sequences of the update",
        nonfinite_logprobs="tokens whose log-probability was not finite, left out of the loss",
        version="number of the newest weights",
        warm_start_step="updates of the warm start so far",
        warm_start_steps="updates that the warm start will have",
        preferences_step="updates of the preference phase so far",
        preferences_steps="updates that the preference phase will have",
        weights_version="number of the weights that were handed out",
    ),
    *_gauge(
        TRAINER,
        "updates",
        staleness_mean="age of a trained sample's oldest token, mean over the update's samples",
        staleness_max="the oldest of them; never above `max_staleness`",
    ),
    *_gauge(TRAINER, "bytes", weights_bytes="size of the weights that were handed out"),
    *_gauge(
        TRAINER,
        "seconds",
        step_s="the update, from the first group waited for to the receipts",
        publish_wait_s="weights: waiting for the transfer before",
        copy_s="weights: copying them out of the model, which the next update waits for",
        checksum_s="weights: their digests",
        number_s="weights: asking the DCS for a number",
        snapshot_s="weights: writing the snapshot",
        announce_s="weights: announcing them",
        join_s="weights: until all members have joined the broadcast",
        broadcast_s="weights: sending",
        settle_s="weights: until every member has answered",
    ),
    *_gauge(
        CONTROLLER,
        "1",
        reward="mean over the groups trained in the update",
        reward_scored="mean over all groups scored since the update before, those that a filter dropped included",
        eval_reward="mean over the held-out prompts",
    ),
    *_gauge(
        CONTROLLER,
        "updates",
        staleness_mean="as the trainer's, from the receipts",
        staleness_max="as the trainer's, from the receipts",
        eval_oldest_step="step of the oldest weights that drew an evaluation sample",
    ),
    *_gauge(
        CONTROLLER,
        "groups",
        pending="groups on the way: issued, and neither trained nor dropped",
        slots="groups that may be on the way at once",
        eval_scored="held-out prompts that could be scored",
    ),
    *_counter(
        CONTROLLER,
        "groups",
        issued_total="issued in the whole run",
        trained_total="trained in the whole run",
        dropped_total="dropped in the whole run",
        dropped__each="dropped in the whole run, by reason",
    ),
    *_counter(CONTROLLER, "count", receipts_unreadable_total="receipts that could not be read and were skipped"),
    *_gauge(
        DCS,
        "count",
        version="number of the newest announced weights",
        epoch="of the broadcast group: how often it was formed",
        members="replicas in the broadcast group",
        holders="replicas that have answered that they serve the newest weights",
    ),
    *_counter(
        ROLLOUT,
        "count",
        groups_total="groups finished",
        samples_total="samples finished",
        tokens_total="completion tokens of finished groups",
        samples_kept_total="samples taken over, finished or begun, from a replica that died or stopped",
        samples_interrupted_total="interruptions that samples continued from",
        samples_truncated_total="samples cut off at `sampling.max_new_tokens`",
        samples_nonfinite_total="samples with a token whose log-probability is no number",
        engine_errors_total="requests that the engine refused or failed in",
        engine_timeouts_total="requests that the engine did not answer in time",
    ),
    *_gauge(ROLLOUT, "groups", running="groups being sampled, of `rollout.max_running_groups`"),
    *_counter(
        REWARD,
        "count",
        groups_total="groups scored",
        samples_total="samples scored",
        passed_total="groups handed on with advantages",
        kills_total="scoring processes that ran out of time and were killed",
        deaths_total="scoring processes that died by themselves",
        errors_total__each="calls without a score, by kind: `raised`, `not_a_number`, `not_finite`, `timeout`, `died`",
        dropped_total__each="groups dropped by a filter, by reason",
    ),
    *_gauge(REWARD, "count", scoring="groups being scored", processes="scoring processes"),
    *_counter(
        SCORERS,
        "count",
        groups_total="groups scored",
        tokens_total="tokens scored",
        failures_total="groups that could not be scored in a try",
        engine_deaths_total="engines that died",
    ),
    *_gauge(SCORERS, "groups", running="groups being scored"),
)

_BY_NAME = {(service, one.name): one for one in DECLARED for service in one.services}


def find(service: str, name: str) -> Declared | None:
    """What is declared of a name that `service` emitted; None: nothing."""
    exact = _BY_NAME.get((service, name))
    if exact is not None:
        return exact
    family, dot, _ = name.partition(".")
    return _BY_NAME.get((service, f"{family}.*")) if dot else None
