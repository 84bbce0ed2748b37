"""All that Megatron-Core 0.16 needs to run on CPU with gloo, in one place.

Megatron writes `torch.cuda.current_device()`, `device="cuda"` and the like. `install` replaces the `torch` global in
`megatron.core` modules, and only there, by a proxy that answers those for the CPU. Patching torch's own factories would
reach transformers too and leave its rotary frequencies uninitialised.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo

CPU = torch.device("cpu")

_DEFAULTS = {
    "OMP_NUM_THREADS": "1",  # ranks share the cores; more threads a rank fight over them
    "TORCHDYNAMO_DISABLE": "1",  # compiling costs seconds at the first call, and needs a C++ compiler
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron insists on it for sequence parallel
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "empty_like", "zeros_like")
_MODULES = (
    "megatron.core",
    "megatron.core.pipeline_parallel",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.distributed",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.optimizer",
    "megatron.core.models.gpt",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.transformer.dot_product_attention",
    "megatron.core.transformer.moe.token_dispatcher",
)
_installed = False


def set_environment() -> None:
    """Defaults for a CPU run; what the user has set stays. Call it before the first import of vLLM."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def install() -> None:
    """Make Megatron-Core run on CPU in this process. Idempotent. Raises RuntimeError where CUDA exists."""
    global _installed
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim must not be installed where CUDA exists")
    if _installed:
        return
    set_environment()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # Megatron's functions may have been decorated before the environment said so; this one is read at each call.
    torch._dynamo.config.disable = os.environ["TORCHDYNAMO_DISABLE"] == "1"
    for name in _MODULES:
        importlib.import_module(name)
    proxy = _torch_proxy()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and module is not None and module.__dict__.get("torch") is torch:
            module.__dict__["torch"] = proxy
    _patch_rng()
    _patch_experts()
    _patch_tensor_methods()
    _installed = True


class _Proxy(types.ModuleType):
    """A module with some attributes replaced; the rest is looked up each time, for torch loads parts lazily."""

    def __init__(self, real: types.ModuleType, overrides: dict[str, Any]):
        super().__init__(real.__name__)
        self.__dict__["_real"] = real
        self.__dict__.update(overrides)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


class _Stream:
    """Streams and events order work on a GPU; on CPU every call on them does nothing."""

    cuda_stream = 0

    def record_event(self) -> _Stream:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _make_stream(*args: Any, **kwargs: Any) -> _Stream:
    return _Stream()


def _cpu_factory(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs and kwargs["device"] is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _torch_proxy() -> _Proxy:
    cuda = _Proxy(
        torch.cuda,
        {
            "current_device": lambda: CPU,
            "synchronize": _nothing,
            "empty_cache": _nothing,
            "current_stream": _make_stream,
            "default_stream": _make_stream,
            "Stream": _make_stream,
            "Event": _make_stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "is_current_stream_capturing": lambda: False,
            "nvtx": types.SimpleNamespace(range_push=_nothing, range_pop=_nothing),
            "manual_seed": lambda seed: torch.manual_seed(seed) and None,
            "get_rng_state": _get_rng_state,
            "set_rng_state": _set_rng_state,
        },
    )
    cuda.__dict__["random"] = cuda
    collectives = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter}
    factories = {name: _cpu_factory(getattr(torch, name)) for name in _FACTORIES}
    return _Proxy(torch, {"cuda": cuda, "distributed": _Proxy(torch.distributed, collectives), **factories})


def _all_gather(outputs: list[torch.Tensor], piece: torch.Tensor, group: Any) -> None:
    """gloo's wants pieces of one shape; experts cut over tensor ranks gather as many tokens as each was sent."""
    longest = max(len(output) for output in outputs)
    padded = piece.new_zeros(longest, *piece.shape[1:])
    padded[: len(piece)] = piece
    gathered = [torch.empty_like(padded) for _ in outputs]
    torch.distributed.all_gather(gathered, padded, group=group)
    for output, whole in zip(outputs, gathered, strict=True):
        output.copy_(whole[: len(output)])


def _reduce_scatter(output: torch.Tensor, pieces: list[torch.Tensor], group: Any) -> None:
    """gloo's wants pieces of one shape, too."""
    total = torch.cat(pieces)
    torch.distributed.all_reduce(total, group=group)
    output.copy_(total.split([len(piece) for piece in pieces])[group.rank()])


def _patch_rng() -> None:
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state


def _patch_experts() -> None:
    """The router looks for a name that is imported with Transformer Engine alone. The dispatcher copies token counts
    from a GPU to the host as numpy arrays; here it has tensors, which torch.distributed takes for no list of sizes."""
    importlib.import_module("megatron.core.transformer.moe.moe_utils").__dict__.setdefault("te_general_gemm", None)
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = move


def _patch_tensor_methods() -> None:
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Megatron's optimizers sort parameters by the string "torch.cuda.FloatTensor"."""
        answer = original(self, *args, **kwargs)
        if args or kwargs or self.device.type != "cpu":
            return answer
        return answer.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_
