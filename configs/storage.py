"""`storage`: the PostgreSQL ledger and the blob store."""

from pydantic import Field, SecretStr

from configs.base import Section


class StorageConfig(Section):
    """Where the record of a run is kept."""

    dsn: SecretStr | None = Field(
        default=None,
        description="postgresql://user:password@host:port/database; without one, the embedded stack starts PostgreSQL.",
    )
    embedded_port: int = Field(
        default=55432, ge=0, le=65535, description="Loopback port of the embedded server; 0: a free one."
    )
    blobs_url: str = Field(
        default=".onbelay/blobs",
        min_length=1,
        description="fsspec URL of the blob store: a folder, or s3://bucket/prefix.",
    )
    pool_size: int = Field(default=10, ge=1, description="Connections of one worker process.")
    statement_timeout_s: float = Field(default=30.0, gt=0, description="Longest SQL statement.")
    record_timeout_s: float = Field(
        default=10.0, gt=0, description="Deadline of writing one model call; the response is not released after it."
    )
    inline_payload_bytes: int = Field(
        default=65_536, ge=0, description="Larger tokens and bodies of a model call are kept in the blob store."
    )
