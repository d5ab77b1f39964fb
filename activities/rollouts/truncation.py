"""`rollouts.truncate_noncontiguous_episodes`: an answer is kept up to the first prompt that rewrites earlier tokens.

That call and everything after it are dropped, even what would be contiguous again; what is kept keeps its tokens, masks
and log-probabilities, and the rollout its whole reward. Only this one fault is tolerated. The rule and the metric are
NeMo-RL's, for agents that carry their tokens in their own answer.
"""

import statistics
from collections.abc import Mapping, Sequence

from activities.rollouts.evidence import CallEvidence
from activities.rollouts.segments import Segment, boundary_before
from storage.records import SettledRollout

METRIC = "noncontiguous_truncated"


def kept(calls: Sequence[CallEvidence]) -> tuple[CallEvidence, ...]:
    """The calls before the first undeclared rewrite; the first call is always kept."""
    segment = Segment(None)
    for place, call in enumerate(calls):
        if boundary_before(call) is not None:
            segment = Segment(None)
        if not segment.is_extended_by(call):
            return tuple(calls[:place])
        segment.extend(call)
    return tuple(calls)


def was_truncated(rollout: SettledRollout) -> bool:
    """Whether calls of the settled answer were dropped: those it reported and did not go through."""
    return rollout.generated_calls > rollout.model_calls


def metrics(rollouts: Mapping[str, Sequence[SettledRollout]]) -> dict[str, float]:
    """`{agent}/noncontiguous_truncated/{mean,max,min,median,stddev}` of each agent's rollouts that gave a result."""
    found: dict[str, float] = {}
    for agent, settled in rollouts.items():
        values = [float(was_truncated(rollout)) for rollout in settled if rollout.reward is not None]
        if values:
            found |= {
                f"{agent}/{METRIC}/mean": statistics.fmean(values),
                f"{agent}/{METRIC}/max": max(values),
                f"{agent}/{METRIC}/min": min(values),
                f"{agent}/{METRIC}/median": statistics.median(values),
                f"{agent}/{METRIC}/stddev": statistics.stdev(values) if len(values) > 1 else 0.0,
            }
    return found
