"""Who may write for the trainer of a run: one row per run that is never removed, so its token only rises."""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from storage.models.base import Base, Count


class RunTrainer(Base):
    """The last trainer that took the run, until when, and whether it has given the run back."""

    __tablename__ = "trainer_leases"
    __table_args__ = (
        CheckConstraint("token > 0", "positive"),
        CheckConstraint("btrim(holder) <> ''", "not_blank"),
    )

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True)
    token: Mapped[Count]
    holder: Mapped[str]
    acquired_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    released_at: Mapped[datetime | None]
