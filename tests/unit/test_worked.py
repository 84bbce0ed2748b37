from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_ac2.config import Config
from megatron_ac2.data.problems import template_prompts
from megatron_ac2.data.worked import WorkedSolution, load_worked, step_values
from megatron_ac2.sft import StageConfig, batch_indices, learning_rate
from megatron_ac2.training.value_head_critic import ValueHeadCritic
from megatron_ac2.types import CriticState, Problem, UserError
from tools.prepare_quickstart import Flaw, draw_entries, worked_rows, write_rows
from tools.quickstart_model import train_tokenizer


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return list(worked_rows(draw_entries(12, seed=0, num_terms=4), Flaw(hard_error=0.9)))


@pytest.fixture(scope="module")
def tokenizer(rows):
    words = "system\nuser\nassistant\n"
    return train_tokenizer(text for row in rows for text in (row["prompt"], row["response"], words))


def load(rows: list[dict], tokenizer, folder: Path) -> list[WorkedSolution]:
    write_rows(folder / "worked.jsonl", rows)
    return load_worked(folder / "worked.jsonl", tokenizer, tokenizer.eos_token_id)


def test_tokens_are_the_templated_prompt_the_response_and_its_end(rows, tokenizer, tmp_path) -> None:
    for row, found in zip(rows, load(rows, tokenizer, tmp_path), strict=True):
        assert found.token_ids[: found.prompt_len].tolist() == template_prompts([row["prompt"]], tokenizer)[0]
        assert tokenizer.decode(found.token_ids[found.prompt_len : -1]) == row["response"]
        assert found.token_ids[-1] == tokenizer.eos_token_id


def test_a_step_is_complete_at_its_position_and_not_before(rows, tokenizer, tmp_path) -> None:
    for row, found in zip(rows, load(rows, tokenizer, tmp_path), strict=True):
        assert len(found.step_positions) == len(row["step_ends"]) == 5
        assert found.step_correct.tolist() == row["step_correct"]
        for end, position in zip(row["step_ends"], found.step_positions, strict=True):
            step_text = row["response"][:end]
            assert tokenizer.decode(found.token_ids[found.prompt_len : position + 1]).startswith(step_text)
            assert not tokenizer.decode(found.token_ids[found.prompt_len : position]).startswith(step_text)
        assert found.step_positions[-1] == len(found.token_ids) - 2  # the last token before the end


def test_the_critic_reads_reference_separator_prompt_response(rows, tokenizer, tmp_path) -> None:
    """The supervised stage and the critic of a run lay a context out alike, up to a state in the middle."""
    row = {**rows[0], "reference": rows[1]["response"]}
    plain, referenced = load([rows[0] | {"reference": rows[1]["response"]}, row], tokenizer, tmp_path)
    assert plain.reference_ids[-1] == tokenizer.eos_token_id
    behind = referenced.behind_reference(separator_id=3)
    critic = ValueHeadCritic(None, None, None, Config(), separator_id=3, model_max_len=500, align=1)
    problem = Problem("p", plain.token_ids[: plain.prompt_len], "", {})
    for position, moved in zip(plain.step_positions, behind.step_positions, strict=True):
        state = CriticState(problem, plain.token_ids[plain.prompt_len : position + 1], plain.reference_ids)
        np.testing.assert_array_equal(behind.token_ids[: moved + 1], critic.context_ids(state))
    assert behind.token_ids[: behind.prompt_len].tolist()[-plain.prompt_len :] == problem.prompt_ids.tolist()
    assert behind.step_correct.tolist() == plain.step_correct.tolist()


def test_without_a_reference_the_layout_stays(rows, tokenizer, tmp_path) -> None:
    (found,) = load([{key: value for key, value in rows[0].items() if key != "reference"}], tokenizer, tmp_path)
    assert found.reference_ids is None and found.behind_reference(3) is found


def solution(*correct: int) -> WorkedSolution:
    ids = np.zeros(len(correct) + 1, dtype=np.int32)
    return WorkedSolution(ids, 1, np.arange(len(correct)), np.array(correct, dtype=np.float32), None)


def test_step_values_by_hand() -> None:
    """Two steps to go: three of four rows are right so far, one of these ends right. One to go: one of two does."""
    rows = [solution(1, 1, 1), solution(1, 1, 0), solution(1, 0, 0), solution(0, 0, 0)]
    expected = [[1 / 3, 1 / 2, 1], [1 / 3, 1 / 2, 0], [1 / 3, 0, 0], [0, 0, 0]]
    for found, row in zip(step_values(rows), expected, strict=True):
        np.testing.assert_allclose(found, row, rtol=1e-6)
        assert found.dtype == np.float32


def test_rows_of_unequal_length_are_counted_by_steps_to_go() -> None:
    found = step_values(
        [
            solution(1, 1),
            solution(1, 1, 0),
            solution(
                1,
            ),
        ]
    )
    np.testing.assert_allclose(found[0], [1 / 2, 1])
    np.testing.assert_allclose(found[1], [0, 1 / 2, 0])
    np.testing.assert_allclose(found[2], [1])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "p"', "not JSON"),
        ('{"prompt": "p"}', 'the texts "prompt" and "response"'),
        ('{"prompt": 1, "response": "r"}', 'the texts "prompt" and "response"'),
        ('{"prompt": "p", "response": "r", "step_ends": [1], "step_correct": []}', "differ in length"),
        ('{"prompt": "p", "response": "r", "step_ends": [2], "step_correct": [1]}', "step_ends"),  # past the end
        ('{"prompt": "p", "response": "r", "step_ends": [0], "step_correct": [1]}', "step_ends"),
        ('{"prompt": "p", "response": "rs", "step_ends": [2, 1], "step_correct": [1, 1]}', "step_ends"),
        ('{"prompt": "p", "response": "r", "step_ends": 1, "step_correct": [1]}', "step_ends"),
        ('{"prompt": "p", "response": "r", "step_ends": [1], "step_correct": [2]}', "step_correct"),
        ('{"prompt": "p", "response": "r", "reference": 3}', "reference"),
        ('{"prompt": "p", "response": "r", "step_ends": [true], "step_correct": [1]}', "step_ends"),
        ('{"prompt": "p", "response": "r", "step_ends": [1], "step_correct": [NaN]}', "step_correct"),
        ('{"prompt": "p\\ud800", "response": "r"}', '"prompt": found'),
        ('{"prompt": "p", "response": "\\ud800"}', '"response": found'),
        ('{"prompt": "p", "response": "r", "reference": "\\ud800"}', '"reference": found'),
        ('{"prompt": "p", "response": "r", "prompt": "q"}', "not JSON: an object holds 'prompt' twice"),
        ('{"prompt": "p", "response": "r", "deep": %s}' % ("[" * 9999), "not JSON: nested too deep"),
        ('{"prompt": "p", "response": "r", "big": %s}' % ("9" * 9999), "not JSON: Exceeds the limit"),
    ],
)
def test_a_broken_row_is_named(row: str, message: str, tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "worked.jsonl"
    path.write_text(json.dumps({"prompt": "p", "response": "r"}) + "\n" + row + "\n")
    with pytest.raises(UserError, match="line 2") as caught:
        load_worked(path, tokenizer, tokenizer.eos_token_id)
    assert len(caught.value.problems) == 1 and message in caught.value.problems[0]


def test_missing_and_empty_files_are_named(tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not found"):
        load_worked(tmp_path / "no.jsonl", tokenizer, 0)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match="no rows"):
        load_worked(tmp_path / "empty.jsonl", tokenizer, 0)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9", "response": "r"}\n')
    with pytest.raises(UserError, match="line 1: not JSON: 'utf-8' codec can't decode"):
        load_worked(tmp_path / "latin.jsonl", tokenizer, 0)


def test_every_row_comes_once_an_epoch() -> None:
    drawn = [index for step in range(10) for index in batch_indices(20, 4, step, seed=0)]
    assert sorted(drawn[:20]) == sorted(drawn[20:]) == list(range(20)) and drawn[:20] != drawn[20:]
    assert sorted(batch_indices(3, 8, 7, seed=0)) == [0, 1, 2]  # fewer rows than a batch


def test_learning_rate_warms_up_and_falls_along_half_a_cosine() -> None:
    stage = StageConfig(data="", out="", num_steps=110, warmup_steps=10, min_lr_fraction=0.1)
    rates = [learning_rate(stage, step) / stage.optimizer.lr for step in (0, 4, 9, 10, 60, 110)]
    np.testing.assert_allclose(rates, [0.1, 0.5, 1, 1, 0.55, 0.1], atol=1e-12)
