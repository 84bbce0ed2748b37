"""Which experts the engine's routers chose for each token: vLLM's own record on GPU, ours on CPU, behind one interface.

vLLM 0.32 records what its routers choose (`enable_return_routed_experts`), but only with the model runner that needs
Triton: on CPU it refuses. The routers' hook is there all the same, and vllm_expert_recorder.py listens to it.

Either way all tokens that were fed are known, those of a prompt found in the prefix cache too: what was chosen when
their keys and values were computed, which is what the new tokens attend to. The last sampled token was never fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ac2.parallel.topology import Topology

_HOOK = "model_executor/layers/fused_moe/routed_experts_capturer.py"


def recording_problems(tensor_parallel: int, on_cpu: bool) -> list[str]:
    """Why no engine over so many ranks could record, as messages; without importing vLLM, which takes seconds."""
    found = "actor.router_replay: found true, but "
    spec = find_spec("vllm")  # that it is missing is for others to say
    if spec is not None and spec.origin is not None and not (Path(spec.origin).parent / _HOOK).is_file():
        return [found + "this vLLM does not record routed experts; see requirements.txt"]
    if tensor_parallel > 1 and not on_cpu:
        # The other ranks' schedulers, of which each of ours has one, wait for it too and fail.
        return [found + f"with engine.tensor_parallel {tensor_parallel} vLLM hands its record to the first rank alone; "
                "set engine.tensor_parallel 1"]  # fmt: skip
    return []


class ExpertRecord:
    """Reads an engine's record. `layers`: those with experts, none if nothing is to be recorded."""

    def __init__(self, layers: Sequence[int], topology: Topology):
        self._layers = list(layers)
        self._by_us = topology.on_cpu

    def arguments(self) -> dict[str, Any]:
        """Of vLLM, for the engine to keep a record."""
        if not self._layers:
            return {}
        if self._by_us:
            return {"worker_extension_cls": "megatron_ac2.engine.vllm_expert_recorder.RecordingReceiver"}
        return {"enable_return_routed_experts": True}

    def start(self, llm: Any) -> None:
        """Once the engine is built."""
        if self._layers and self._by_us:
            llm.collective_rpc("record_experts")

    def read(self, llm: Any, request_id: str, output: Any) -> np.ndarray:
        """uint8 or uint16[P + N - 1, layers, k] of a request that has just finished, P prompt and N new tokens.

        `request_id` is vLLM's own. Call it before the engine's next step. Raises RuntimeError if it is not all there.
        """
        if not self._layers:
            raise RuntimeError(
                "a request asks for routed experts, of an engine that was built without a record of them"
            )
        completion = output.outputs[0]
        num_fed = len(output.prompt_token_ids) + len(completion.token_ids) - 1
        rows = completion.routed_experts
        if self._by_us:
            rows = llm.collective_rpc("recorded_experts", args=(request_id, num_fed))[0]
        if rows is None or len(rows) != num_fed:
            found = "none" if rows is None else len(rows)
            raise RuntimeError(f"vLLM recorded the experts of {found} of {num_fed} tokens of request {request_id}")
        return np.ascontiguousarray(rows[:, self._layers])
