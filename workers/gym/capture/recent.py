"""The last recorded responses that this process served: a shortcut to tokens that the ledger has, and never more."""

from collections import OrderedDict

from storage.records import RecordedResponse
from workers.gym.capture.served import Served

MAX_TOKENS = 1_000_000  # some 40 MB

Key = tuple[str, int, int]  # rollout, attempt, ordinal


class RecentResponses:
    """At most MAX_TOKENS tokens; what was not used for longest goes first."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._responses: OrderedDict[Key, RecordedResponse] = OrderedDict()

    def add(self, served: Served) -> None:
        """Keep a response."""
        position = served.response.position
        key = (served.rollout_id, position.attempt, position.ordinal)
        if key not in self._responses:
            self._tokens += _size(served.response)
        self._responses[key] = served.response
        self._responses.move_to_end(key)
        while self._tokens > self._max_tokens and self._responses:
            _, dropped = self._responses.popitem(last=False)
            self._tokens -= _size(dropped)

    def get(self, rollout_id: str, attempt: int, ordinal: int) -> RecordedResponse | None:
        """The response, if it is still here."""
        response = self._responses.get((rollout_id, attempt, ordinal))
        if response is not None:
            self._responses.move_to_end((rollout_id, attempt, ordinal))
        return response


def _size(response: RecordedResponse) -> int:
    return len(response.prompt_token_ids) + len(response.sampled_token_ids)
