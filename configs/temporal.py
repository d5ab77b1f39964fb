"""`temporal`: the Temporal service that orchestrates."""

from pathlib import Path

from pydantic import Field, SecretStr

from configs.base import Section


class TlsConfig(Section):
    """TLS towards the service. Without files, the system's certificate authorities are used."""

    server_root_ca: Path | None = Field(default=None, description="PEM file of the authority that signed the server.")
    client_cert: Path | None = Field(default=None, description="PEM file of the client certificate (mTLS).")
    client_key: Path | None = Field(default=None, description="PEM file of the client's private key (mTLS).")
    domain: str | None = Field(default=None, description="Server name to verify, where it differs from the address.")


class TemporalConfig(Section):
    """An existing service, or the development server of the embedded stack."""

    address: str | None = Field(
        default=None, description="host:port of a Temporal service; without one, the embedded stack starts one."
    )
    namespace: str = Field(default="default", min_length=1, description="Temporal namespace.")
    api_key: SecretStr | None = Field(default=None, description="API key (Temporal Cloud).")
    tls: TlsConfig | None = Field(default=None, description="TLS settings; an empty block turns TLS on.")
    task_queue: str = Field(
        default="onbelay", min_length=1, description="Prefix of the task queues. One run at a time uses a prefix."
    )
    ui_url: str | None = Field(default=None, description="Base URL of the Temporal UI, for links.")
    embedded_port: int = Field(
        default=7233, ge=0, le=65535, description="Loopback port of the embedded service; 0: a free one."
    )
    embedded_ui_port: int = Field(
        default=8233, ge=0, le=65535, description="Loopback port of the embedded UI; 0: a free one."
    )
    retention_days: int = Field(default=90, ge=1, description="How long the embedded service keeps closed workflows.")
