"""The activities of the generation queue: they end with the endpoints on one policy version, or fail and are retried.

`refit` brings the weights of a new version, `restore_policy` the newest published ones to a server that was started
again. The worker runs one at a time, and a restoration reads the ledger when it runs: it never brings back a version
that was replaced while it waited. A few requests when nothing is to be done. With `generation.on_failed_endpoint:
quarantine` an endpoint that fails again is left out, in the ledger, until it takes a later version.
"""

import time

from temporalio import activity

from activities.errors import surfaced
from activities.generation.errors import WeightsMissing
from activities.generation.quarantine import LedgerQuarantine, is_tolerant
from activities.generation.refit import refit
from activities.generation.transports.transport import WeightTransport
from activities.generation.vllm import servers_of
from activities.heartbeat import heartbeats
from configs.recipe import Recipe
from storage.ledger import Ledger
from workflows.messages import WeightsRef
from workflows.training_messages import Refit, RefitDone, RestorePolicy


class GenerationActivities:
    """Refits of the endpoints that the recipe names."""

    def __init__(self, ledger: Ledger, recipe: Recipe, transport: WeightTransport) -> None:
        self._ledger = ledger
        self._transport = transport
        self._generation = recipe.generation
        self._servers = servers_of(recipe.generation)

    async def close(self) -> None:
        """Close the connections to the endpoints."""
        for server in self._servers:
            await server.close()

    @activity.defn
    async def refit(self, r: Refit) -> RefitDone:
        """Pause, load, stamp `policy-<version>`, resume, on every endpoint; recorded in the ledger."""
        with surfaced(boundary="generation", run_id=r.run_id):
            async with heartbeats():
                return await self._refit(r.run_id, r.weights)

    @activity.defn
    async def restore_policy(self, request: RestorePolicy) -> RefitDone:
        """A refit to the newest version that the run has published by now."""
        with surfaced(boundary="generation", run_id=request.run_id):
            async with heartbeats():
                newest = await self._ledger.weights.newest(request.run_id)
                if newest is None:
                    raise WeightsMissing(f"Run {request.run_id!r} has not published a policy version yet.")
                weights = WeightsRef(version=newest.version, path=newest.path, digest=newest.digest)
                return await self._refit(request.run_id, weights)

    async def _refit(self, run_id: str, weights: WeightsRef) -> RefitDone:
        started = time.monotonic()
        generation = self._generation
        leave_out = generation.on_failed_endpoint == "quarantine"
        quarantine = LedgerQuarantine(
            self._ledger.quarantines,
            run_id,
            weights.version,
            tolerant=leave_out and is_tolerant(activity.info().attempt, generation.max_refit_attempts),
        )
        await quarantine.read(hold=leave_out)
        done = await refit(
            self._servers, weights, generation.pause_mode, transport=self._transport, quarantine=quarantine
        )
        for endpoint in done.endpoints:
            await self._ledger.weights.record_refit(run_id, weights.version, endpoint.url, endpoint.seconds)
        activity.logger.info(
            "policy-%d is served by %d endpoints, %d are in quarantine",
            weights.version,
            len(done.endpoints),
            len(done.quarantined),
        )
        return RefitDone(
            version=weights.version,
            endpoints=len(done.endpoints),
            seconds=time.monotonic() - started,
            quarantined=done.quarantined,
        )
