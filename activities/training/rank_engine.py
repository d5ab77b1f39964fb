"""One rank's engine: does what a command says and answers with an Outcome, never with an exception.

A step that was refused or cancelled before it was applied leaves the weights of the version before, and the engine with
them. Whatever else fails half-way through loading or training leaves no engine, so that nothing trains on from a state
that nobody knows; the next load makes a new one.
"""

import logging
import traceback

from activities.training.batch import BadBatch, TrainingBatch
from activities.training.commands import Command, Export, Load, Outcome, Save, Settings, Stop, Train
from activities.training.errors import TrainingError
from activities.training.lean_import import lean_import
from activities.training.watch import StepCancelled, Watch

with lean_import():
    from activities.training.megatron.engine import Engine

logger = logging.getLogger(__name__)


class RankEngine:
    """The engine of this process."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._engine: Engine | None = None
        self._settings: Settings | None = None

    def run(self, command: Command, watch: Watch) -> Outcome:
        """Carry out one command. `watch` looks on while a step trains."""
        before = None if self._engine is None else self._engine.version
        try:
            return Outcome(self._rank, self._metrics_of(command, watch))
        except Exception as error:
            cancelled, refused = isinstance(error, StepCancelled), isinstance(error, TrainingError | BadBatch)
            kept = isinstance(command, Train) and (cancelled or refused) and self._holds(before)
            if isinstance(command, Load | Train) and not kept:
                self._engine = None
            text = f"{type(error).__name__}: {error}"
            if cancelled:
                logger.info("rank %d: %s", self._rank, text)
            else:
                logger.exception("rank %d failed at %s", self._rank, type(command).__name__)
            if not (cancelled or refused):
                text += f"\n{traceback.format_exc(limit=-5)}"
            return Outcome(self._rank, error=text, refused=refused, cancelled=cancelled, kept=kept)

    def _metrics_of(self, command: Command, watch: Watch) -> dict[str, float]:
        match command:
            case Load(settings, checkpoint):
                engine = self._engine_for(settings)
                if checkpoint is None:
                    engine.load_model(settings.model_dir)
                else:
                    engine.load(checkpoint, settings.model_dir)
            case Train(batch):
                return self._loaded().train(TrainingBatch.from_bytes(batch), watch)
            case Export(folder):
                self._loaded().export(folder)
            case Save(folder):
                self._loaded().save(folder)
            case Stop():
                self._engine = None
        return {}

    def _holds(self, version: int | None) -> bool:
        return version is not None and self._engine is not None and self._engine.version == version

    def _engine_for(self, settings: Settings) -> Engine:
        """The engine, made anew for other settings (another run)."""
        if self._engine is None or settings != self._settings:
            self._engine = None  # frees the memory of the old one first
            self._engine = Engine(settings.training, settings.grpo, settings.temperature)
            self._settings = settings
        return self._engine

    def _loaded(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("The trainer has no model loaded: the command before this one failed.")
        return self._engine
