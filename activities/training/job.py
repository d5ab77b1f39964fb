"""One activity of the trainer: its run, its lease, its deadline, its folders.

A folder's name carries the token of the lease that it was written under, so a trainer that was replaced, and wakes
late, writes to no folder of its successor.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from activities.generation.weights import weights_label
from activities.training.commands import Settings
from configs.recipe import Recipe
from storage.trainer_leases import TrainerLease

_NAME = re.compile(r"(?:version|policy)-(?P<version>\d+)(?:-lease-(?P<token>\d+))?")


@dataclass(frozen=True)
class Job:
    """What the parts of an activity share. `deadline`: when the trainer is given up, in the event loop's time."""

    recipe: Recipe
    lease: TrainerLease
    deadline: float
    say: Callable[[str], None]

    @property
    def run_id(self) -> str:
        """The run."""
        return self.lease.run_id

    @property
    def settings(self) -> Settings:
        """What the run's engine is made of."""
        recipe = self.recipe
        return Settings(recipe.training, recipe.grpo, recipe.rollouts.temperature, recipe.run.model.resolve())

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self._folder / "checkpoints"

    @property
    def weights(self) -> Path:
        """The folder of the run's exported weights."""
        return self._folder / "weights"

    def new_checkpoint(self, version: int) -> Path:
        """Where this activity puts a checkpoint of `version`."""
        return self.checkpoints / f"version-{version}-lease-{self.lease.token}"

    def new_weights(self, version: int) -> Path:
        """Where this activity puts the weights of `version`."""
        return self.weights / f"{weights_label(version)}-lease-{self.lease.token}"

    @property
    def _folder(self) -> Path:
        return self.recipe.training.output_dir.resolve() / self.run_id


def written(folder: Path) -> dict[str, tuple[int, int]]:
    """What checkpoints or weights are in a folder: name -> (version, token; 0 where an earlier release wrote it)."""
    if not folder.is_dir():
        return {}
    found = {path.name: _NAME.fullmatch(path.name) for path in folder.iterdir()}
    return {name: (int(match["version"]), int(match["token"] or 0)) for name, match in found.items() if match}
