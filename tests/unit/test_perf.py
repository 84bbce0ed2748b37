"""Decoding FLOPs against hand-worked numbers, phase times, trainer memory."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
import torch

from megatron_ac2 import perf
from megatron_ac2.perf import GIB, DecodingCost, PhaseTimer, memory_metrics

QWEN3_4B = SimpleNamespace(
    num_hidden_layers=36, hidden_size=2560, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    intermediate_size=9728, vocab_size=151_936, tie_word_embeddings=True,
)  # fmt: skip
# One layer, h 4, one query and one key-value head of size 4, f 8, V 10:
# A = 2 (16 + 2 * 16 + 16 + 96 + 40) = 400, B = 4 * 4 = 16.
TINY = SimpleNamespace(
    num_hidden_layers=1, hidden_size=4, num_attention_heads=1, num_key_value_heads=1, intermediate_size=8,
    vocab_size=10, tie_word_embeddings=False,
)  # fmt: skip


def test_the_paper_s_constants_for_qwen3_4b():
    assert DecodingCost.of(QWEN3_4B) == DecodingCost(per_token=8_044_544_000, per_attended=589_824)


def test_head_size_and_key_value_heads_default_as_in_hugging_face():
    assert DecodingCost.of(TINY) == DecodingCost(per_token=400, per_attended=16)


def test_experts_count_as_far_as_a_token_uses_them():
    # Of two layers the second has 4 experts of 2 channels, 2 a token: 2 * 3 * 4 * 2 + 4 * 4 = 64 instead of 96.
    # A = 2 (2 * 64 + 96 + 64 + 40) = 656.
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 2, "decoder_sparse_step": 2}
    sparse = SimpleNamespace(**{**vars(TINY), "num_hidden_layers": 2, **experts})
    assert DecodingCost.of(sparse) == DecodingCost(per_token=656, per_attended=32)


def test_the_active_parameters_of_qwen3_30b_a3b():
    qwen3_30b = SimpleNamespace(
        num_hidden_layers=48, hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        intermediate_size=6144, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        vocab_size=151_936, tie_word_embeddings=False,
    )  # fmt: skip
    assert DecodingCost.of(qwen3_30b).per_token // 2 == 3_041_656_832  # 3.35 billion with the embedding


def test_a_hand_worked_request():
    # p 3, n 3: two tokens are fed back; they attend to 4 and to 5 positions.
    assert DecodingCost.of(TINY).flops(3, 3) == 2 * 400 + 16 * (4 + 5)


@pytest.mark.parametrize("num_new", [0, 1])
def test_nothing_is_fed_back_for_the_first_token(num_new):
    assert DecodingCost.of(QWEN3_4B).flops(5_000, num_new) == 0


def test_a_rollout_in_two_requests_costs_less_by_the_token_between():
    cost = DecodingCost.of(TINY)
    whole, first, second = cost.flops(7, 30), cost.flops(7, 10), cost.flops(17, 20)
    # The second request's first token comes out of its prefill: one fed-back token less, with its 7 + 10 positions.
    assert whole - first - second == cost.per_token + 17 * cost.per_attended


def test_total_takes_each_request_s_own_lengths():
    cost = DecodingCost.of(TINY)
    lengths = [(3, 3), (3, 9), (100, 1)]
    assert cost.total(lengths) == cost.flops(3, 3) + cost.flops(3, 9)
    assert cost.total(lengths) != 3 * cost.flops(35, 4)  # means would not do


def test_flops_of_a_long_run_stay_exact_integers():
    flops = DecodingCost.of(QWEN3_4B).flops(512, 50_000)
    assert isinstance(flops, int)
    assert flops == 8_044_544_000 * 49_999 + 589_824 * (49_999 * 512 + 49_999 * 50_000 // 2)


class Clock:
    """Moves by what it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(perf, "time", clock)
    return clock


def test_phases_add_up_and_the_step_covers_them(clock: Clock):
    timer = PhaseTimer()
    for seconds in (2.0, 3.0):
        with timer.phase("sample"):
            clock.now += seconds
    clock.now += 0.5
    with timer.phase("actor"):
        clock.now += 1.0
    assert timer.metrics() == {"time/sample": 5.0, "time/actor": 1.0, "time/step": 6.5}


def test_reset_forgets_the_last_step(clock: Clock):
    timer = PhaseTimer()
    with timer.phase("sample"):
        clock.now += 2.0
    timer.reset()
    clock.now += 0.25
    assert timer.metrics() == {"time/step": 0.25}


def test_a_phase_is_shown_while_it_runs_and_timed_even_if_it_fails():
    shown = []

    @contextmanager
    def show(name):
        shown.append(f"+{name}")
        try:
            yield
        finally:
            shown.append(f"-{name}")

    timer = PhaseTimer(show)
    with pytest.raises(ValueError), timer.phase("actor"):
        raise ValueError
    assert shown == ["+actor", "-actor"]
    assert "actor" in timer.seconds


def test_tokens_per_second():
    timer = PhaseTimer()
    timer.seconds = {"sample": 2.0, "score": 3.0}
    assert timer.tokens_per_second(100, "sample") == 50
    assert timer.tokens_per_second(100, "sample", "score") == 20
    assert timer.tokens_per_second(100, "absent") != timer.tokens_per_second(100, "absent")  # nan


@pytest.mark.skipif(torch.cuda.is_available(), reason="reports the device where there is one")
def test_memory_of_this_process():
    reported = memory_metrics()["perf/process_memory_gib"]
    assert 0.05 < reported < psutil.virtual_memory().total / GIB


@pytest.mark.gpu
def test_memory_of_the_device_includes_what_torch_allocated():
    before = memory_metrics()["perf/device_memory_gib"]
    block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    after = memory_metrics()
    assert after["perf/device_memory_gib"] - before > 0.99
    assert 0 < after["perf/device_memory_share"] <= 1
    del block
