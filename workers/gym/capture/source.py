"""NeMo-Gym's token source over the ledger: reads a capture as one frozen snapshot and retires exactly that."""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot

from workers.gym.capture.backend import installed


class LedgerTokenSource:
    """For whoever consumes captures in NeMo-Gym's form."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """The entries of a capture, which takes no more from now on."""
        backend = installed()
        async with backend.deadline():
            frozen = await backend.captures.freeze(rollout_id)
            entries = tuple(await backend.whole(frozen.entries))
        return TokenCaptureSnapshot(rollout_id, entries, frozen.incomplete, frozen.snapshot_id, frozen.version)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Retire the snapshot, unless the capture has changed since."""
        backend = installed()
        async with backend.deadline():
            return await backend.captures.retire(rollout_id, snapshot_id, version)

    async def close(self) -> None:
        """The process closes its ledger itself."""
