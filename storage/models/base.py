"""The declarative base: every constraint has a predictable name, so that errors can be told apart by it."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, ClassVar

from sqlalchemy import BigInteger, DateTime, MetaData, Text, func
from sqlalchemy.orm import DeclarativeBase, mapped_column

NAMES = {
    "pk": "%(table_name)s_pkey",
    "fk": "%(table_name)s_%(column_0_N_name)s_fkey",
    "uq": "%(table_name)s_%(column_0_N_name)s_key",
    "ix": "%(table_name)s_%(column_0_N_name)s_idx",
    "ck": "%(table_name)s_%(constraint_name)s_check",
}

Count = Annotated[int, mapped_column(BigInteger)]
Written = Annotated[datetime, mapped_column(DateTime(timezone=True), server_default=func.now())]


class Base(DeclarativeBase):
    """Base of all tables of the ledger."""

    metadata = MetaData(naming_convention=NAMES)
    type_annotation_map: ClassVar[Mapping[Any, Any]] = {str: Text, datetime: DateTime(timezone=True)}


def one_of(column: str, *values: str) -> str:
    """The CHECK that a column holds one of these values."""
    return f"{column} IN ({', '.join(repr(value) for value in values)})"
