"""The vLLM arguments that the design fixes, or that have a config field of their own, and an engine built with them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron_ac2.config import EngineConfig
from megatron_ac2.engine.environment import preserved_process, quiet, set_environment
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.types import UserError

_CPU_BATCHED_TOKENS = 8192  # tokens an engine step may prefill


def vllm_arguments(engine: EngineConfig, topology: Topology, max_model_len: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "max_num_seqs": engine.max_num_seqs,
        "block_size": engine.block_size,
        "tensor_parallel_size": engine.tensor_parallel,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # not the model folder's default temperature, top-p and the like
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "enable_prefix_caching": True,
        "worker_extension_cls": "megatron_ac2.engine.vllm_worker.WeightReceiver",
    }
    if topology.on_cpu:
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": int(engine.kv_cache_gib * 2**30)}
        # A prompt cut over two engine steps rewinds its request's generator: vLLM raises, as CPU generators cannot.
        arguments |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_model_len, _CPU_BATCHED_TOKENS),
        }
    else:
        arguments |= {"enable_sleep_mode": True, "gpu_memory_utilization": engine.gpu_memory_utilization}
    # The default executor knows no rank: it would put every engine of a node on GPU 0.
    if engine.tensor_parallel > 1 or not topology.on_cpu:
        arguments["distributed_executor_backend"] = "external_launcher"
    if engine.tensor_parallel > 1 and topology.on_cpu:
        arguments["worker_cls"] = "megatron_ac2.engine.vllm_cpu_worker.TorchrunCPUWorker"
    return arguments


def build_vllm(arguments: dict[str, Any], options: dict[str, Any], on_cpu: bool) -> Any:
    set_environment(on_cpu)
    with preserved_process():
        with quiet():
            from vllm import LLM
            from vllm.engine.arg_utils import EngineArgs
        known = {field.name for field in fields(EngineArgs)}
        problems = [f"engine.options.{name}: vLLM has no such argument" for name in options if name not in known]
        problems += [f"engine.options.{name}: set by megatron_ac2" for name in options if name in arguments]
        if problems:
            raise UserError(problems)
        try:
            with quiet():
                return LLM(**arguments, **options)
        except ValueError as error:
            raise UserError(f"engine: vLLM refused its configuration: {error}") from error
