"""One rank's engine: does what a command says and answers with an Outcome, never with an exception.

A command that failed half-way through loading or training leaves no engine, so that nothing trains on from a state that
nobody knows; the next load makes a new one.
"""

import logging
import traceback

from activities.training.batch import BadBatch, TrainingBatch
from activities.training.commands import Command, Export, Load, Outcome, Save, Settings, Stop, Train
from activities.training.errors import TrainingError
from activities.training.megatron.engine import Engine

logger = logging.getLogger(__name__)


class RankEngine:
    """The engine of this process."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._engine: Engine | None = None
        self._settings: Settings | None = None

    def run(self, command: Command) -> Outcome:
        """Carry out one command."""
        try:
            return Outcome(self._rank, self._metrics_of(command))
        except Exception as error:
            logger.exception("rank %d failed at %s", self._rank, type(command).__name__)
            if isinstance(command, Load | Train):
                self._engine = None
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-5)}"
            return Outcome(self._rank, error=text, refused=isinstance(error, TrainingError | BadBatch))

    def _metrics_of(self, command: Command) -> dict[str, float]:
        match command:
            case Load(settings, checkpoint):
                engine = self._engine_for(settings)
                if checkpoint is None:
                    engine.load_model(settings.model_dir)
                else:
                    engine.load(checkpoint, settings.model_dir)
            case Train(batch):
                return self._loaded().train(TrainingBatch.from_bytes(batch))
            case Export(folder):
                self._loaded().export(folder)
            case Save(folder):
                self._loaded().save(folder)
            case Stop():
                self._engine = None
        return {}

    def _engine_for(self, settings: Settings) -> Engine:
        """The engine, made anew for other settings (another run)."""
        if self._engine is None or settings != self._settings:
            self._engine = None  # frees the memory of the old one first
            self._engine = Engine(settings.training, settings.loss, settings.seed)
            self._settings = settings
        return self._engine

    def _loaded(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("The trainer has no model loaded: the command before this one failed.")
        return self._engine
