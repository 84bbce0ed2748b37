"""Run by test_engine.py in a process of its own: one engine, every case on it, one verdict a case as JSON.

vLLM takes seconds to start and takes torch.distributed down with it when it goes.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import psutil
import torch

from megatron_ac2.algorithm.soft_value import reply_tree, soft_value
from megatron_ac2.algorithm.value_prompt import GRID
from megatron_ac2.config import EngineConfig
from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.engine.engine import ColocatedEngine, WeightSyncError
from megatron_ac2.engine.reshard import publish
from megatron_ac2.engine.rounding import quantise_dequantise
from megatron_ac2.model.build import build_model, load_hf_config
from megatron_ac2.model.hf_weights import load_hf_weights
from megatron_ac2.parallel.topology import init_topology
from megatron_ac2.types import SampleRequest, UserError
from tests.end_to_end.tiny_qwen3 import (
    STOP_ID,
    VOCAB_SIZE,
    logprob_gap,
    make_model,
    make_prompt,
    named_tensors,
    next_token_logprobs,
    save_model,
)

MAX_MODEL_LEN = 512
TEMPERATURE = 0.8
models = functools.cache(make_model)


def start_engine(folder: Path, topology) -> ColocatedEngine:
    config = EngineConfig(max_num_seqs=32, kv_cache_gib=0.05)
    path = save_model(models(0), folder / "m0")
    return ColocatedEngine(path, config, topology, "float32", MAX_MODEL_LEN, [STOP_ID], seed=0)


def request(prompt, new: int = 24, seed: int = 0, temperature: float = TEMPERATURE, top: int = 0, **filters):
    return SampleRequest(prompt, new, temperature, seed, top, **filters)


def requests_for(seeds, length: int = 20, **kwargs) -> list[SampleRequest]:
    return [request(make_prompt(seed, length), seed=seed, **kwargs) for seed in seeds]


def gap(engine, model_seed: int, requests, temperature: float = TEMPERATURE) -> float:
    samples = engine.sample(requests)
    model = models(model_seed)
    return max(logprob_gap(model, r.prompt_ids, s, temperature) for r, s in zip(requests, samples, strict=True))


def case_logprobs_equal_transformers(engine, folder, topology):
    assert gap(engine, 0, requests_for(range(6))) < 1e-4
    assert gap(engine, 1, requests_for(range(6))) > 0.1, "another model must be told apart"


def case_greedy_is_argmax_with_logprobs_at_temperature_one(engine, folder, topology):
    greedy = requests_for(range(3), temperature=0.0)
    for batch in (greedy, greedy + requests_for(range(3, 6))):  # alone, and mixed with sampled ones
        for asked, sample in zip(batch[:3], engine.sample(batch)[:3], strict=True):
            rows = next_token_logprobs(models(0), asked.prompt_ids, sample, 1.0)
            np.testing.assert_array_equal(rows.argmax(-1), sample.token_ids)
            np.testing.assert_allclose(rows.max(-1), sample.logprobs, atol=1e-4)


def case_top_logprobs_are_exactly_the_k_most_likely(engine, folder, topology):
    asked = [request(make_prompt(index, 20), seed=index, top=top) for index, top in enumerate((0, 3, 30))]
    outside = 0
    for wanted, sample in zip(asked, engine.sample(asked), strict=True):
        k = wanted.num_top_logprobs
        if k == 0:
            assert sample.top_ids is None and sample.top_logprobs is None
            continue
        rows = next_token_logprobs(models(0), wanted.prompt_ids, sample, TEMPERATURE)
        order = np.argsort(-rows, axis=-1)[:, :k]
        np.testing.assert_array_equal(sample.top_ids, order)
        np.testing.assert_allclose(sample.top_logprobs, np.take_along_axis(rows, order, -1), atol=1e-4)
        outside += int((sample.top_ids != sample.token_ids[:, None]).all(-1).sum())
    assert outside > 0, "no sampled token fell outside the top k: the case shows nothing"


def check_filtered(model, asked, sample) -> np.ndarray:
    """The recorded support holds all the mass and the sampled token; log-probs are the model's, renormalised over it.

    Returns the support: bool[N, V].
    """
    rows = next_token_logprobs(model, asked.prompt_ids, sample, asked.temperature)
    left = np.isfinite(sample.top_logprobs)
    assert np.isfinite(sample.logprobs).all() and (np.diff(sample.top_logprobs.clip(-1e9), axis=1) <= 0).all()
    np.testing.assert_allclose(np.exp(sample.top_logprobs).sum(1), 1.0, atol=1e-5)
    support = np.zeros(rows.shape, dtype=bool)
    np.put_along_axis(support, sample.top_ids, left, axis=1)
    assert (support.sum(1) == left.sum(1)).all(), "an id was recorded twice"
    np.testing.assert_array_equal(support[np.arange(len(rows)), sample.token_ids], True)
    renormalised = rows - np.log((np.exp(rows) * support).sum(1, keepdims=True))
    found = np.take_along_axis(renormalised, sample.top_ids, axis=1)
    np.testing.assert_allclose(sample.top_logprobs[left], found[left], atol=1e-4)
    np.testing.assert_allclose(sample.logprobs, renormalised[np.arange(len(rows)), sample.token_ids], atol=1e-4)
    return support


def case_top_k_and_top_p_filter_and_renormalise(engine, folder, topology):
    """Each request by its own filter, in one batch with an unfiltered and a greedy one."""
    filters = [{"top_k": 5, "top": 5}, {"top_k": 8, "top_p": 0.7, "top": 8}, {"top_p": 0.6, "top": VOCAB_SIZE}]
    asked = [request(make_prompt(index, 20), seed=index, **filters[index % 3]) for index in range(6)]
    others = [request(make_prompt(9, 20), seed=9), request(make_prompt(8, 20), temperature=0.0, top_k=5, top=8)]
    samples = engine.sample(asked + others)
    sizes = set()
    for wanted, sample in zip(asked, samples, strict=False):
        support = check_filtered(models(0), wanted, sample)
        rows = next_token_logprobs(models(0), wanted.prompt_ids, sample, TEMPERATURE)
        assert (np.where(support, rows, np.inf).min(1) >= np.where(support, -np.inf, rows).max(1)).all()
        kept, k = support.sum(1), wanted.top_k or VOCAB_SIZE
        sizes |= set(kept.tolist())
        if wanted.top_p == 1:
            assert (kept == k).all()
        # top-p keeps the fewest tokens that reach it of what top-k left, no more
        among = np.sort(np.exp(rows), axis=1)[:, ::-1][:, :k]
        wanted_sizes = (np.cumsum(among / among.sum(1, keepdims=True), axis=1) < wanted.top_p - 1e-6).sum(1) + 1
        assert (wanted.top_p == 1) or (kept == wanted_sizes).all(), (kept, wanted_sizes)
    assert len(sizes) > 3, sizes
    assert logprob_gap(models(0), others[0].prompt_ids, samples[6], TEMPERATURE) < 1e-4
    assert logprob_gap(models(0), others[1].prompt_ids, samples[7], 1.0) < 1e-4, "greedy knows no filter"
    assert np.isfinite(samples[7].top_logprobs).all()


def case_a_filtered_request_is_as_its_seed_says(engine, folder, topology):
    """Alone or beside others, filtered otherwise; and an open filter is none."""
    wanted = request(make_prompt(1, 20), seed=5, top_k=6, top_p=0.9, top=6)
    alone = engine.sample([wanted])[0]
    for index in (0, 2):
        batch = [request(make_prompt(1, 20), seed=40), request(make_prompt(3, 20), seed=7, top_k=2, top_p=0.5)]
        batch.insert(index, wanted)
        np.testing.assert_array_equal(engine.sample(batch)[index].token_ids, alone.token_ids)
    free, opened = engine.sample([request(make_prompt(1, 20), seed=5, **f) for f in ({}, {"top_k": VOCAB_SIZE + 1})])
    np.testing.assert_array_equal(free.token_ids, opened.token_ids)
    assert not np.array_equal(free.token_ids, alone.token_ids)


def case_tokens_tied_with_the_kth_are_kept_and_shown(engine, folder, topology):
    """Embeddings in equal pairs tie logits in pairs, and five is odd: six tokens are left."""
    model = make_model(3)
    with torch.no_grad():
        table = model.model.embed_tokens.weight
        table[1 : VOCAB_SIZE - 1 : 2] = table[2::2]
    engine.load_weights(named_tensors(model), 1)
    asked = [request(make_prompt(index, 20), seed=index, top_k=5, top=5 + index % 2) for index in range(8)]
    swapped = 0
    for wanted, sample in zip(asked, engine.sample(asked), strict=True):
        k = wanted.num_top_logprobs
        assert (sample.top_ids == sample.token_ids[:, None]).any(1).all(), "the sampled token is among the recorded"
        if k == 6:
            assert (check_filtered(model, wanted, sample).sum(1) >= 6).all()
        else:
            assert (np.exp(sample.top_logprobs).sum(1) < 0.999).all()
            pair_of_last = sample.top_ids[:, -1] + np.where(sample.top_ids[:, -1] % 2, 1, -1)
            swapped += int((sample.token_ids == sample.top_ids[:, -1]).sum() + (sample.token_ids == pair_of_last).sum())
    engine.load_weights(named_tensors(models(0)), 2)
    assert swapped > 3, "no sampled token was at the fifth place: the case shows nothing"


def case_more_log_probs_than_tokens_are_refused_before_any_runs(engine, folder, topology):
    assert engine.sample([request(make_prompt(0, 20), new=2, top=VOCAB_SIZE)])[0].top_ids.shape == (2, VOCAB_SIZE)
    try:
        engine.sample([request(make_prompt(0, 20)), request(make_prompt(0, 20), top=VOCAB_SIZE + 1)])
    except UserError as error:
        assert "request 1" in str(error) and "204" in str(error), error
    else:
        raise AssertionError("more log-probs than the vocabulary has were accepted")
    assert len(engine.sample([request(make_prompt(0, 20))])) == 1


def case_the_soft_value_is_the_mean_over_enumerated_replies(engine, folder, topology):
    prompt = make_prompt(6, 30)
    tree = reply_tree({value: [10 + int(value), 50, 60 + round(10 * value) % 10] for value in GRID})
    paths = [np.concatenate([prompt, path]).astype(np.int32) for path in tree.branches]
    asked = [request(path, new=1, temperature=1.0, top=VOCAB_SIZE) for path in paths]
    samples = engine.sample(asked)
    found = soft_value(tree, [s.top_ids[0] for s in samples], [s.top_logprobs[0] for s in samples])
    root, digits = (
        np.exp(next_token_logprobs(models(0), path, sample, 1.0)[0])
        for path, sample in zip(paths, samples, strict=True)
    )
    weights = [root[10] * digits[60 + i] for i in range(10)] + [root[11]]
    np.testing.assert_allclose(found.mass, sum(weights), rtol=1e-3)
    np.testing.assert_allclose(found.value, np.dot(weights, GRID) / sum(weights), atol=1e-4)


def case_same_seed_same_tokens(engine, folder, topology):
    prompt = make_prompt(1, 20)
    first, second, other = (engine.sample([request(prompt, seed=seed)])[0] for seed in (5, 5, 6))
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    assert not np.array_equal(first.token_ids, other.token_ids)


def case_finish_reasons_and_the_stop_token_is_kept(engine, folder, topology):
    samples = engine.sample(requests_for(range(32), new=60))
    stopped = [s.token_ids for s in samples if s.finish == "stop"]
    cut = [s.token_ids for s in samples if s.finish == "length"]
    assert len(stopped) >= 2 and len(cut) >= 2, (len(stopped), len(cut))
    assert all(ids[-1] == STOP_ID and STOP_ID not in ids[:-1] for ids in stopped)
    assert all(len(ids) == 60 and STOP_ID not in ids for ids in cut)
    assert any(2 in ids[:-1] for ids in stopped + cut), "the folder's own end-of-sequence id must not end a sample"


def case_too_long_requests_are_refused_before_any_runs(engine, folder, topology):
    before = engine.last_call
    try:
        engine.sample([request(make_prompt(0, 20)), request(make_prompt(0, 500), new=13)])
    except UserError as error:
        assert "request 1" in str(error) and "513" in str(error), error
    else:
        raise AssertionError("a request longer than max_model_len was accepted")
    assert engine.last_call is before
    assert len(engine.sample([request(make_prompt(0, 500), new=12)])) == 1


def case_a_prefix_continuation_reuses_the_cache(engine, folder, topology):
    prompt = make_prompt(77, 100)
    first = next(s for s in engine.sample([request(prompt, new=60, seed=k) for k in range(8)]) if s.finish == "length")
    extended = np.concatenate([prompt, first.token_ids[:50]])
    assert gap(engine, 0, [request(extended, seed=4)]) < 1e-4
    assert engine.last_call.num_cached_tokens == 128, engine.last_call  # 150 tokens hold 4 full blocks of 32
    assert engine.last_call.num_prompt_tokens == 150


def case_new_weights_reach_prompts_cached_before(engine, folder, topology):
    long = [request(make_prompt(9, 300), seed=seed) for seed in range(3)]
    assert gap(engine, 0, long) < 1e-4
    engine.load_weights(named_tensors(models(1)), 1)
    assert gap(engine, 1, long) < 1e-4
    assert engine.version == 1


def case_without_the_reset_a_stale_cache_shows(engine, folder, topology):
    long = [request(make_prompt(10, 300), seed=seed) for seed in range(3)]
    engine.load_weights(named_tensors(models(0)), 1)
    assert gap(engine, 0, long) < 1e-4
    engine._reset_prefix_cache = lambda: True
    try:
        engine.load_weights(named_tensors(models(1)), 2)
        assert gap(engine, 1, long) > 0.1
    finally:
        del engine._reset_prefix_cache
    engine.load_weights(named_tensors(models(1)), 2)
    assert gap(engine, 1, long) < 1e-4


def case_a_reset_that_fails_is_an_error(engine, folder, topology):
    engine._reset_prefix_cache = lambda: False
    try:
        expect_sync_error(lambda: engine.load_weights(named_tensors(models(0)), 5), "prefix cache")
    finally:
        del engine._reset_prefix_cache
    engine.load_weights(named_tensors(models(0)), 5)


def expect_sync_error(load, *words: str) -> str:
    try:
        load()
    except WeightSyncError as error:
        assert all(word in str(error) for word in words), error
        return str(error)
    raise AssertionError("the load was accepted")


def case_one_corrupted_tensor_is_named(engine, folder, topology):
    worker = engine._llm.llm_engine.model_executor.driver_worker.worker
    reload_weights, victim = worker.reload_weights, ["", 0]

    def corrupting(weights_iterator):
        def corrupt():
            for name, tensor in weights_iterator:
                if name == victim[0]:
                    tensor = tensor.clone()
                    where = (tensor.numel() // 2 + victim[1]) % tensor.numel()
                    tensor.view(-1).view(torch.int32)[where] ^= 1  # one bit of one element
                yield name, tensor

        reload_weights(weights_iterator=corrupt())

    version = engine.version
    names = [name for name, _ in named_tensors(models(1))]
    worker.reload_weights = corrupting
    try:
        for index, name in enumerate(names):
            victim[:] = name, index
            message = expect_sync_error(lambda: engine.load_weights(named_tensors(models(1)), 50), name)
            assert not [other for other in names if other != name and other in message], message
            assert engine.version == version
        try:
            engine.sample([request(make_prompt(0, 20))])
        except RuntimeError as error:
            assert "last weight load" in str(error)
        else:
            raise AssertionError("an engine with unknown weights sampled")
    finally:
        worker.reload_weights = reload_weights
    engine.load_weights(named_tensors(models(1)), 50)
    assert gap(engine, 1, requests_for(range(2))) < 1e-4


def case_a_tensor_that_is_missing_or_unknown_is_named(engine, folder, topology):
    missing = "model.layers.1.self_attn.k_proj.weight"
    some = ((name, tensor) for name, tensor in named_tensors(models(1)) if name != missing)
    expect_sync_error(lambda: engine.load_weights(some, 9), missing, "not sent")
    engine.load_weights(named_tensors(models(1)), 9)


def case_a_stale_tied_head_is_caught(engine, folder, topology):
    from megatron_ac2.engine import vllm_worker  # imports vLLM, which must not happen before the engine does

    engine.load_weights(named_tensors(models(0)), 1)
    refresh, vllm_worker._refresh_tied_head = vllm_worker._refresh_tied_head, lambda model: None
    try:
        expect_sync_error(lambda: engine.load_weights(named_tensors(models(1)), 2), "embed_tokens", "lm_head")
    finally:
        vllm_worker._refresh_tied_head = refresh
    engine.load_weights(named_tensors(models(1)), 2)
    assert gap(engine, 1, requests_for(range(2))) < 1e-4


def case_every_token_carries_its_version(engine, folder, topology):
    for version in (3, 4):
        engine.load_weights(named_tensors(models(version % 2)), version)
        for sample in engine.sample(requests_for(range(3))):
            np.testing.assert_array_equal(sample.versions, np.full(len(sample.token_ids), version))


def case_megatron_weights_are_published(engine, folder, topology):
    path = save_model(models(1), folder / "m1")
    hf_config = load_hf_config(path)
    model = build_model(hf_config, topology, ParallelConfig(), torch.float32)
    load_hf_weights(model, hf_config, topology, path)
    engine.load_weights(named_tensors(models(0)), 1)
    metrics = publish(model, hf_config, topology, engine, 2, verify=True)
    assert engine.version == 2 and gap(engine, 1, requests_for(range(4))) < 1e-4
    assert 0 < metrics["reshard/seconds"] < 60
    num_bytes = sum(tensor.numel() * 4 for _, tensor in named_tensors(models(1)))
    assert abs(metrics["reshard/gib"] * 2**30 - num_bytes) < 1


def case_published_with_rounding_the_engine_computes_with_rounded_weights(engine, folder, topology):
    path = save_model(models(1), folder / "exact")
    hf_config = load_hf_config(path)
    model = build_model(hf_config, topology, ParallelConfig(), torch.float32)
    load_hf_weights(model, hf_config, topology, path)
    asked, errors = requests_for(range(4)), {}
    for kind in ("int8", "fp8_e4m3"):
        metrics = publish(model, hf_config, topology, engine, 2, verify=True, rounding=kind)
        errors[kind] = metrics["reshard/rounding_error"]
        rounded = make_model(1)
        exact = rounded.state_dict()
        projections = [name for name in exact if name.endswith("_proj.weight")]
        assert len(projections) == 7 * 2
        matrices = {name: quantise_dequantise(exact[name], kind) for name in projections}
        difference = sum((exact[name] - matrices[name]).square().sum() for name in projections)
        norm = sum(exact[name].square().sum() for name in projections)
        np.testing.assert_allclose(errors[kind], float((difference / norm).sqrt()), rtol=1e-4)
        rounded.load_state_dict(matrices, strict=False)
        samples = engine.sample(asked)
        pairs = list(zip(asked, samples, strict=True))
        assert max(logprob_gap(rounded, r.prompt_ids, s, TEMPERATURE) for r, s in pairs) < 1e-4
        assert max(logprob_gap(models(1), r.prompt_ids, s, TEMPERATURE) for r, s in pairs) > 1e-2
    metrics = publish(model, hf_config, topology, engine, 3, verify=True)
    assert "reshard/rounding_error" not in metrics and gap(engine, 1, asked) < 1e-4, "the trainer's stayed exact"
    assert 0.001 < errors["int8"] < errors["fp8_e4m3"] < 2**-4
    return f"relative error {errors['int8']:.4f} (int8), {errors['fp8_e4m3']:.4f} (fp8_e4m3)"


def case_twenty_updates_leave_memory_flat(engine, folder, topology):
    process = psutil.Process()
    for version in range(4):
        engine.load_weights(named_tensors(models(version % 2)), version)
    before = process.memory_info().rss
    start = time.perf_counter()
    for version in range(20):
        engine.load_weights(named_tensors(models(version % 2)), version)
    seconds = (time.perf_counter() - start) / 20
    grown = (process.memory_info().rss - before) / 2**20
    model_mib = sum(tensor.numel() * 4 for _, tensor in named_tensors(models(0))) / 2**20
    assert grown < 5 * model_mib, f"{grown:.1f} MiB more after 20 updates of {model_mib:.1f} MiB"
    return f"{seconds * 1e3:.0f} ms an update with verification, {grown:.2f} MiB more after 20"


def case_progress_is_reported(engine, folder, topology):
    seen = []
    engine.sample(requests_for(range(5)), progress=lambda done, asked: seen.append((done, asked)))
    assert seen == [(done, 5) for done in range(1, 6)]


def case_sleep_does_nothing_on_cpu(engine, folder, topology):
    engine.load_weights(named_tensors(models(0)), 7)
    engine.sleep()
    assert gap(engine, 0, requests_for(range(2))) < 1e-4
    engine.wake()
    assert gap(engine, 0, requests_for(range(2))) < 1e-4


def global_state() -> tuple:
    draws = torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()  # noqa: NPY002
    variables = {name: os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LD_PRELOAD")}
    return draws, variables, torch.set_num_threads.__name__


def seed_globals() -> None:
    torch.manual_seed(11)
    np.random.seed(12)  # noqa: NPY002
    random.seed(13)


def main(folder: Path) -> None:
    verdicts: dict[str, str] = {}
    details: dict[str, str] = {}

    def judge(name: str, check) -> None:
        try:
            details[name] = str(check() or "")
            verdicts[name] = "passed"
        except Exception:
            verdicts[name] = traceback.format_exc()

    def refuses_without_a_process_group():
        try:
            start_engine(folder, None)
        except RuntimeError as error:
            assert "init_process_group" in str(error)
        else:
            raise AssertionError("built an engine without a process group")

    judge("needs_a_process_group", refuses_without_a_process_group)
    topology = init_topology(ParallelConfig(), seed=0)

    def refuses_bad_options():
        config = EngineConfig(options={"max_model_length": 3, "seed": 1})
        try:
            ColocatedEngine(str(folder / "m0"), config, topology, "float32", 64, [], seed=0)
        except UserError as error:
            assert "options.max_model_length" in str(error) and "options.seed" in str(error)
        else:
            raise AssertionError("unknown and reserved options were accepted")

    judge("bad_options_are_named", refuses_bad_options)
    os.environ["LOCAL_WORLD_SIZE"] = "1234"
    seed_globals()
    expected = global_state()
    seed_globals()
    engine = start_engine(folder, topology)

    def untouched(action=lambda: None):
        def check():
            action()
            found = global_state()
            seed_globals()
            assert found == expected, (found, expected)

        return check

    judge("building_leaves_global_state_alone", untouched())
    unseeded = [request(make_prompt(0, 20))]
    judge("sampling_leaves_global_state_alone", untouched(lambda: engine.sample(unseeded)))
    reload = functools.partial(engine.load_weights, named_tensors(models(0)), 0)
    judge("loading_leaves_global_state_alone", untouched(reload))
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            judge(name.removeprefix("case_"), functools.partial(case, engine, folder, topology))
    (folder / "verdicts.json").write_text(json.dumps({"verdicts": verdicts, "details": details}))
    sys.stdout.flush()
    os._exit(0)  # tearing vLLM and gloo down in order is not what is tested here


if __name__ == "__main__":
    main(Path(sys.argv[1]))
