"""Which recorded responses the rollout went through; all others are dead branches, and nothing of them trains.

An answer that carries tokens says it itself: each of its calls equals one recorded response, token for token. Without
tokens, the chain ends at the response that the agent declares to be its last, else where the parent links lead; where
they lead to more than one place the rollout is masked, for a wrong guess would train on what the agent threw away. The
rules are NeMo-RL's: declared before heuristic before mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from activities.errors import IntegrityError
from activities.rollouts.answer import Answer
from activities.rollouts.evidence import CallEvidence
from storage.records import AttemptCall, CallPosition


@dataclass(frozen=True)
class Selection:
    """The selected responses in order, or the reason for which none can be named."""

    calls: tuple[AttemptCall, ...]
    unselected: str | None = None


def select(answer: Answer, responses: Sequence[AttemptCall]) -> Selection:
    """The selected ones among the responses of an attempt (generated and replayed calls, by ordinal).

    Raises:
        IntegrityError: a call of the answer equals no recorded response.
    """
    if answer.calls:
        return Selection(_matched(answer.calls, responses))
    if not responses:
        return Selection(())
    return _declared(answer, responses) or _heuristic(responses)


def _matched(calls: Sequence[CallEvidence], responses: Sequence[AttemptCall]) -> tuple[AttemptCall, ...]:
    """For each call of the answer the first response of equal tokens; none is taken twice."""
    free: dict[tuple[tuple[int, ...], tuple[int, ...]], list[AttemptCall]] = {}
    for response in reversed(responses):
        free.setdefault((response.prompt_token_ids, response.sampled_token_ids), []).append(response)
    matched: list[AttemptCall] = []
    for call in calls:
        equal = free.get((tuple(call.prompt_tokens), tuple(call.sampled_tokens)))
        if not equal:
            raise IntegrityError(
                f"model call {call.ordinal} of the answer ({len(call.prompt_tokens)} prompt tokens, "
                f"{len(call.sampled_tokens)} sampled) equals none of the {len(responses)} recorded responses: the "
                "agent changed its tokens, reported it twice, or had it from another model server"
            )
        matched.append(equal.pop())
    return tuple(matched)


def _declared(answer: Answer, responses: Sequence[AttemptCall]) -> Selection | None:
    """The chain to the response that the agent names, None where it names none.

    An explicit name must be recorded. The id of the answer itself names a response only if there is one: many agents
    make up an id of their own.
    """
    by_id = {response.response_id: response for response in responses}
    if answer.terminal_id is not None and answer.terminal_id not in by_id:
        return Selection((), f"missing_terminal_row: no response {answer.terminal_id} is recorded")
    terminal = by_id.get(answer.terminal_id or answer.response_id)
    return None if terminal is None else Selection(_chain(terminal, _Tree(responses)))


def _heuristic(responses: Sequence[AttemptCall]) -> Selection:
    tree = _Tree(responses)
    roots = [response for response in responses if response.parent is None]
    grown = [root for root in roots if tree.children(root)]
    if not grown and len(roots) > 1:
        return Selection((), f"ambiguous_terminal: {_named(roots)} begin conversations that nothing continues")
    node = (grown or roots)[0]
    for root in roots:
        if root is not node and root.continuity == "new_segment":
            return Selection((), f"ambiguous_terminal: whether call {root.ordinal} is of the rollout is not recorded")
    while children := tree.children(node):
        alive = [child for child in children if tree.children(child)] or children
        if len(alive) > 1:
            return Selection((), f"ambiguous_terminal: {_named(alive)} all continue call {node.ordinal}")
        node = alive[0]
    return Selection(_chain(node, tree))


class _Tree:
    """The parent links between the responses of one attempt, which point to where a response was generated."""

    def __init__(self, responses: Sequence[AttemptCall]) -> None:
        self._at: dict[CallPosition | None, AttemptCall] = {response.position: response for response in responses}
        self._children: dict[CallPosition, list[AttemptCall]] = {}
        for response in responses:
            if response.parent is not None:
                if response.parent not in self._at:
                    raise IntegrityError(
                        f"call {response.ordinal} continues call {response.parent.ordinal} of attempt "
                        f"{response.parent.attempt}, which this attempt never asked for"
                    )
                self._children.setdefault(response.parent, []).append(response)

    def parent(self, response: AttemptCall) -> AttemptCall | None:
        return self._at[response.parent] if response.parent is not None else None

    def children(self, response: AttemptCall) -> list[AttemptCall]:
        return self._children.get(response.position, []) if response.position is not None else []


def _chain(terminal: AttemptCall, tree: _Tree) -> tuple[AttemptCall, ...]:
    """From the root to the terminal. A call's parent was recorded before it, so that there is no cycle."""
    chain = [terminal]
    while (parent := tree.parent(chain[-1])) is not None:
        chain.append(parent)
    return tuple(reversed(chain))


def _named(calls: Sequence[AttemptCall]) -> str:
    return "calls " + ", ".join(str(call.ordinal) for call in calls)
