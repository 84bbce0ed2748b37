from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ac2.data.problems import ProblemStream, load_problems
from megatron_ac2.types import Problem, UserError
from tools.quickstart_model import train_tokenizer

ENTRY = {"question": "2 + 2 =", "answer": "4", "metadata": {"expression": "2 + 2"}}
GYM = {"dataset": "chain_sum", "entry": ENTRY}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["user assistant\n"])


def write(path, *rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def errors_of(path, tokenizer) -> list[str]:
    with pytest.raises(UserError) as raised:
        load_problems(path, tokenizer)
    return raised.value.problems


def test_rows_become_problems(tmp_path, tokenizer):
    path = write(
        tmp_path / "p.jsonl",
        {"id": "a", "prompt": "1+1?", "answer": "2", "source": "ignored"},
        "",
        {"prompt": "2+2?", "reasoning_gym": GYM, "id": None},
        {"id": "c", "prompt": "Prove it.", "rubric": "a full proof"},
    )
    problems = load_problems(path, tokenizer)
    assert [p.question for p in problems] == ["1+1?", "2+2?", "Prove it."]
    assert [p.grading for p in problems] == [{"answer": "2"}, {"reasoning_gym": GYM}, {"rubric": "a full proof"}]
    assert [p.problem_id for p in problems][::2] == ["a", "c"] and len(problems[1].problem_id) == 16
    assert problems[1].problem_id == load_problems(path, tokenizer)[1].problem_id
    for problem in problems:
        assert problem.prompt_ids.dtype == np.int32 and problem.prompt_ids.ndim == 1
        text = tokenizer.decode(problem.prompt_ids, skip_special_tokens=False)
        assert text == f"<|im_start|>user\n{problem.question}<|im_end|>\n<|im_start|>assistant\n"


def test_parquet_equals_jsonl(tmp_path, tokenizer):
    columns = ("id", "prompt", "answer", "reasoning_gym")
    rows = [
        dict(zip(columns, ("a", "1+1?", "2", None), strict=True)),
        dict(zip(columns, ("b", "2+2?", None, GYM), strict=True)),
    ]
    as_text = [{**row, "reasoning_gym": row["reasoning_gym"] and json.dumps(row["reasoning_gym"])} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(as_text), tmp_path / "text.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "struct.parquet")

    def loaded(path):
        return [(p.problem_id, p.question, p.grading) for p in load_problems(path, tokenizer)]

    expected = loaded(write(tmp_path / "p.jsonl", *rows))
    assert expected[1] == ("b", "2+2?", {"reasoning_gym": GYM})
    assert loaded(tmp_path / "text.parquet") == loaded(tmp_path / "struct.parquet") == expected


def test_every_broken_row_is_named_at_once(tmp_path, tokenizer):
    path = write(
        tmp_path / "p.jsonl",
        {"id": "a", "prompt": "1+1?", "answer": "2"},
        "{not json",
        {"prompt": " ", "answer": "2"},
        {"answer": "2"},
        {"prompt": "q"},
        {"id": "a", "prompt": "another", "answer": "2"},
        "[1]",
        {"prompt": "q", "answer": 2},
        {"prompt": "q", "answer": "2", "reasoning_gym": GYM},
        {"prompt": "q", "reasoning_gym": {"dataset": "chain_sun", "entry": ENTRY}},
        {"prompt": "q", "reasoning_gym": {"dataset": "chain_sum", "entry": {"question": "q"}}},
    )
    expected = {
        2: "not valid JSON", 3: "prompt: found ' '; accepted: text", 4: "prompt: found nothing", 5: "no way to grade",
        6: f"id: found 'a' again, first at {path}: line 1", 7: "found [1]; accepted: a JSON object",
        8: "answer: found 2; accepted: text", 9: 'both "answer" and "reasoning_gym"',
        10: "reasoning_gym.dataset: found 'chain_sun'", 11: "reasoning_gym.entry: found no answer, metadata",
    }  # fmt: skip
    found = errors_of(path, tokenizer)
    assert len(found) == len(expected)
    for error, (line, text) in zip(found, expected.items(), strict=True):
        assert error.startswith(f"{path}: line {line}: ") and text in error and "accepted" in error


def test_equal_rows_without_an_id_are_duplicates(tmp_path, tokenizer):
    row = {"prompt": "q", "answer": "2"}
    assert "first at" in errors_of(write(tmp_path / "p.jsonl", row, row), tokenizer)[0]
    assert len(load_problems(write(tmp_path / "p.jsonl", row, {**row, "answer": "3"}), tokenizer)) == 2


def test_at_most_twenty_errors_are_listed(tmp_path, tokenizer):
    found = errors_of(write(tmp_path / "p.jsonl", *["{"] * 50), tokenizer)
    assert len(found) == 21 and found[-1].endswith("and 30 more errors")


def test_unreadable_files(tmp_path, tokenizer):
    assert "not found" in errors_of(tmp_path / "none.jsonl", tokenizer)[0]
    assert "found no rows" in errors_of(write(tmp_path / "empty.jsonl"), tokenizer)[0]
    assert "accepted: .jsonl or .parquet" in errors_of(write(tmp_path / "p.csv", "a,b"), tokenizer)[0]
    assert "cannot be read as Parquet" in errors_of(write(tmp_path / "p.parquet", "a,b"), tokenizer)[0]
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9", "answer": "1"}\n')
    assert "line 1: not valid JSON" in errors_of(tmp_path / "latin.jsonl", tokenizer)[0]


def problems(num: int, answer: str = "1") -> list[Problem]:
    return [Problem(f"p{i}", np.array([i], dtype=np.int32), f"q{i}", {"answer": answer}) for i in range(num)]


def ids(taken: list[Problem]) -> list[str]:
    return [problem.problem_id for problem in taken]


@settings(max_examples=200)
@given(st.integers(1, 12), st.lists(st.integers(1, 12), max_size=20), st.booleans(), st.integers(0, 3))
def test_no_problem_is_skipped_or_repeated(size, takes, shuffle, seed):
    """Whatever the takes: distinct within a take, and after any k whole epochs every problem came k times."""
    stream = ProblemStream(problems(size), seed, shuffle)
    seen: list[str] = []
    for n in takes:
        taken = ids(stream.take(min(n, size)))
        assert len(set(taken)) == len(taken) == min(n, size)
        seen += taken
    for start in range(0, len(seen) - size + 1, size):
        assert set(Counter(seen[start : start + size]).values()) == {1}


def test_without_shuffle_the_file_order_is_kept():
    stream = ProblemStream(problems(5), seed=0, shuffle=False)
    assert [ids(stream.take(2)) for _ in range(3)] == [["p0", "p1"], ["p2", "p3"], ["p4", "p0"]]
    # A take of 4 over the edge holds p3 and p4 of the old epoch; here the new one begins with others anyway.
    stream = ProblemStream(problems(5), seed=0, shuffle=False)
    stream.take(3)
    assert ids(stream.take(5)) == ["p3", "p4", "p0", "p1", "p2"]
    assert ids(stream.take(2)) == ["p3", "p4"]


def test_epochs_and_seeds_differ_and_repeat():
    def epochs(seed: int) -> list[list[str]]:
        stream = ProblemStream(problems(30), seed, shuffle=True)
        return [ids(stream.take(30)), ids(stream.take(30))]

    assert epochs(1) == epochs(1)
    assert epochs(1)[0] != epochs(1)[1] and epochs(1) != epochs(2)


@pytest.mark.parametrize("before", range(8))
def test_a_resumed_stream_goes_on_as_if_never_stopped(before):
    whole = ProblemStream(problems(7), seed=3, shuffle=True)
    resumed = ProblemStream(problems(7), seed=3, shuffle=True)
    for _ in range(before):
        whole.take(4)
    state = whole.state_dict()
    expected = [ids(whole.take(4)) for _ in range(6)]  # and the state is a copy, not a view
    resumed.load_state_dict(state)
    assert [ids(resumed.take(4)) for _ in range(6)] == expected


def test_another_problem_set_is_refused_by_name():
    state = ProblemStream(problems(7), seed=3, shuffle=True).state_dict()
    retokenised = [Problem(p.problem_id, p.prompt_ids + 1, p.question, p.grading) for p in problems(7)]
    for changed in (problems(8), problems(7, answer="2"), problems(7)[::-1], retokenised):
        with pytest.raises(UserError, match="data.train: found another problem set"):
            ProblemStream(changed, seed=3, shuffle=True).load_state_dict(state)


def test_more_than_an_epoch_at_once_is_refused():
    with pytest.raises(UserError, match="data.train: found 3 problems, but 4 distinct ones"):
        ProblemStream(problems(3), seed=0, shuffle=True).take(4)
    with pytest.raises(UserError, match="repeated problem ids"):
        ProblemStream(problems(3) * 2, seed=0, shuffle=True)


def test_by_id():
    assert ProblemStream(problems(3), seed=0, shuffle=True).by_id["p2"].question == "q2"
