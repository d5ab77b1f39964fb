"""From model calls to segments: each a training row, in which every prompt extends the tokens before it.

Every sampled token stands in exactly one segment with loss mask 1; everything the policy only read has mask 0. A
segment starts where context compaction declared a boundary, or where the model server recorded that it continues no
earlier call, and nowhere else: an undeclared rewrite is an error, because the policy's own tokens would silently become
prompt. The rule is NeMo-RL's, between a call and the one right before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from activities.errors import IntegrityError
from activities.rollouts.evidence import CallEvidence


@dataclass
class Segment:
    """A maximal run of calls. tokens, loss_mask, log_probs: [tokens]; a log-probability is 0 where the mask is 0.

    `boundary`: why it starts; None for a rollout's first segment.
    """

    boundary: str | None
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def is_extended_by(self, call: CallEvidence) -> bool:
        """Whether the call's prompt starts with every token of the segment."""
        return call.prompt_tokens[: len(self.tokens)] == self.tokens

    def extend(self, call: CallEvidence) -> None:
        """Append what the call's prompt adds, then its sampled tokens."""
        delta = call.prompt_tokens[len(self.tokens) :]
        self.tokens += delta + call.sampled_tokens
        self.loss_mask += [0] * len(delta) + [1] * len(call.sampled_tokens)
        self.log_probs += [0.0] * len(delta) + call.log_probs


def boundary_before(call: CallEvidence) -> str | None:
    """The recorded reason for which a segment starts with this call, if there is one.

    What the agent declares counts over the model server's record: it knows whether it rewrote its history.
    """
    return call.declared.boundary if call.declared is not None else call.new_segment


def cut(calls: Sequence[CallEvidence]) -> tuple[list[Segment], list[int]]:
    """Cut calls into segments; returns the segments and, for each call, the index of its segment.

    Raises:
        IntegrityError: a rewrite without a recorded boundary, a declared boundary without a rewrite, a call without
            sampled tokens.
    """
    segments: list[Segment] = []
    places: list[int] = []
    for turn, call in enumerate(calls, start=1):
        if not call.sampled_tokens:
            raise IntegrityError(f"turn {turn} has no sampled tokens")
        current = segments[-1] if segments else None
        boundary = boundary_before(call)
        extends = current is not None and current.is_extended_by(call)
        if current is not None and boundary is None and not extends:
            raise IntegrityError(
                f"Material rewrite before turn {turn} has no boundary record: the prompt does not start with the "
                f"{len(current.tokens)} tokens of the turns before it (a chat template that rewrites earlier turns?)"
            )
        if extends and boundary is not None and call.declared is not None:
            raise IntegrityError(f"Boundary for turn {turn} does not correspond to a rewrite")
        if current is None or boundary is not None:
            current = Segment(boundary if segments else None)
            segments.append(current)
        current.extend(call)
        places.append(len(segments) - 1)
    return segments, places
