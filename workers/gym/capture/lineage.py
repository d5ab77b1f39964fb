"""NeMo-Gym's lineage resolver over the ledger. The matching is NeMo-Gym's own."""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

from typing import Any

from nemo_gym.token_id_capture.fingerprint import assistant_fingerprint
from nemo_gym.token_id_capture.lineage import RolloutLineage
from nemo_gym.token_id_capture.protocols import LineageResolution
from nemo_gym.token_id_capture.records import ParentResolutionStatus

from workers.gym.capture.backend import installed


class LedgerLineage:
    """One for all model servers of a process."""

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        """Which captured call a request continues. Only entries with its fingerprint can match."""
        fingerprint = assistant_fingerprint(request_items)
        if not fingerprint:
            return LineageResolution(ParentResolutionStatus.ROOT)
        backend = installed()
        async with backend.deadline():
            entries = await backend.captures.continuing(rollout_id, fingerprint)
            candidates = await backend.whole(entries)
        lineage = RolloutLineage()
        for entry in candidates:
            lineage.add_entry(entry)
        return lineage.resolve(request_items)

    def is_process_shared(self) -> bool:
        """All processes ask the same database."""
        return True

    async def close(self) -> None:
        """The process closes its ledger itself."""
