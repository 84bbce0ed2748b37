"""The colocated vLLM engine, in our own processes: each `engine.tensor_parallel` consecutive ranks hold one replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_ac2.config import EngineConfig
from megatron_ac2.engine.environment import preserved_random_state
from megatron_ac2.engine.requests import check_requests, divide_requests, merge_shares, pack_samples, to_sample
from megatron_ac2.engine.routed_experts import ExpertRecord
from megatron_ac2.engine.vllm_arguments import build_vllm, engine_problems, vllm_arguments
from megatron_ac2.parallel.collectives import gather_objects
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.types import Sample, SampleRequest, UserError

Progress = Callable[[int, int], None]  # (finished, asked) on this replica


class WeightSyncError(RuntimeError):
    """The engine does not hold the weights that the trainer sent."""


@dataclass(frozen=True, slots=True)
class CallStats:
    """One `sample` call, summed over replicas."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompts, found in the prefix cache
    num_new_tokens: int = 0


class ColocatedEngine:
    """Implements `types.Sampler`. Every method is a collective over the whole job, with equal arguments on every rank.

    The process group must exist before (vLLM would make its own, and the trainer would run in it), and the engine must
    live as long as the process: deleting it destroys the process group.
    """

    version: int
    last_call: CallStats

    def __init__(
        self,
        model_path: str,
        engine: EngineConfig,
        topology: Topology,
        dtype: str,
        max_model_len: int,
        stop_token_ids: Sequence[int],
        seed: int,
        version: int = 0,
        recorded_layers: Sequence[int] = (),
    ):
        """Starts with the weights in `model_path`, called `version`. Raises `UserError` for options vLLM refuses.

        `recorded_layers`: those whose experts a request may ask for (`SampleRequest.record_experts`).
        """
        if not dist.is_initialized():
            raise RuntimeError("init_process_group must come before the engine: vLLM would make a world of its own")
        if problems := engine_problems(engine, topology.world_size, topology.on_cpu):
            raise UserError(problems)
        self.version = version
        self.last_call = CallStats()
        self.max_model_len = max_model_len
        self.can_sleep = not topology.on_cpu
        self._config = engine
        self._stop_token_ids = [int(token) for token in stop_token_ids]
        self._num_replicas = topology.world_size // engine.tensor_parallel
        self._replica, self._replica_rank = divmod(topology.rank, engine.tensor_parallel)
        self._asleep: int | None = None  # the sleep level
        self._unusable: str | None = None
        self._experts = ExpertRecord(recorded_layers, topology)
        arguments = dict(model=model_path, dtype=dtype, max_model_len=max_model_len, seed=seed)
        arguments |= vllm_arguments(engine, topology.on_cpu, max_model_len) | self._experts.arguments() | engine.options
        self._llm = build_vllm(arguments, topology.on_cpu)
        self._experts.start(self._llm)

    def sample(self, requests: Sequence[SampleRequest], progress: Progress | None = None) -> list[Sample]:
        """One sample a request, in order, the same list on every rank.

        Log-probs are over what top-k and then top-p left of the vocabulary, at the request's temperature; temperature 0
        is greedy and knows no filter, its log-probs those of temperature 1. `top_ids` are exactly the k most likely
        tokens, sorted; without a top-k filter the sampled one may be another. Behind what the filter left they are
        arbitrary ids at -inf. vLLM keeps every token tied with the top_k-th, so log-probs of half precision models may
        be over a few more than top_k: ask for `num_top_logprobs` above `top_k` where every one of them counts.
        A request that the engine could not answer raises `UserError` before any is run.
        """
        if self._unusable or self._asleep is not None:
            reason = self._unusable or "it is asleep; call wake or load_weights"
            raise RuntimeError(f"the engine cannot sample: {reason}")
        check_requests(requests, self.max_model_len, self._llm.llm_engine.model_config.get_vocab_size())
        share = divide_requests(requests, self._num_replicas)[self._replica]
        error, mine, stats = None, {}, CallStats()
        try:
            with preserved_random_state():
                mine, stats = self._generate({index: requests[index] for index in share}, progress)
        except Exception as caught:  # the others wait in the gather: let them learn of it there
            error = caught
        if self._replica_rank:
            mine, stats = {}, CallStats()
        gathered = gather_objects((pack_samples(mine), stats, repr(error) if error else None))
        failures = [f"rank {rank}: {message}" for rank, (_, _, message) in enumerate(gathered) if message]
        if failures:
            self._unusable = "an earlier call failed half-way"
            raise RuntimeError("sampling failed on " + "; ".join(failures)) from error
        self.last_call = CallStats(*(sum(getattr(s, f.name) for _, s, _ in gathered) for f in fields(CallStats)))
        return merge_shares([packed for packed, _, _ in gathered], len(requests))

    def load_weights(
        self,
        named_tensors: Iterator[tuple[str, torch.Tensor]],
        version: int,
        verify: bool | None = None,
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """Stream full Hugging Face tensors into the engine, drop what it cached with the old ones, then set `version`.

        Every rank draws the whole stream in the same order, so it may itself run collectives. `verify` (default: the
        config's) reads every tensor back and raises `WeightSyncError`, on every rank, naming those that differ; the
        engine then refuses to sample until a load succeeds. Wakes a sleeping engine: weights first, the KV cache after;
        `loaded` is called in between, when the sent tensors may go.
        """
        verify = self._config.verify_weights if verify is None else verify
        self._unusable = "its last weight load did not succeed"
        if self._asleep is not None:
            self._llm.wake_up(tags=["weights"])
        with preserved_random_state():
            problems = self._llm.collective_rpc("receive_weights", args=(named_tensors, verify))[0]
        loaded()
        if self._asleep is not None:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = None
        if not self._reset_prefix_cache():
            problems.append("the prefix cache could not be dropped: requests are still running")
        found = sorted({problem for share in gather_objects(problems) for problem in share})
        if found:
            raise WeightSyncError(f"weights of version {version} did not reach the engine: " + "; ".join(found[:20]))
        self._unusable = None
        self.version = version

    def sleep(self, level: int = 2) -> None:
        """Free the engine's device memory: 1 keeps the weights in host memory, 2 drops them. Does nothing on CPU."""
        if self.can_sleep and self._asleep is None:
            self._llm.sleep(level=level)
            self._asleep = level

    def wake(self) -> None:
        """Take the memory back. After level 2 the weights are gone: only `load_weights` makes the engine usable."""
        if self._asleep is None:
            return
        self._llm.wake_up()
        if self._asleep == 2:
            self._unusable = "its weights were dropped in its sleep; call load_weights"
        self._asleep = None

    def _reset_prefix_cache(self) -> bool:
        return self._llm.reset_prefix_cache()

    def _generate(
        self, requests: dict[int, SampleRequest], progress: Progress | None
    ) -> tuple[dict[int, Sample], CallStats]:
        """Step vLLM until all are done, turning each output into arrays as it finishes."""
        engine = self._llm.llm_engine
        ids: dict[int, str] = {}  # vLLM's own
        for index, request in requests.items():
            prompt = {"prompt_token_ids": np.asarray(request.prompt_ids).tolist()}
            ids[index] = engine.add_request(str(index), prompt, self._sampling_params(request))
        samples: dict[int, Sample] = {}
        num_prompt = num_cached = num_new = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                index = int(output.request_id)
                asked = requests[index].record_experts
                routed = self._experts.read(self._llm, ids[index], output) if asked else None
                samples[index] = to_sample(output.outputs[0], requests[index], self.version, routed)
                num_prompt += len(requests[index].prompt_ids)
                num_cached += output.num_cached_tokens or 0
                num_new += len(samples[index].token_ids)
                if progress is not None:
                    progress(len(samples), len(requests))
        return samples, CallStats(num_prompt, num_cached, num_new)

    def _sampling_params(self, request: SampleRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            max_tokens=request.max_new_tokens,
            seed=request.seed,
            logprobs=request.num_top_logprobs,
            stop_token_ids=self._stop_token_ids,
            ignore_eos=True,  # or vLLM adds the stop tokens of the model folder's generation_config.json
            detokenize=False,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
