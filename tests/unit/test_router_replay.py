"""Router replay: where choices are laid, Megatron's routing with a given choice by hand, what is refused."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from megatron_ac2.data.packing import pack
from megatron_ac2.data.routing import FREE, routing_column
from megatron_ac2.engine import routed_experts
from megatron_ac2.model.router_replay import LayerChoice, RoutedSeqParams, replay_problems, routers_part
from tests.unit.test_build import qwen3, qwen3_moe

# Three tokens, four experts. The first is given its worst and its second best, the second routes freely, the third is
# given its two best in the other order.
LOGITS = [[2.0, 0.5, -1.0, 1.0], [0.1, 0.2, 0.3, -0.4], [1.0, 3.0, -2.0, 2.0]]
CHOICES = [[2, 3], [FREE, FREE], [3, 1]]
TAKEN = [[3, 2], [2, 1], [1, 3]]  # by falling score


def asked(choices: list[list[int]] | None, index: int = 0) -> tuple[LayerChoice, list]:
    """As a layer's hook leaves it, with what is counted."""
    counted: list = []
    choice = LayerChoice(index, lambda *found: counted.append(found))
    layers = None if choices is None else torch.tensor(choices, dtype=torch.int16)[:, None].expand(-1, index + 1, -1)
    choice.take(torch.nn.Identity(), (), {"packed_seq_params": RoutedSeqParams(routed_experts=layers)})
    return choice, counted


def route(logits: torch.Tensor, over_all: bool, choice: LayerChoice | None) -> tuple[torch.Tensor, torch.Tensor]:
    return topk_routing_with_score_function(logits, 2, use_pre_softmax=over_all, router_replay=choice)


@pytest.mark.parametrize("over_all", [False, True])
def test_weights_and_gradient_of_given_experts_by_hand(over_all: bool) -> None:
    """p_i = exp(l_i) / sum over the chosen, or over all, of exp(l_j); d<c, p>/dl_i = p_i (c_i - <c, p>) within the
    same set. Experts that were not chosen get neither weight nor, under the first kind, gradient."""
    rows, chosen = np.arange(3)[:, None], np.array(TAKEN)
    cotangents = np.random.default_rng(0).normal(size=(3, 4))
    exponents = np.exp(np.array(LOGITS))
    mask = np.zeros((3, 4))
    mask[rows, chosen] = 1
    reach = np.ones((3, 4)) if over_all else mask
    probs = exponents * reach / (exponents * reach).sum(1, keepdims=True)
    weighed = (cotangents * mask * probs).sum(1, keepdims=True)
    gradient = probs * (cotangents * mask - weighed)

    logits = torch.tensor(LOGITS, requires_grad=True)
    choice, counted = asked(CHOICES)
    found, routing_map = route(logits, over_all, choice)
    np.testing.assert_allclose(found.detach().numpy(), probs * mask, atol=1e-7)
    np.testing.assert_array_equal(routing_map.numpy(), mask)
    (found * torch.from_numpy(cotangents)).sum().backward()
    np.testing.assert_allclose(logits.grad.numpy(), gradient, atol=1e-7)
    ((given, taken, own),) = counted
    assert given.tolist() == [True, False, True] and taken.tolist() == TAKEN and own.tolist()[0] == [0, 3]


@pytest.mark.parametrize("over_all", [False, True])
def test_the_routers_own_choice_changes_no_bit_in_any_order(over_all: bool) -> None:
    logits = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    free = route(logits, over_all, None)
    own = logits.topk(2).indices.flip(1).tolist()
    for choice in (asked(own)[0], asked(own, index=3)[0], asked(None)[0]):
        assert all(torch.equal(*pair) for pair in zip(route(logits, over_all, choice), free, strict=True))


def test_a_layer_called_without_packed_sequences_routes_freely() -> None:
    choice, counted = asked(CHOICES)
    choice.take(torch.nn.Identity(), (), {})
    logits = torch.tensor(LOGITS)
    assert torch.equal(route(logits, True, choice)[1], route(logits, True, None)[1]) and not counted


def test_choices_of_another_batch_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"choices \[3, 2\] for a router that makes \[2, 2\]"):
        route(torch.tensor(LOGITS[:2]), True, asked(CHOICES)[0])


def test_tensor_ranks_see_their_part_under_sequence_parallel() -> None:
    choices = torch.arange(6)
    second = SimpleNamespace(tensor=2, tensor_rank=1)
    assert routers_part(choices, second, sequence_parallel=True).tolist() == [3, 4, 5]
    assert routers_part(choices, second, sequence_parallel=False) is choices


def test_each_choice_lies_at_its_own_token() -> None:
    """Sequences of 3, 2 and 4 tokens, each padded to a multiple of 2, the whole to a multiple of 12."""
    sequences = [np.arange(length) for length in (3, 2, 4)]
    batch = pack(sequences, {}, [1, 1, 1], align=12, pad_id=0, length_multiple=2)
    first = np.array([[[1, 2], [3, 4]], [[5, 6], [7, 255]]], dtype=np.uint8)
    last = np.array([[[300, 0], [9, 511]]], dtype=np.uint16)
    column = routing_column([first, None, last], batch.cu_seqlens, 12, num_layers=2, top_k=2)
    assert column.dtype == torch.int16 and column.shape == (1, 12, 2, 2)
    expected = np.full((12, 2, 2), FREE)
    expected[:2], expected[6:7] = first, last
    np.testing.assert_array_equal(column[0].numpy(), expected)
    empty = pack([], {}, [], align=4, pad_id=0)
    assert (routing_column([], empty.cu_seqlens, 4, 3, 2) == FREE).all()


@pytest.mark.parametrize("shape", [(4, 2, 2), (3, 1, 2), (3, 2, 3)])
def test_choices_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="for sequence 0 of 3 tokens, 2 layers with 2 experts"):
        routing_column([np.zeros(shape, np.uint8)], torch.tensor([0, 3]), 3, num_layers=2, top_k=2)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, []),
        ({"recompute_granularity": "full", "recompute_modules": ["moe"]}, []),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, []),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, ["recompute_modules names moe"]),
        ({"moe_router_fusion": True, "moe_enable_routing_replay": True}, ["inside of one kernel", "Megatron's own"]),
    ],
)
def test_what_a_router_could_not_follow_is_refused(extra: dict, words: list[str]) -> None:
    problems = replay_problems(qwen3_moe(), extra)
    assert len(problems) == len(words)
    for problem, expected in zip(problems, words, strict=True):
        assert problem.startswith("actor.router_replay: found true, but ") and expected in problem


def test_a_dense_model_has_no_routers() -> None:
    (problem,) = replay_problems(qwen3(), {"moe_router_fusion": True})
    assert problem == "actor.router_replay: found true, but the model has no experts; accepted: false"


def test_what_the_engine_cannot_record_is_refused() -> None:
    problems = routed_experts.recording_problems
    assert problems(2, on_cpu=True) == problems(1, on_cpu=False) == []
    (problem,) = problems(2, on_cpu=False)
    assert "with engine.tensor_parallel 2 vLLM hands its record to the first rank alone" in problem


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_a_vllm_that_does_not_record_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = routed_experts.recording_problems
    monkeypatch.setattr(routed_experts, "_HOOK", "not/there.py")
    assert "this vLLM does not record routed experts" in problems(1, on_cpu=True)[0]
