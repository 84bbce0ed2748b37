"""What vLLM is built with, what is wrong with it that can be seen before, and an engine built with it."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from typing import Any

from megatron_ac2.config import EngineConfig
from megatron_ac2.engine.environment import preserved_process, quiet, set_environment
from megatron_ac2.types import UserError

_CPU_BATCHED_TOKENS = 8192  # tokens an engine step may prefill
_OF_THE_RUN = ("model", "dtype", "max_model_len", "seed", "enable_return_routed_experts")


def vllm_arguments(engine: EngineConfig, on_cpu: bool, max_model_len: int) -> dict[str, Any]:
    """The vLLM arguments that the design fixes, or that have a config field of their own."""
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
    if on_cpu:
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": int(engine.kv_cache_gib * 2**30)}
        # A prompt cut over two engine steps rewinds its request's generator: vLLM raises, as CPU generators cannot.
        arguments |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_model_len, _CPU_BATCHED_TOKENS),
        }
    else:
        arguments |= {"enable_sleep_mode": True, "gpu_memory_utilization": engine.gpu_memory_utilization}
    # The default executor knows no rank: it would put every engine of a node on GPU 0.
    if engine.tensor_parallel > 1 or not on_cpu:
        arguments["distributed_executor_backend"] = "external_launcher"
    if engine.tensor_parallel > 1 and on_cpu:
        arguments["worker_cls"] = "megatron_ac2.engine.vllm_cpu_worker.TorchrunCPUWorker"
    return arguments


def engine_problems(engine: EngineConfig, world_size: int, on_cpu: bool) -> list[str]:
    """As messages. `world_size` 0: not known yet. Imports vLLM (seconds) if there are `engine.options` to look at."""
    problems = []
    if world_size % engine.tensor_parallel:
        problems.append(
            f"engine.tensor_parallel: found {engine.tensor_parallel}, must divide the number of processes "
            f"({world_size})"
        )
    if not engine.options or importlib.util.find_spec("vllm") is None:
        return problems
    set_environment(on_cpu)
    with preserved_process(), quiet():
        from vllm.engine.arg_utils import EngineArgs
    known = {field.name for field in fields(EngineArgs)}
    fixed = {*vllm_arguments(engine, on_cpu, 0), *_OF_THE_RUN}
    problems += [f"engine.options.{name}: vLLM has no such argument" for name in engine.options if name not in known]
    return problems + [f"engine.options.{name}: set by megatron_ac2" for name in engine.options if name in fixed]


def build_vllm(arguments: dict[str, Any], on_cpu: bool) -> Any:
    """Raises `UserError` for a configuration that vLLM refuses."""
    set_environment(on_cpu)
    with preserved_process():
        try:
            with quiet():
                from vllm import LLM

                return LLM(**arguments)
        except ValueError as error:
            raise UserError(f"engine: vLLM refused its configuration: {error}") from error
