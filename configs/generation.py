"""`generation`: the vLLM servers that sample, and how new weights get there."""

from typing import Literal

from pydantic import Field, HttpUrl

from configs.base import Section


class EmbeddedVllmConfig(Section):
    """The vLLM server that the embedded stack starts when no endpoint is given."""

    port: int = Field(default=8000, ge=0, le=65535, description="Loopback port; 0 picks a free one.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Precision of weights and activations."
    )
    max_model_len: int = Field(default=1024, ge=16, description="Longest prompt plus reply, in tokens.")
    max_num_seqs: int = Field(default=64, ge=1, description="Sequences decoded together.")
    kv_cache_gib: int = Field(default=1, ge=1, description="Memory for the KV cache, in GiB (CPU build).")
    tool_call_parser: str = Field(default="hermes", description="vLLM's parser of tool calls.")
    reasoning_parser: str | None = Field(default=None, description="vLLM's parser of reasoning, if the policy reasons.")
    threads: int = Field(default=1, ge=1, description="OpenMP threads of the CPU build.")


class GenerationConfig(Section):
    """Endpoints are refitted together: paused, loaded, stamped `policy-<version>`, resumed."""

    endpoints: tuple[HttpUrl, ...] = Field(
        default=(), description="Base URLs of running vLLM servers; empty: the embedded stack starts one."
    )
    model_name: str = Field(default="policy", min_length=1, description="The name under which vLLM serves the policy.")
    pause_mode: Literal["wait", "keep", "abort"] = Field(
        default="wait",
        description="Calls in flight at a refit: finish first, freeze and go on with new weights, or end early.",
    )
    refit_timeout_s: float = Field(default=600.0, gt=0, description="Deadline of one refit request to one endpoint.")
    heartbeat_timeout_s: float = Field(
        default=60.0, gt=0, description="A generation worker that is silent for so long is taken for dead."
    )
    max_refit_attempts: int = Field(
        default=20, ge=1, description="Tries of a whole refit; generation stays paused in between."
    )
    on_failed_endpoint: Literal["wait", "quarantine"] = Field(
        default="wait",
        description="An endpoint that does not take new weights: wait for it with all of them paused, or, when it "
        "fails a second time, go on without it until it takes weights again (with rollouts.evidence ledger).",
    )
    weight_transport: Literal["file", "nccl"] = Field(
        default="file",
        description="How weights reach vLLM: through a shared folder, or from a GPU of the generation worker over "
        "NCCL. nccl has not yet run on a GPU; external servers need the weight transfer backend nccl_policy.",
    )
    embedded: EmbeddedVllmConfig = Field(
        default_factory=EmbeddedVllmConfig, description="The server of the embedded stack."
    )
