"""Scores a few rollouts of each step again, under the versions that sampled their tokens (algo/rescoring.py).

    weights of each step --> KeptVersions (a byte budget) --+
    rows of a step ------> a random share of rollouts ------+--> differences per actor --> metrics, record, alarm

Training does not depend on it: random numbers are drawn from a generator of its own, and the weights are put back
before the step, in place and bit for bit.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from pipelinerl_core.algo.rescoring import Evidence, Float64Array, HealthyMean, num_fresh_tokens, owners
from pipelinerl_core.algo.spans import clipped
from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ParityError
from pipelinerl_core.interfaces import Rescorer
from pipelinerl_core.ledger.groups import ActorKey
from pipelinerl_core.messages import ActorSample
from pipelinerl_core.run.records import RescoredActor
from pipelinerl_core.types import Float32Array, Rollout, TrainingRow

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

DEFAULT_VERSIONS = 2
"""With trainer.rescore_bytes=0, this many earlier versions are kept."""
# A version makes room for a newer one as soon as at most this share of a step's rollouts began with it or before it.
_LATE_SHARE = 0.25
# A step compares when this many rollouts are due: one forward pass of one rollout costs nearly as much as of four.
_LEAST_ROLLOUTS = 4
# Rollouts that could not be compared are made up for in later steps, at most this many times the share of a step.
_MAX_DUE_STEPS = 5.0
# Actors whose newest compared token is older than this many steps are forgotten: they have ended.
_SILENT_STEPS = 20
# Rollouts of a step on which the divergence from the start is measured.
_DIVERGENCE_ROLLOUTS = 64


class KeptVersions:
    """Versions in memory: the newest, and earlier ones within a byte budget.

    A version is kept while rollouts that began with it arrive, instead of always the newest ones: tokens that are
    trained with a lag of k steps were sampled by a version that has been replaced k times.
    """

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: 0 for two versions."""
        self._max_bytes = max_bytes
        self._kept: dict[int, Mapping[str, torch.Tensor]] = {}
        self._newest: tuple[int, Mapping[str, torch.Tensor]] | None = None

    def add(self, version: int, weights: "Mapping[str, torch.Tensor]") -> None:
        """Replace the newest version."""
        self._newest = version, weights

    def keep(self, oldest: int) -> None:
        """Forget versions below `oldest`; then keep the newest version if the budget allows."""
        self._kept = {version: weights for version, weights in self._kept.items() if version >= oldest}
        if self._newest is None:
            return
        version, weights = self._newest
        size = sum(weight.nbytes for weight in weights.values())
        budget = self._max_bytes or DEFAULT_VERSIONS * size
        if (len(self._kept) + 1) * size <= budget:
            self._kept[version] = weights

    def __contains__(self, version: int) -> bool:
        return version in self._kept

    def __getitem__(self, version: int) -> "Mapping[str, torch.Tensor]":
        return self._kept[version]

    @property
    def num_bytes(self) -> int:
        return sum(weight.nbytes for weights in self._kept.values() for weight in weights.values())


@dataclass(slots=True, eq=False)
class _Differences:
    """Differences of one actor in one step, nats."""

    mismatch: dict[int, list[Float64Array]] = field(default_factory=dict)
    """By the version that the tokens name."""
    stale_kv: list[Float64Array] = field(default_factory=list)
    staleness: list[Float64Array] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Watched:
    """The evidence about one actor epoch."""

    scored_at: int = 0
    evidence: Evidence = field(default_factory=Evidence)
    alarmed_at: int | None = None
    """The trainer's version when the alarm began."""
    later: Evidence = field(default_factory=Evidence)
    """On the tokens of newer versions than this one alone: an alarm here means that the fault has not healed."""

    def add(self, version: int, mismatch: Mapping[int, Sequence[Float64Array]], norm: float) -> None:
        self.scored_at = version
        self.evidence.add(_joined_versions(mismatch), norm)
        if not self.evidence.is_alarm:
            self.alarmed_at, self.later = None, Evidence()
            return
        if self.alarmed_at is None:
            self.alarmed_at = version
        self.later.add(_joined_versions(mismatch, after=self.alarmed_at), norm)


@dataclass(frozen=True, slots=True)
class Rescored:
    """The result of one step."""

    actors: dict[str, RescoredActor]
    """"<actor>/<epoch>" -> its figures; actors without a compared token in this step, and without an alarm, are left
    out."""
    metrics: dict[str, float]

    @property
    def alarms(self) -> dict[str, str]:
        """Actor -> text of its alarm."""
        return {actor: figures.alarm for actor, figures in self.actors.items() if figures.alarm}


class Rescoring:
    """Re-scores a share of the rollouts of each step; all methods are called by the trainer's main thread."""

    def __init__(self, rescorer: Rescorer | None, config: RunConfig) -> None:
        self._rescorer = rescorer if config.trainer.rescore_share else None
        self._config = config
        self._kept = KeptVersions(config.trainer.rescore_bytes)
        self._current: dict[str, torch.Tensor] = {}
        self._due = 0.0  # rollouts
        self._chosen_at: dict[str, int] = {}  # by actor, version at which a rollout was chosen last
        self._healthy = HealthyMean(config.dtype)
        self._watched: dict[str, _Watched] = {}  # by "<actor>/<epoch>", like the next
        self._alarmed: dict[str, str] = {}
        self.expelled: set[ActorKey] = set()
        """Actors that the hub must not serve any more."""
        if rescorer is None and config.trainer.rescore_share:
            logger.warning(
                "learner.kind=%s divides the weights among the ranks, so no rollout is scored again: nothing "
                "compares the engines' versions after the first step (trainer.rescore_share=0 hides this line)",
                config.learner.kind,
            )

    def adopt(self, metrics: Mapping[str, float]) -> None:
        """Continue a run with the healthy mean of its newest commit: engines may have failed since the start."""
        if "rescored/healthy" in metrics:
            self._healthy.adopt(metrics["rescored/healthy"])

    def measure(self, rollouts: Sequence[Rollout], scores: Sequence[Float32Array]) -> None:
        """Take the rollouts of the parity gate, and the trainer's log-probabilities, as those of healthy engines."""
        differences: dict[str, list[Float64Array]] = {}
        for rollout, score in zip(rollouts, scores, strict=True):
            mask = rollout.loss_mask
            differences.setdefault(rollout.actor, []).append(_difference(rollout.rollout_logprobs[mask], score[mask]))
        self._measure({actor: _joined(parts) for actor, parts in differences.items()})

    def _measure(self, differences: Mapping[str, Float64Array]) -> None:
        if self._healthy.mean is not None:
            return
        self._healthy.measure(differences)
        if self._healthy.is_refused:
            logger.warning(
                "the engines differ from the trainer by %.2g nats per token at the start, more than the rounding of "
                "model.dtype=%s: actors are compared with %.2g instead (docs/off-policy.md)",
                self._healthy.mean, self._config.dtype, self._healthy.norm,
            )  # fmt: skip

    def published(self, version: int, weights: "Mapping[str, torch.Tensor]") -> None:
        """The learner has the weights of `version`. weights: a snapshot of them, which may be kept."""
        if self._rescorer is not None:
            self._current = self._rescorer.trained_weights(weights)
            if self._config.publishes(version):
                self._kept.add(version, self._current)

    def rescore(
        self,
        version: int,
        rows: Sequence[TrainingRow],
        epochs: Mapping[tuple[int, int], int],
        actors: Mapping[str, ActorSample],
    ) -> Rescored:
        """Compare a share of the rollouts before they are trained.

        Args:
            version: of the learner's weights.
            rows: of the step.
            epochs: (group_id, attempt) -> epoch of the actor that finished the group.
            actors: "<actor>/<epoch>" -> ActorSample, from the reservation.

        Raises ParityError if every live actor is to be expelled.
        """
        rollouts = [row.rollout for row in rows if row.rollout.num_tokens]
        if self._rescorer is None or not self._current or not rollouts:
            return Rescored({}, {})
        began = time.thread_time()
        firsts = sorted(rollout.min_version for rollout in rollouts)
        self._kept.keep(firsts[int(_LATE_SHARE * len(firsts))])
        chosen = self._choose(version, rollouts)
        by_actor: dict[str, _Differences] = {}
        if chosen:
            for rollout, scores in zip(chosen, self._score(version, chosen), strict=True):
                self._compare(rollout, version, scores, epochs.get((rollout.group_id, rollout.attempt), 0), by_actor)
        judged = self._judge(version, by_actor)
        if self._config.trainer.rescore_alarm == "expel":
            self._expel(actors)
        metrics = self._metrics(version, rollouts, by_actor)
        return Rescored(judged, metrics | {"time/rescore_cpu_seconds": time.thread_time() - began})

    def divergence(
        self, start: "Callable[[], Mapping[str, torch.Tensor]]", rows: Sequence[TrainingRow]
    ) -> dict[str, float]:
        """policy/kl_start: the divergence of the weights of the last `published` from the weights of the start, on a
        few rollouts of the step before; empty without a rescorer.

        start: reads version 0 as it was published; not called with LoRA, where version 0 has no adapters.
        """
        rollouts = [row.rollout for row in rows if row.rollout.loss_mask.any()]
        rollouts = rollouts[:: -(-len(rollouts) // _DIVERGENCE_ROLLOUTS)] if rollouts else []
        if self._rescorer is None or not rollouts:
            return {}
        if self._config.learner.lora_rank:
            first = {name: 0 * weight for name, weight in self._current.items()}
        else:
            first = self._rescorer.trained_weights(start())
        now = self._rescorer.logprobs_of(rollouts)
        try:
            self._rescorer.set_trained_weights(first)
            then = self._rescorer.logprobs_of(rollouts)
        finally:
            self._rescorer.set_trained_weights(self._current)
        gaps = [_difference(*both)[rollout.loss_mask] for *both, rollout in zip(then, now, rollouts, strict=True)]
        gaps_N = np.concatenate(gaps)
        return {"policy/kl_start": float((np.exp(gaps_N) - gaps_N - 1).mean())}

    def _choose(self, version: int, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The due share, of rollouts whose first version is available; actors that were compared long ago first."""
        share = self._config.trainer.rescore_share * len(rollouts)
        self._due = min(self._due + share, max(float(_LEAST_ROLLOUTS), _MAX_DUE_STEPS * share))
        num = int(self._due)
        if num < min(_LEAST_ROLLOUTS, len(rollouts)):
            return []
        order = np.random.default_rng((self._config.seed, version)).permutation(len(rollouts))
        usable = [rollouts[index] for index in order if self._is_available(rollouts[index].min_version, version)]
        usable.sort(key=lambda rollout: self._chosen_at.get(rollout.actor, -1))
        # Of each actor in turn, so that one actor with many rollouts does not hide another one.
        turns: dict[str, list[Rollout]] = {}
        for rollout in usable:
            turns.setdefault(rollout.actor, []).append(rollout)
        chosen: list[Rollout] = []
        while len(chosen) < min(num, len(usable)):
            chosen += [own.pop() for own in turns.values() if own][: num - len(chosen)]
        self._due -= len(chosen)
        self._chosen_at |= dict.fromkeys((rollout.actor for rollout in chosen), version)
        return chosen

    def _is_available(self, wanted: int, version: int) -> bool:
        return wanted == version or wanted in self._kept

    def _score(self, version: int, rollouts: Sequence[Rollout]) -> list[dict[int, Float32Array]]:
        """Of each rollout: version -> log-probabilities of its tokens up to the last one of that version.

        The current version scores whole rollouts. Versions that are not available have no scores.
        """
        assert self._rescorer is not None
        scores: list[dict[int, Float32Array]] = [{} for _ in rollouts]
        _add(scores, version, range(len(rollouts)), self._rescorer.logprobs_of(rollouts))
        wanted = {span.version for rollout in rollouts for span in rollout.weight_spans} - {version}
        others = sorted(wanted_version for wanted_version in wanted if wanted_version in self._kept)
        try:
            for other in others:
                users = [index for index, rollout in enumerate(rollouts) if _end_of(rollout, other)]
                self._rescorer.set_trained_weights(self._kept[other])
                parts = [prefix(rollouts[index], _end_of(rollouts[index], other)) for index in users]
                _add(scores, other, users, self._rescorer.logprobs_of(parts))
        finally:
            if others:
                self._rescorer.set_trained_weights(self._current)
        return scores

    def _compare(
        self,
        rollout: Rollout,
        version: int,
        scores: Mapping[int, Float32Array],
        epoch: int,
        by_actor: dict[str, _Differences],
    ) -> None:
        num_fresh = num_fresh_tokens(rollout)
        for owned in owners(rollout, epoch):
            differences = by_actor.setdefault(owned.actor, _Differences())
            for span in rollout.weight_spans:
                start, end = max(span.start, owned.start), min(span.end, owned.end)
                if span.version not in scores or start >= end:
                    continue
                mask = rollout.loss_mask[start:end]
                scored = scores[span.version][start:end][mask]
                is_fresh = start < num_fresh
                kind = differences.mismatch.setdefault(span.version, []) if is_fresh else differences.stale_kv
                kind.append(_difference(rollout.rollout_logprobs[start:end][mask], scored))
                if span.version != version:
                    differences.staleness.append(_difference(scores[version][start:end][mask], scored))

    def _judge(self, version: int, by_actor: Mapping[str, _Differences]) -> dict[str, RescoredActor]:
        self._measure({actor: _joined_versions(differences.mismatch) for actor, differences in by_actor.items()})
        norm = self._healthy.norm
        for actor, differences in by_actor.items():
            watched = self._watched.setdefault(actor, _Watched())
            watched.add(version, differences.mismatch, norm)
            if not watched.evidence.is_alarm:
                self._healthy.follow(_joined_versions(differences.mismatch))
        newest = dict(sorted(map(ActorKey.parse, self._watched)))  # name -> its largest epoch
        for actor, watched in list(self._watched.items()):
            name, epoch = ActorKey.parse(actor)
            if epoch < newest[name] or watched.scored_at < version - _SILENT_STEPS:
                del self._watched[actor]
        texts = {actor: watched.evidence.text(norm) for actor, watched in self._watched.items()}
        alarms = {actor: text for actor, text in texts.items() if text}
        self._log(alarms)
        return {
            actor: _record(by_actor.get(actor, _Differences()), alarms.get(actor, ""))
            for actor in sorted({*by_actor, *alarms})
        }

    def _expel(self, actors: Mapping[str, ActorSample]) -> None:
        lasting = (actor for actor, watched in self._watched.items() if watched.later.is_alarm)
        new = {ActorKey.parse(actor) for actor in lasting} - self.expelled
        if not new:
            return
        self.expelled |= new
        newest = max((sample.at for sample in actors.values()), default=0.0)
        silent_seconds = self._config.placement.lease_seconds
        live = {ActorKey.parse(actor) for actor, sample in actors.items() if sample.at >= newest - silent_seconds}
        if live <= self.expelled:
            raise ParityError(
                "every actor is expelled (trainer.rescore_alarm=expel): no engine samples from the versions that its "
                f"tokens name: {'; '.join(f'{actor}: {text}' for actor, text in sorted(self._alarmed.items()))}"
            )

    def _log(self, alarms: Mapping[str, str]) -> None:
        for actor in alarms.keys() - self._alarmed.keys():
            logger.error(
                "%s does not sample from the versions that its tokens name: %s. Restart the actor "
                "(docs/off-policy.md)", actor, alarms[actor],
            )  # fmt: skip
        for actor in self._alarmed.keys() - alarms.keys():
            logger.info("%s agrees with the trainer again", actor)
        self._alarmed = dict(alarms)

    def _metrics(
        self, version: int, rollouts: Sequence[Rollout], by_actor: Mapping[str, _Differences]
    ) -> dict[str, float]:
        spans = [(span, rollout) for rollout in rollouts for span in rollout.weight_spans]
        gone = sum(
            int(np.count_nonzero(rollout.loss_mask[span.start : span.end]))
            for span, rollout in spans
            if not self._is_available(span.version, version)
        )
        kinds = {
            "mismatch": _joined([_joined_versions(differences.mismatch) for differences in by_actor.values()]),
            "stale_kv": _joined([part for differences in by_actor.values() for part in differences.stale_kv]),
            "staleness": _joined([part for differences in by_actor.values() for part in differences.staleness]),
        }
        means = {f"rescored/{name}": _mean_abs(values) for name, values in kinds.items()}
        means["rescored/healthy"] = self._healthy.mean
        return {name: mean for name, mean in means.items() if mean is not None} | {
            "rescored/tokens": float(len(kinds["mismatch"]) + len(kinds["stale_kv"])),
            "rescored/gone_tokens": float(gone),
            "rescored/kept_bytes": float(self._kept.num_bytes),
            "rescored/alarms": float(len(self._alarmed)),
        }


def prefix(rollout: Rollout, num_tokens: int) -> Rollout:
    """The rollout as if it had ended after some tokens, for scoring."""
    if num_tokens == rollout.num_tokens:
        return rollout
    return replace(
        rollout,
        completion_token_ids=rollout.completion_token_ids[:num_tokens],
        rollout_logprobs=rollout.rollout_logprobs[:num_tokens],
        loss_mask=rollout.loss_mask[:num_tokens],
        weight_spans=tuple(clipped(rollout.weight_spans, num_tokens)),
        turn_spans=(),
        turn_rewards=(),
        branch_starts=tuple(start for start in rollout.branch_starts if start < num_tokens),
    )


def _end_of(rollout: Rollout, version: int) -> int:
    """End of the last token of a version; 0 if there is none."""
    return max((span.end for span in rollout.weight_spans if span.version == version), default=0)


def _add(
    scores_of: list[dict[int, Float32Array]], version: int, places: Iterable[int], scores: Sequence[Float32Array]
) -> None:
    for place, score in zip(places, scores, strict=True):
        scores_of[place][version] = score


def _joined(parts: Sequence[Float64Array]) -> Float64Array:
    return np.concatenate(parts) if parts else np.zeros(0)


def _joined_versions(mismatch: Mapping[int, Sequence[Float64Array]], *, after: int = -1) -> Float64Array:
    """The differences of all versions above `after`, joined."""
    return _joined([part for version, parts in mismatch.items() if version > after for part in parts])


def _difference(logprobs: Float32Array, other: Float32Array) -> Float64Array:
    return logprobs.astype(np.float64) - other.astype(np.float64)


def _record(differences: _Differences, alarm: str) -> RescoredActor:
    mismatch_M, stale_kv_M = _joined_versions(differences.mismatch), _joined(differences.stale_kv)
    staleness_M = _joined(differences.staleness)
    return RescoredActor(
        tokens=len(mismatch_M),
        mismatch=_mean_abs(mismatch_M),
        signed_mismatch=float(mismatch_M.mean()) if len(mismatch_M) and np.isfinite(mismatch_M).all() else None,
        stale_kv_tokens=len(stale_kv_M),
        stale_kv=_mean_abs(stale_kv_M),
        staleness_tokens=len(staleness_M),
        staleness=_mean_abs(staleness_M),
        alarm=alarm,
    )


def _mean_abs(values_M: Float64Array) -> float | None:
    """None without values, and for values that are not finite, which no record may have."""
    return float(np.abs(values_M).mean()) if len(values_M) and np.isfinite(values_M).all() else None
