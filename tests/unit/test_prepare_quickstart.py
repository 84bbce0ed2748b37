from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_ac2.data.problems import load_problems
from megatron_ac2.grading.rules import RuleGrader
from tools import prepare_quickstart
from tools.prepare_quickstart import Flaw, draw_entries, prepare, work
from tools.quickstart_model import MAX_VOCAB

NUM_TERMS, NUM_TRAIN, NUM_VALIDATION, NUM_WORKED = 5, 12, 8, 200


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("quickstart")
    prepare(out, 3, NUM_TERMS, NUM_TRAIN, NUM_VALIDATION, NUM_WORKED)
    return out


@pytest.fixture(scope="module")
def tokenizer(inputs):
    return AutoTokenizer.from_pretrained(inputs / "tokenizer")


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def entry(expression: str, answer: int) -> dict:
    return {"question": f"{expression} =", "answer": str(answer), "metadata": {"expression": expression}}


def test_a_worked_solution_by_hand():
    right = work(entry("4 - 7 + 9", 6))
    assert right["response"] == "+4=+04\n-7=-03\n+9=+06\nAnswer: +06"
    assert right["step_ends"] == [7, 14, 21, 32] and right["step_correct"] == [1, 1, 1, 1] and right["correct"] == 1
    always = Flaw(hard_share=1.0, hard_error=1.0)
    wrong = work(entry("4 - 7 + 9", 6), always, random.Random(0))
    assert wrong["response"] == "+4=+04\n-7=-02\n+9=+08\nAnswer: +08"  # one too high, carried on
    assert wrong["step_correct"] == [1, 0, 0, 0] and wrong["correct"] == 0


def test_flaws_sit_in_a_fixed_share_of_the_facts():
    flaw = Flaw(hard_share=0.3, hard_error=0.5, base_error=0.01)
    rates = [flaw.error_rate(value, sign, digit) for value in range(10) for sign in "+-" for digit in range(10)]
    assert set(rates) == {0.5, 0.01}
    assert 0.2 < rates.count(0.5) / len(rates) < 0.4
    assert flaw.error_rate(23, "+", 4) == flaw.error_rate(3, "+", 4) == flaw.error_rate(-7, "+", 4)


def test_flaws_may_hang_on_the_term_alone():
    flaw = Flaw(hard_share=0.3, hard_error=0.5, base_error=0.01, by_term=True)
    for sign in "+-":
        for digit in range(10):
            assert len({flaw.error_rate(value, sign, digit) for value in range(-20, 20)}) == 1
    rates = [flaw.error_rate(0, sign, digit) for sign in "+-" for digit in range(10)]
    assert 1 <= rates.count(0.5) <= 12


def test_learnable_sums_never_fall_below_zero(tmp_path):
    prepare(tmp_path, 3, NUM_TERMS, 6, 4, 30, learnable=True)
    rows = rows_of(tmp_path / "worked.jsonl")
    assert len(rows) == 30
    lowest = [min(int(line.split("=")[1]) for line in row["response"].splitlines()[:-1]) for row in rows]
    assert min(lowest) >= 0 and min(lowest) < 9
    assert any("-" in row["prompt"] for row in rows)
    assert min(min(prepare_quickstart.running_values(e)) for e in draw_entries(30, 3, NUM_TERMS)) < 0  # others do


def test_the_grader_agrees_with_the_labels(inputs, tokenizer):
    """Worked solutions that are marked right earn 1, flawed ones 0, by the grader of the training run."""
    entries = {e["question"]: e for e in draw_entries(NUM_TRAIN + NUM_VALIDATION + NUM_WORKED, 3, NUM_TERMS)}
    rows = rows_of(inputs / "worked.jsonl")
    path = inputs / "worked_problems.jsonl"
    prepare_quickstart.write_rows(
        path, (prepare_quickstart.problem_row(f"w{i}", entries[row["prompt"]]) for i, row in enumerate(rows))
    )
    problems = load_problems(path, tokenizer)
    grader = RuleGrader(problems, timeout=5.0)
    grades = grader.grade([(problem, row["response"]) for problem, row in zip(problems, rows, strict=True)])
    grader.close()
    rewards = [grade.reward for grade in grades]
    assert rewards == [row["correct"] for row in rows]
    assert 0 < sum(rewards) < len(rewards)


def test_step_labels_are_consistent(inputs):
    for row in rows_of(inputs / "worked.jsonl"):
        assert len(row["step_ends"]) == len(row["step_correct"]) == NUM_TERMS + 1
        assert row["step_ends"][-1] == len(row["response"])
        assert all(row["response"][end - 1] == "\n" for end in row["step_ends"][:-1])
        assert row["step_correct"] == sorted(row["step_correct"], reverse=True)  # an error is carried on
        assert row["correct"] == row["step_correct"][-1]


def test_problem_files_load_and_are_disjoint(inputs, tokenizer):
    train = load_problems(inputs / "train.jsonl", tokenizer)
    validation = load_problems(inputs / "validation.jsonl", tokenizer)
    worked = {row["prompt"] for row in rows_of(inputs / "worked.jsonl")}
    assert (len(train), len(validation), len(worked)) == (NUM_TRAIN, NUM_VALIDATION, NUM_WORKED)
    questions = worked | {p.question for p in train} | {p.question for p in validation}
    assert len(questions) == NUM_TRAIN + NUM_VALIDATION + NUM_WORKED
    assert all(set(problem.grading) == {"reasoning_gym"} for problem in train + validation)


def test_the_tokenizer(inputs, tokenizer):
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
    assert 256 < len(tokenizer) <= MAX_VOCAB
    for text in ("+4=+04\n-7=-03\nAnswer: -03", "héllo 12345\t世界 <think>\n\n</think>\n\nx", " \n\n 007 "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("0123456789")) == 10
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"):
        assert len(tokenizer.encode(token)) == 1
    assert len(tokenizer.encode("+4=+04\n")) == len(tokenizer.encode("-7=-13\n")) == 6
    digits = set("0123456789")
    merged = [token for token in tokenizer.get_vocab() if len(token) > 1 and digits & set(token)]
    assert not merged
    for row in rows_of(inputs / "worked.jsonl"):  # a step ends where a token ends: chunks can be cut there
        ids = tokenizer.encode(row["response"])
        ends = {len(tokenizer.decode(ids[: i + 1])) for i in range(len(ids))}
        assert set(row["step_ends"]) <= ends
        assert len(ids) == 6 * NUM_TERMS + 5


def test_the_base_model_loads_and_runs(inputs, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(inputs / "base")
    config = model.config
    assert config.architectures == ["Qwen3ForCausalLM"] and not config.tie_word_embeddings
    assert config.vocab_size % 64 == 0 and config.vocab_size >= len(tokenizer)
    assert config.eos_token_id == tokenizer.eos_token_id and config.pad_token_id == tokenizer.pad_token_id
    assert config.head_dim in (32, 64) and config.num_attention_heads % 2 == config.num_hidden_layers % 2 == 0
    ids = torch.tensor([tokenizer.encode("+4=+04\n")])
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    assert logits.dtype == torch.float32 and logits.shape == (1, 6, config.vocab_size) and logits.isfinite().all()
    assert AutoTokenizer.from_pretrained(inputs / "base").get_vocab() == tokenizer.get_vocab()


def test_another_process_writes_the_same_files(inputs, tmp_path):
    """Nothing depends on Python's hash seed or on the state of a generator."""
    command = [sys.executable, prepare_quickstart.__file__, "--out", str(tmp_path), "--seed", "3"]
    sizes = {"terms": NUM_TERMS, "num-train": NUM_TRAIN, "num-validation": NUM_VALIDATION, "num-worked": NUM_WORKED}
    command += [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    env = {**os.environ, "PYTHONHASHSEED": "12345", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=env)
    rows = ("train.jsonl", "validation.jsonl", "worked.jsonl")
    for name in (*rows, "tokenizer/tokenizer.json", "base/model.safetensors"):
        assert (tmp_path / name).read_bytes() == (inputs / name).read_bytes(), name


def test_too_few_distinct_problems_is_an_error():
    with pytest.raises(SystemExit, match="use more terms"):
        draw_entries(500, 0, 2)
