# SPDX-License-Identifier: Apache-2.0
"""Lists the arguments of rollout engines (``rollout.engine_kwargs``) that are refused, with what to do instead.

Contract: an argument is refused if verl or this package passes it itself, or if it would break a promise of
`recipe.async_engine.engines.protocol`. All other arguments reach the engine unchanged.
tests/integration/test_engine_arguments.py checks that every argument in an engine's list exists in that engine, and
that the engine's default values are not refused, except for arguments that verl passes itself.
"""

from typing import Any, NamedTuple

from recipe.async_engine.config.verl_types import MODEL, ROLLOUT

SGLANG_SETTINGS = {
    "model_path": f"{MODEL}.path",
    "trust_remote_code": f"{MODEL}.trust_remote_code",
    "tp_size": f"{ROLLOUT}.tensor_model_parallel_size",
    "ep_size": f"{ROLLOUT}.expert_parallel_size",
    "mem_fraction_static": f"{ROLLOUT}.gpu_memory_utilization",
    "max_running_requests": f"{ROLLOUT}.max_num_seqs",
    "disable_cuda_graph": f"{ROLLOUT}.enforce_eager",
    **{name: f"{ROLLOUT}.{name}" for name in ("dtype", "load_format", "quantization", "skip_tokenizer_init")},
}
VLLM_SETTINGS = {
    "tensor_parallel_size": f"{ROLLOUT}.tensor_model_parallel_size",
    "enable_expert_parallel": f"{ROLLOUT}.expert_parallel_size",
    "trust_remote_code": f"{MODEL}.trust_remote_code",
    "limit_mm_per_prompt": f"{ROLLOUT}.limit_images",
    **{
        name: f"{ROLLOUT}.{name}"
        for name in (
            "data_parallel_size",
            "dtype",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "enable_sleep_mode",
            "enforce_eager",
            "gpu_memory_utilization",
            "load_format",
            "logprobs_mode",
            "max_model_len",
            "max_num_batched_tokens",
            "max_num_seqs",
            "quantization",
            "scheduling_policy",
            "seed",
        )
    },
}
"""For each argument that verl itself passes to the engine, the setting from which verl takes the value.

A value in ``engine_kwargs`` would silently replace the setting's value, but rules and estimates use the setting.
"""


class Refused(NamedTuple):
    """Arguments of an engine that are refused for the same reason.

    Attributes:
        names: the arguments' names, separated by spaces.
        advice: why they are refused, and what to do.
        allowed: the values that are accepted, in words.
        harmless: the values that are accepted.
    """

    names: str
    advice: str
    allowed: str = "null or false"
    harmless: tuple[Any, ...] = (None, False, "")

    def refuses(self, value: Any) -> bool:
        return value not in self.harmless


ONE: tuple[str, tuple[Any, ...]] = ("1", (None, 1))
PLACED = "This package itself decides which processes a replica has, and how they share the model: remove it."
INSIDE = "This package reads answers inside the server while they are generated, which this would change: remove it."
OUTLASTS = "It would keep KV-cache entries of older weights beyond a weight sync: remove it."
REPLACED = "A weight sync loads all weights in the format of the model's files, which this would change: remove it."
OPEN = (
    "verl starts SGLang's HTTP endpoints without it, so they would be open nevertheless: remove it, and let no one else"
    " reach the port (docs/security.md)."
)

UNTRIED_DRAFTS = "Speculative decoding was never tried with answers that a weight sync interrupts: remove it."


def _of_settings(settings: dict[str, str]) -> list[Refused]:
    advice = "Set {}, from which verl takes it."
    return [Refused(name, advice.format(setting), "null", (None,)) for name, setting in settings.items()]


SGLANG: tuple[Refused, ...] = (
    *_of_settings(SGLANG_SETTINGS),
    Refused("speculative_algorithm speculative_draft_model_path", UNTRIED_DRAFTS, "null"),
    Refused("dp_size pp_size nnodes attn_cp_size moe_dp_size gpu_id_step", PLACED, *ONE),
    Refused("node_rank base_gpu_id", PLACED, "0", (None, 0)),
    Refused("dist_init_addr nccl_port use_ray enable_dp_attention", PLACED),
    Refused("enable_prefill_context_parallel enable_nsa_prefill_context_parallel", PLACED),
    Refused("tokenizer_worker_num detokenizer_worker_num stream_interval", INSIDE, *ONE),
    Refused("incremental_streaming_output grpc_mode encoder_only language_only is_embedding enable_pdmux", INSIDE),
    Refused("disaggregation_mode", INSIDE, "null", (None, "null")),
    Refused("dllm_algorithm", INSIDE),
    Refused("skip_server_warmup", "A warm-up would wait for the first weights: remove it.", "true", (None, True)),
    Refused("checkpoint_engine_wait_weights_before_ready", "This package itself waits for first weights: remove it."),
    Refused("enable_hierarchical_cache hicache_storage_backend enable_lmcache enable_streaming_session", OUTLASTS),
    Refused("cpu_offload_gb torchao_config modelopt_quant quantize_and_serve rl_quant_profile", REPLACED),
    Refused("enable_lora lora_paths enable_eplb ep_num_redundant_experts elastic_ep_backend kt_weight_path", REPLACED),
    Refused("offload_group_size", REPLACED, "-1", (None, -1, 0)),
    Refused("delete_ckpt_after_loading", "The trainer and a replaced replica read the model's files: remove it."),
    Refused(
        "enable_deterministic_inference rl_on_policy_target",
        "SGLang then gives every request the same seed, so all answers to a prompt would be the same: remove it.",
    ),
    Refused("allow_auto_truncate", "Answers would be trained under prompts that the engine has cut: remove it."),
    Refused("max_queued_requests", "SGLang would abort waiting requests again and again: remove it."),
    Refused("api_key admin_api_key ssl_keyfile ssl_certfile", OPEN),
)

VLLM: tuple[Refused, ...] = (
    *_of_settings(VLLM_SETTINGS),
    Refused("speculative_config spec_method spec_model spec_tokens diffusion_config", UNTRIED_DRAFTS, "null"),
    Refused("nnodes prefill_context_parallel_size", PLACED, *ONE),
    Refused("node_rank", PLACED, "0", (None, 0)),
    Refused("data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address", PLACED),
    Refused("data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb enable_elastic_ep", PLACED),
    Refused("data_parallel_backend", PLACED, "mp", (None, "mp")),
    Refused("stream_interval", INSIDE, *ONE),
    Refused("tokens_only enable_prompt_embeds ec_transfer_config", INSIDE),
    Refused("worker_cls", INSIDE, "auto", (None, "auto")),
    Refused("scheduler_cls", "This package's own scheduler continues interrupted answers: remove it.", "null"),
    Refused("enable_lora default_mm_loras enable_eplb weight_transfer_config", REPLACED),
    Refused("cpu_offload_gb offload_group_size", REPLACED, "0", (None, 0)),
)
