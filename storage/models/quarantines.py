"""Endpoints that a refit went on without."""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKeyConstraint, Index, func, text
from sqlalchemy.orm import Mapped, mapped_column

from storage.models.base import Base


class Quarantine(Base):
    """An endpoint that did not take `version` of a run. Open while `released_at` is null: nothing samples on it."""

    __tablename__ = "quarantines"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "version"], ["policy_versions.run_id", "policy_versions.version"]),
        CheckConstraint("version >= 0", "not_negative"),
        CheckConstraint("btrim(endpoint) <> '' AND btrim(reason) <> ''", "not_blank"),
        CheckConstraint("released_at >= since", "released_after"),
        Index("quarantines_one_open", "endpoint", unique=True, postgresql_where=text("released_at IS NULL")),
        Index("quarantines_run_id_since_idx", "run_id", "since"),
    )

    endpoint: Mapped[str] = mapped_column(primary_key=True)
    since: Mapped[datetime] = mapped_column(primary_key=True, server_default=func.clock_timestamp())
    run_id: Mapped[str]
    version: Mapped[int]
    reason: Mapped[str]
    released_at: Mapped[datetime | None]
