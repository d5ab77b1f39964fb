"""A run in a ledger and two endpoints, and the activities of a generation worker on them."""

import dataclasses
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from temporalio.testing import ActivityEnvironment

from activities.generation.transports.file import FileTransport
from activities.generation.weights import weights_digest
from activities.generation_activities import GenerationActivities
from configs.recipe import Recipe
from storage.database import Database
from storage.ledger import Ledger
from tests.generation.fake_vllm import FakeVllm
from workflows.messages import WeightsRef
from workflows.training_messages import Refit, RefitDone, RestorePolicy

PATIENCE_S = 120.0


@dataclass
class SlowVllm(FakeVllm):
    """Its first load waits until the test lets it go on."""

    loading: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def _update(self, info: dict[str, str]) -> None:
        self.loading.set()
        self.go_on.wait(PATIENCE_S)
        super()._update(info)


@dataclass
class Site:
    """The run `run`; its recipe says `wait` until `quarantines` is called."""

    ledger: Ledger
    database: Database
    recipe: Recipe
    folder: Path
    endpoints: tuple[SlowVllm, SlowVllm]

    def set(self, **generation: Any) -> None:
        """Go on with other settings of `generation`."""
        section = self.recipe.generation.model_copy(update=generation)
        self.recipe = self.recipe.model_copy(update={"generation": section})

    async def publish(self, version: int) -> WeightsRef:
        """Export and publish a version of the run."""
        folder = self.folder / f"policy-{version}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights %d" % version)
        weights = WeightsRef(version=version, path=str(folder), digest=weights_digest(folder))
        lease = await self.ledger.trainer_leases.acquire("run", "trainer", 600)
        await self.ledger.weights.publish(lease, version, weights.path, weights.digest)
        return weights

    async def restore(self) -> RefitDone:
        """One restoration by a worker that has just started."""
        return await self._run("restore_policy", RestorePolicy(run_id="run"), 1)

    async def refit(self, weights: WeightsRef, attempt: int = 1) -> RefitDone:
        """One try of a refit by a worker that has just started."""
        return await self._run("refit", Refit(run_id="run", weights=weights), attempt)

    async def _run(self, name: str, request: object, attempt: int) -> RefitDone:
        activities = GenerationActivities(self.ledger, self.recipe, FileTransport())
        environment = ActivityEnvironment()
        environment.info = dataclasses.replace(environment.info, attempt=attempt)
        try:
            return await environment.run(getattr(activities, name), request)
        finally:
            await activities.close()
