from __future__ import annotations

import numpy as np
import pytest

from megatron_ac2.algorithm import value_prompt
from megatron_ac2.algorithm.value_prompt import GRID, PROMPT_HASH, build_value_prompt, parse_value, value_ids
from tools.quickstart_model import CHAT_TEMPLATE, train_tokenizer

QUESTION = "What is 2 + 2?"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["user assistant\n", "the answer is 0.5", value_prompt._QUESTION])


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def text_of(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_the_prompt_reads_as_specified(tokenizer):
    prompt = build_value_prompt(tokenizer, QUESTION, ids_of(tokenizer, "2 + 2"), remaining_tokens=77)
    assert prompt.dtype == np.int32 and prompt.ndim == 1
    text = text_of(tokenizer, prompt)
    head = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n2 + 2<|im_end|>\n<|im_start|>user\n"
    assert text.startswith(head)
    assert "at most 77 more tokens" in text and "<reference>" not in text
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nExpected credit: ")


def test_the_policy_prompt_and_the_response_ids_are_its_exact_beginning(tokenizer):
    """Spliced, not retokenised: these ids are no tokenisation that the tokenizer itself would choose."""
    policy_prompt = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True)
    single_bytes = [ids_of(tokenizer, letter)[0] for letter in "answer"]
    assert ids_of(tokenizer, "answer") != single_bytes
    prompt = build_value_prompt(tokenizer, QUESTION, np.array(single_bytes, dtype=np.int32), remaining_tokens=5)
    start = len(policy_prompt["input_ids"])
    assert prompt[:start].tolist() == policy_prompt["input_ids"]
    assert prompt[start : start + 6].tolist() == single_bytes


def test_the_reference_is_spliced_into_the_question_without_its_thinking_and_end(tokenizer):
    solution = [ids_of(tokenizer, letter)[0] for letter in "answer"]
    reference = [*ids_of(tokenizer, "<think>hm</think>"), *solution, tokenizer.eos_token_id]
    prompt = build_value_prompt(tokenizer, QUESTION, [], remaining_tokens=5, reference_ids=reference)
    assert "<reference>\nanswer\n</reference>" in text_of(tokenizer, prompt)
    assert "hm" not in text_of(tokenizer, prompt)
    windows = np.lib.stride_tricks.sliding_window_view(prompt, len(solution))
    assert (windows == solution).all(axis=1).sum() == 1

    only_thinking = ids_of(tokenizer, "<think>hm</think>")
    prompt = build_value_prompt(tokenizer, QUESTION, [], remaining_tokens=5, reference_ids=only_thinking)
    assert "<reference>\n<think>hm</think>\n</reference>" in text_of(tokenizer, prompt)


@pytest.mark.parametrize(
    ("response", "shown"),
    [
        ("<think>so far", "<think>so far\n</think>\n\n<|im_end|>"),
        ("<think>done</think>\n4", "<think>done</think>\n4<|im_end|>"),
        ("4<|im_end|>", "4<|im_end|>"),  # the end of turn is not doubled
        ("", "<|im_end|>"),
    ],
)
def test_thinking_is_closed_once(tokenizer, response, shown):
    prompt = build_value_prompt(tokenizer, QUESTION, ids_of(tokenizer, response), remaining_tokens=5)
    assert f"<|im_start|>assistant\n{shown}\n<|im_start|>user\n" in text_of(tokenizer, prompt)


def test_a_template_that_opens_the_thinking_itself():
    tokenizer = train_tokenizer(["user assistant\n"])
    tokenizer.chat_template = CHAT_TEMPLATE.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
    text = text_of(tokenizer, build_value_prompt(tokenizer, QUESTION, ids_of(tokenizer, "so far"), remaining_tokens=5))
    assert "<|im_start|>assistant\n<think>\nso far\n</think>\n\n<|im_end|>\n" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nExpected credit: ")
    done = build_value_prompt(tokenizer, QUESTION, ids_of(tokenizer, "x</think>4"), remaining_tokens=5)
    assert "<think>\nx</think>4<|im_end|>\n" in text_of(tokenizer, done)


def test_every_value_of_the_grid_is_four_tokens_and_reads_back(tokenizer):
    assert len(GRID) == 11 and GRID[3] == 0.3
    for value in GRID:
        ids = value_ids(tokenizer, value)
        assert len(ids) == 4 and ids[-1] == tokenizer.eos_token_id
        assert parse_value(text_of(tokenizer, ids)) == (value, True)
    for value in (0.55, -0.1, 1.1, 0.30000000000000004):
        with pytest.raises(ValueError, match="grid"):
            value_ids(tokenizer, value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5", 0.5), (" 0.5\n", 0.5), ("0.50", 0.5), (".5", 0.5), ("1", 1.0), ("0", 0.0), ("1.0<|im_end|>", 1.0),
        ("0.3, since", 0.3), ("0.7. It", 0.7), ("1.000", 1.0), ("00.2", 0.2),
    ],
)  # fmt: skip
def test_numbers_on_the_grid(text, value):
    assert parse_value(text) == (value, True)


@pytest.mark.parametrize(
    "text",
    ["", "high", "0.55", "0.05", "1.1", "2", "10", "-1", "-0.0", "+0.5", "1/2", "50%", "1%", "0.", "1.", "0.5e1",
     "0.5.1", "0.5x", "value 0.5", "٠.٥", "nan", "1,5", "0.5/1", "٣"],
)  # fmt: skip
def test_anything_else_is_invalid_and_never_coerced(text):
    assert parse_value(text) == (0.0, False)


def test_the_hash_pins_the_wording():
    """A change of wording changes a trained format: update this hash only with that in mind."""
    assert PROMPT_HASH == "6698c9234015776195fe28d82e1de034f4bf725215e4015fdc05fdfa42a8484d"
