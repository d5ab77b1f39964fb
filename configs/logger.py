"""`logger`: where the metrics of a step go, beside the ledger and TensorBoard."""

from typing import Literal

from pydantic import Field

from configs.base import Section


class WandbConfig(Section):
    """One Weights & Biases run for each run of Onbelay, with its id. The API key comes from WANDB_API_KEY, in the
    environment of the rollout workers."""

    project: str = Field(min_length=1, description="Project of the run.")
    entity: str | None = Field(default=None, description="Team or user; null: the API key's own.")
    mode: Literal["online", "offline"] = Field(
        default="online", description="Send metrics, or keep them in files for `wandb sync`."
    )
    timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Longest that a step waits for W&B, within failure.ledger_timeout_s. What W&B missed is sent with "
        "a later step.",
    )


class LoggerConfig(Section):
    """Sinks that are off unless they are configured."""

    wandb: WandbConfig | None = Field(default=None, description="Weights & Biases.")
