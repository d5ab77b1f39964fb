"""What can go wrong at the storage boundary, one type per cause.

1. `LedgerUnavailable` may pass with time; nothing else here does, so nothing else is worth a plain retry.
2. `Unknown...` names a record that is not there. `...Conflict` refuses a second write that differs from what is stored;
   an equal second write is not an error and gets the stored record back.
3. `AttemptFenced`, `TrainerFenced`, `IllegalTransition` and `StepClosed` refuse what is stored's past: nothing was
   changed. `TrainerLeaseHeld` may pass as its holder ends, and says until when that one may be silent.
4. `EvidenceCorrupt` and `BlobCorrupt` are raised when something stored is not what its digest says; nothing repairs it.
5. `Blob...` name the path; a failed write leaves nothing under the blob's name.
"""

from datetime import datetime

APPLICATION_ROLE = "onbelay_app"


def quoted(name: str) -> str:
    """A name as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'


class StorageError(Exception):
    """Base of all errors of this package."""


class LedgerUnavailable(StorageError):
    """PostgreSQL did not answer, refused the connection, or gave up on a statement."""

    def __init__(self, address: str, cause: str) -> None:
        super().__init__(
            f"The ledger (PostgreSQL at {address}) is not available: {cause}. "
            "Check that the server runs and that storage.dsn names it, its user, password and database."
        )
        self.address, self.cause = address, cause


class DsnInvalid(StorageError):
    """storage.dsn is missing, or is not the URL of a PostgreSQL database. The DSN itself is never shown."""

    def __init__(self, cause: str) -> None:
        super().__init__(
            f"storage.dsn {cause}. Give postgresql://user:password@host:port/database; without one, `onbelay up` "
            "starts a server of its own and writes its DSN into the resolved recipe."
        )


class SchemaOutdated(StorageError):
    """The tables are not those of this release."""

    def __init__(self, address: str, found: str | None, needed: str) -> None:
        super().__init__(
            f"The ledger at {address} has schema revision {found or 'none'}, this release needs {needed}. "
            "`onbelay up` migrates it; a revision from a newer release needs that release."
        )
        self.found, self.needed = found, needed


class RoleMissing(StorageError):
    """The application's database role is not there, or the DSN's user may not act as it."""

    def __init__(self, address: str, user: str, cause: str) -> None:
        super().__init__(
            f"The ledger at {address} cannot be used as role {APPLICATION_ROLE}: {cause}. Migrating (`onbelay up`) "
            f"creates the role if user {user!r} may create roles; else an administrator of the server runs "
            f"CREATE ROLE {APPLICATION_ROLE} NOLOGIN; and GRANT {APPLICATION_ROLE} TO {quoted(user)};"
        )
        self.address, self.user, self.cause = address, user, cause


class UnknownRun(StorageError):
    def __init__(self, run_id: str) -> None:
        super().__init__(f"There is no run {run_id!r} in the ledger. `onbelay run list` names the runs there are.")
        self.run_id = run_id


class UnknownGroup(StorageError):
    def __init__(self, group_id: str) -> None:
        super().__init__(
            f"There is no group {group_id!r} in the ledger. `onbelay group list` names the groups of a run."
        )
        self.group_id = group_id


class UnknownRollout(StorageError):
    def __init__(self, rollout_id: str) -> None:
        super().__init__(f"There is no rollout {rollout_id!r} in the ledger: its group was never opened.")
        self.rollout_id = rollout_id


class UnknownAttempt(StorageError):
    def __init__(self, rollout_id: str, attempt: int) -> None:
        super().__init__(f"Rollout {rollout_id!r} has no attempt {attempt} in the ledger: it never began.")
        self.rollout_id, self.attempt = rollout_id, attempt


class UnknownBatch(StorageError):
    def __init__(self, run_id: str, step: int) -> None:
        super().__init__(f"Run {run_id!r} has no stored batch for step {step}.")
        self.run_id, self.step = run_id, step


class UnknownVersion(StorageError):
    def __init__(self, run_id: str, version: int) -> None:
        super().__init__(f"Run {run_id!r} has not published policy version {version}.")
        self.run_id, self.version = run_id, version


class RunExists(StorageError):
    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"A run named {run_id!r} exists already. Give another run.id, or continue it with "
            f"`onbelay run resume {run_id} --reason TEXT`."
        )
        self.run_id = run_id


class QueueBusy(StorageError):
    """One trainer and one set of vLLM servers serve a task queue, so one live run may use it."""

    def __init__(self, task_queue: str, other_run_id: str) -> None:
        super().__init__(
            f"Task queue {task_queue!r} is in use by run {other_run_id!r}. Wait for it, stop it with "
            f"`onbelay run stop {other_run_id} --reason TEXT`, or give another temporal.task_queue with workers of its "
            "own."
        )
        self.task_queue, self.other_run_id = task_queue, other_run_id


class IllegalTransition(StorageError):
    """A group cannot go from its state to the one asked for."""

    def __init__(self, group_id: str, stored: str, asked: str, why: str | None = None) -> None:
        super().__init__(f"Group {group_id!r} is {stored} and cannot become {asked}" + (f": {why}." if why else "."))
        self.group_id, self.stored, self.asked = group_id, stored, asked


class StepClosed(StorageError):
    """The batch of a step is stored, so no group joins it, leaves it or changes in it any more."""

    def __init__(self, run_id: str, step: int, group_id: str, stored: str | None, asked: str) -> None:
        if stored is None:
            refused = "which is not in the ledger and is not opened. Claim its prompt for a later step"
        elif asked == "promoted":
            refused = f"which is {stored}, stays in its own step and is not promoted. Promote it into an open step"
        else:
            refused = (
                f"which is {stored} and cannot become {asked} any more. `onbelay group replay {group_id}` runs a "
                "diagnostic copy of a group that has ended"
            )
        super().__init__(
            f"Step {step} of run {run_id!r} is closed: its batch is stored without group {group_id!r}, {refused}. The "
            "refusal is counted, nothing else was changed."
        )
        self.run_id, self.step, self.group_id, self.stored, self.asked = run_id, step, group_id, stored, asked


class AttemptFenced(StorageError):
    """A later attempt has begun, or this one has been written off: its answer comes too late."""

    def __init__(self, rollout_id: str, attempt: int, current_attempt: int | None, attempt_state: str) -> None:
        super().__init__(
            f"Attempt {attempt} of rollout {rollout_id!r} is fenced: it is {attempt_state}, the current attempt is "
            f"{current_attempt}. Its answer is refused and nothing was changed."
        )
        self.rollout_id, self.attempt, self.current_attempt = rollout_id, attempt, current_attempt


class TrainerLeaseHeld(StorageError):
    """Another trainer works on the run. `remaining_s`: when its lease ends if it is not renewed."""

    def __init__(self, run_id: str, holder: str, token: int, until: datetime, remaining_s: float) -> None:
        super().__init__(
            f"Run {run_id!r} is held by the trainer {holder} (token {token}) until {until:%Y-%m-%d %H:%M:%S %Z}, or "
            "longer if it renews its lease. One trainer works on a run at a time: wait for it, or end that process."
        )
        self.run_id, self.holder, self.token, self.until, self.remaining_s = run_id, holder, token, until, remaining_s


class TrainerFenced(StorageError):
    """Another trainer has taken the run since, or this one has given it back: its write comes too late."""

    def __init__(self, run_id: str, token: int, current_token: int | None, holder: str | None) -> None:
        now = "nobody holds the run" if holder is None else f"{holder} holds the run now (token {current_token})"
        super().__init__(
            f"Token {token} of the trainer of run {run_id!r} is fenced: {now}. The write is refused and nothing was "
            "changed."
        )
        self.run_id, self.token, self.current_token, self.holder = run_id, token, current_token, holder


class RecoveryRefused(StorageError):
    """The rollout may not be tried a second time."""

    def __init__(self, rollout_id: str, attempt: int) -> None:
        super().__init__(
            f"Rollout {rollout_id!r} was begun by attempt {attempt}, and rollouts.recovery is `none` for it: its tools "
            "must not run twice. No further attempt was begun; lose or mask the rollout."
        )
        self.rollout_id, self.attempt = rollout_id, attempt


class LeaseLost(StorageError):
    """A call that was released is not recorded: its occurrence may belong to another call by now."""

    def __init__(self, rollout_id: str, attempt: int, ordinal: int) -> None:
        super().__init__(
            f"Call {ordinal} of attempt {attempt} of rollout {rollout_id!r} was released, or never claimed. Its "
            "response is not recorded and must not be used; claim the request again."
        )
        self.rollout_id, self.attempt, self.ordinal = rollout_id, attempt, ordinal


class LineageBroken(StorageError):
    """A response does not continue the call that it names as its parent."""

    def __init__(self, rollout_id: str, attempt: int, ordinal: int, cause: str) -> None:
        super().__init__(
            f"Call {ordinal} of attempt {attempt} of rollout {rollout_id!r} cannot be recorded: {cause}. Record it as "
            "a new segment, or not at all."
        )
        self.rollout_id, self.attempt, self.ordinal, self.cause = rollout_id, attempt, ordinal, cause


class EvidenceCorrupt(StorageError):
    """Stored evidence is not what its digest says."""

    def __init__(self, rollout_id: str, attempt: int, ordinal: int, cause: str) -> None:
        super().__init__(
            f"The evidence of call {ordinal} of attempt {attempt} of rollout {rollout_id!r} is corrupt: {cause}. "
            "Nothing of this rollout can be trusted; `onbelay ledger check` names every violated row of the run."
        )
        self.rollout_id, self.attempt, self.ordinal, self.cause = rollout_id, attempt, ordinal, cause


class SelectionInvalid(StorageError):
    """A settlement selects what is no response of its attempt."""

    def __init__(self, rollout_id: str, attempt: int, cause: str) -> None:
        super().__init__(f"Attempt {attempt} of rollout {rollout_id!r} cannot be settled: {cause}.")
        self.rollout_id, self.attempt, self.cause = rollout_id, attempt, cause


class ConflictingWrite(StorageError):
    """Base of the conflicts: the stored record stands, the second write is refused."""


class CallConflict(ConflictingWrite):
    def __init__(self, rollout_id: str, attempt: int, ordinal: int) -> None:
        super().__init__(
            f"Call {ordinal} of attempt {attempt} of rollout {rollout_id!r} is stored with another outcome; the second "
            "one is refused and must not be used."
        )
        self.rollout_id, self.attempt, self.ordinal = rollout_id, attempt, ordinal


class SealConflict(ConflictingWrite):
    def __init__(self, rollout_id: str, attempt: int, stored_receipt: str, receipt: str) -> None:
        super().__init__(
            f"Attempt {attempt} of rollout {rollout_id!r} is sealed with receipt {stored_receipt}; a different outcome "
            f"of the same attempt ({receipt}) is refused."
        )
        self.rollout_id, self.attempt = rollout_id, attempt
        self.stored_receipt, self.receipt = stored_receipt, receipt


class CaptureConflict(ConflictingWrite):
    def __init__(self, capture_id: str, model_call_id: str) -> None:
        super().__init__(
            f"Call {model_call_id!r} of capture {capture_id!r} is captured with another content; the second is refused."
        )
        self.capture_id, self.model_call_id = capture_id, model_call_id


class CaptureFrozen(ConflictingWrite):
    def __init__(self, capture_id: str, model_call_id: str) -> None:
        super().__init__(
            f"Capture {capture_id!r} is frozen: call {model_call_id!r} came too late and is not part of it."
        )
        self.capture_id, self.model_call_id = capture_id, model_call_id


class GroupConflict(ConflictingWrite):
    def __init__(self, group_id: str, stored: str, asked: str) -> None:
        super().__init__(f"Group {group_id!r} is stored with {stored} and cannot be opened again with {asked}.")
        self.group_id = group_id


class BatchConflict(ConflictingWrite):
    def __init__(self, run_id: str, step: int, stored_digest: str, digest: str) -> None:
        super().__init__(
            f"Step {step} of run {run_id!r} has the batch {stored_digest}; the different batch {digest} is refused, "
            "because a step trains on one batch only."
        )
        self.run_id, self.step, self.stored_digest, self.digest = run_id, step, stored_digest, digest


class BatchGroupRefused(ConflictingWrite):
    def __init__(self, run_id: str, step: int, detail: str) -> None:
        super().__init__(
            f"The batch of step {step} of run {run_id!r} is refused, because each of its groups must exist, "
            f"train in this step and be in no other batch: {detail}"
        )
        self.run_id, self.step = run_id, step


class VersionConflict(ConflictingWrite):
    def __init__(self, run_id: str, version: int, noun: str, stored: str, asked: str) -> None:
        super().__init__(
            f"The {noun} of policy version {version} of run {run_id!r} is stored as {stored}; {asked} is refused."
        )
        self.run_id, self.version, self.stored, self.asked = run_id, version, stored, asked


class BlobError(StorageError):
    """Base of the blob store's errors."""


class BlobUrlInvalid(BlobError):
    def __init__(self, url: str, cause: str) -> None:
        super().__init__(
            f"storage.blobs_url {url!r} cannot be used: {cause}. Give a folder, or the URL of a file system that "
            "fsspec knows (s3://bucket/prefix needs the package s3fs)."
        )
        self.url = url


class BlobMissing(BlobError):
    def __init__(self, path: str) -> None:
        super().__init__(
            f"There is no blob at {path}. Check that storage.blobs_url is the store the run was started with."
        )
        self.path = path


class BlobCorrupt(BlobError):
    def __init__(self, path: str, found_digest: str) -> None:
        super().__init__(
            f"The blob at {path} is corrupt: its content has sha256 {found_digest}. Restore it from a copy, "
            "or delete it."
        )
        self.path, self.found_digest = path, found_digest


class BlobUnreadable(BlobError):
    def __init__(self, path: str, cause: str) -> None:
        super().__init__(f"The blob at {path} could not be read: {cause}. Check storage.blobs_url and its permissions.")
        self.path, self.cause = path, cause


class BlobWriteError(BlobError):
    def __init__(self, path: str, cause: str) -> None:
        super().__init__(
            f"The blob could not be written to {path}: {cause}. Nothing was left there; free space or fix "
            "storage.blobs_url, then the write can be repeated."
        )
        self.path, self.cause = path, cause
