"""`run`: which policy is trained on which prompts."""

from pathlib import Path

from pydantic import Field

from configs.base import Section

RUN_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"


class RunConfig(Section):
    """Identity and data of one run. Relative paths are relative to the working folder."""

    id: str | None = Field(
        default=None,
        pattern=RUN_ID_PATTERN,
        description="Name of the run; the root of every workflow id. Without one, a name with the date is made.",
    )
    model: Path = Field(
        description="Folder with a Hugging Face model (config.json, safetensors) and its tokenizer: policy version 0."
    )
    dataset: Path = Field(
        description="JSONL file of NeMo-Gym rows to train on; each row needs `responses_create_params` and `agent_ref`."
    )
    validation_dataset: Path | None = Field(
        default=None, description="JSONL file of rows that are only evaluated, never trained."
    )
