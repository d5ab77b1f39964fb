"""The command line and environment of the embedded vLLM server.

Log-probabilities must be those of the sampled distribution and agree with the trainer: processed log-probabilities,
no sampling defaults from the model's own generation_config.json, no compilation. Nothing is looked up on a network.
"""

import json
from pathlib import Path

from configs.recipe import Recipe

# The backends that workers.vllm_extension registers, by `generation.weight_transport`.
_BACKENDS = {"file": "safetensors_file", "nccl": "nccl_policy"}
_NEUTRAL_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def vllm_command(recipe: Recipe, python: Path) -> tuple[list[str], dict[str, str]]:
    """Arguments, and variables to add to the environment; `python` is vLLM's interpreter, the port must be resolved."""
    generation, server = recipe.generation, recipe.generation.embedded
    if server.port == 0:
        raise ValueError("generation.embedded.port must be a real port before the command is made, not 0.")
    options: dict[str, str] = {
        "model": str(recipe.run.model.resolve()),
        "served-model-name": generation.model_name,
        "host": "127.0.0.1",
        "port": str(server.port),
        "dtype": server.dtype,
        "max-model-len": str(server.max_model_len),
        "max-num-seqs": str(server.max_num_seqs),
        "max-logprobs": "20",
        "logprobs-mode": "processed_logprobs",
        "override-generation-config": json.dumps(_NEUTRAL_SAMPLING),
        "seed": str(recipe.grpo.seed),
        "tool-call-parser": server.tool_call_parser,
        "worker-extension-cls": "workers.vllm_extension.PolicyWorker",
        "weight-transfer-config": json.dumps({"backend": _BACKENDS[generation.weight_transport]}),
    }
    if server.reasoning_parser is not None:
        options["reasoning-parser"] = server.reasoning_parser
    flags = ["--enforce-eager", "--enable-scale-out", "--enable-auto-tool-choice"]
    flags += ["--no-enable-log-requests", "--disable-uvicorn-access-log"]
    # `python -m`: the CPU build has no metadata under the name that the `vllm` command looks up.
    argv = [str(python), "-m", "vllm.entrypoints.openai.api_server", *flags]
    for name, value in options.items():
        argv += [f"--{name}", value]
    return argv, {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # routes for pausing and loading weights
        "VLLM_CPU_KVCACHE_SPACE": str(server.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # automatic binding puts every server on the first core
        "OMP_NUM_THREADS": str(server.threads),
        "TORCH_COMPILE_DISABLE": "1",  # the first request for log-probabilities would wait for a C++ compiler
    }
