"""Policy versions: where their weights are, which endpoints loaded them, what they scored."""

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint
from sqlalchemy.orm import Mapped, mapped_column

from storage.models.base import Base, Written


class PolicyVersion(Base):
    """Exported weights. Version t is the policy after t optimizer steps."""

    __tablename__ = "policy_versions"
    __table_args__ = (CheckConstraint("version >= 0", "not_negative"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    path: Mapped[str]
    digest: Mapped[str]
    published_at: Mapped[Written]


class Refit(Base):
    """An endpoint that answers with this version."""

    __tablename__ = "refits"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "version"], ["policy_versions.run_id", "policy_versions.version"]),
        CheckConstraint("seconds >= 0", "not_negative"),
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    endpoint: Mapped[str] = mapped_column(primary_key=True)
    seconds: Mapped[float]
    refitted_at: Mapped[Written]


class Checkpoint(Base):
    """A trainer checkpoint on the shared file system."""

    __tablename__ = "checkpoints"
    __table_args__ = (CheckConstraint("version >= 0", "not_negative"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    path: Mapped[str]
    saved_at: Mapped[Written]


class Evaluation(Base):
    """Mean reward of one version on the validation rows."""

    __tablename__ = "evaluations"
    __table_args__ = (CheckConstraint("version >= 0 AND rollouts >= 0", "not_negative"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    mean_reward: Mapped[float | None]
    rollouts: Mapped[int]
    recorded_at: Mapped[Written]
