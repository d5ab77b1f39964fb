"""NeMo-Gym's token sink over the ledger.

NeMo-Gym releases a response although its sink fails. So the promise that nothing is released unrecorded is kept by the
policy model's client, and the sink adds NeMo-Gym's own view of the same calls.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

from nemo_gym.token_id_capture.records import TokenEntry

from workers.gym.capture.backend import installed


class LedgerTokenSink:
    """One for all model servers of a process."""

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Before a call runs: if its entry never comes, the capture is incomplete."""
        backend = installed()
        async with backend.deadline():
            await backend.captures.begin(rollout_id, model_call_id)

    async def put(self, entry: TokenEntry) -> None:
        """Durable, and visible to every resolver, on return."""
        backend = installed()
        async with backend.deadline():
            await backend.put(entry)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:  # noqa: ARG002 (NeMo-Gym's name)
        """A call is missing, whichever."""
        backend = installed()
        async with backend.deadline():
            await backend.captures.mark_incomplete(rollout_id)

    async def close(self) -> None:
        """The process closes its ledger itself."""
