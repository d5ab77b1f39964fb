"""The ledger: everything of a run that must survive, one small class per noun.

Every write is idempotent: it is inserted, and on conflict the stored record is read back and returned, so a caller that
died after a write can repeat it. A second write that differs is refused with a typed error.
"""

from storage.actions import Actions
from storage.batches import Batches
from storage.blobs import BlobStore
from storage.budgets import Budgets
from storage.checks import Checks
from storage.copies import Copies
from storage.database import Database
from storage.evaluations import Evaluations
from storage.groups import Groups
from storage.model_calls import ModelCalls
from storage.places import Places
from storage.prompts import Prompts
from storage.quarantines import Quarantines
from storage.rollouts import Rollouts
from storage.runs import Runs
from storage.stalls import Stalls
from storage.step_statistics import Statistics
from storage.steps import Steps
from storage.summaries import Summaries
from storage.trainer_leases import TrainerLeases
from storage.transcripts import Transcripts
from storage.weights import Weights


class Ledger:
    """The parts of the ledger over one database, and the blobs of large model calls."""

    def __init__(self, database: Database, blobs: BlobStore) -> None:
        self.runs = Runs(database)
        self.prompts = Prompts(database)
        self.groups = Groups(database)
        self.places = Places(database)
        self.budgets = Budgets(database)
        self.copies = Copies(database, self.groups, blobs)
        self.rollouts = Rollouts(database)
        self.calls = ModelCalls(database, blobs)
        self.batches = Batches(database)
        self.steps = Steps(database)
        self.statistics = Statistics(database)
        self.weights = Weights(database)
        self.quarantines = Quarantines(database)
        self.trainer_leases = TrainerLeases(database)
        self.evaluations = Evaluations(database)
        self.summaries = Summaries(database)
        self.checks = Checks(database)
        self.transcripts = Transcripts(database, self.groups, self.calls)
        self.stalls = Stalls(database)
        self.actions = Actions(database)
