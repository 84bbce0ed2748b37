from __future__ import annotations

import copy
import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import reasoning_gym
from hypothesis import given, settings
from hypothesis import strategies as st
from reasoning_gym.factory import DATASETS

from megatron_ac2.data.problem_rows import WITHOUT_ANSWER
from megatron_ac2.data.problems import ProblemStream, load_problems
from megatron_ac2.types import Problem, UserError
from tools.quickstart_model import train_tokenizer

ENTRY = {"question": "2 + 2 =", "answer": "4", "metadata": {"expression": "2 + 2"}}
GYM = {"dataset": "chain_sum", "entry": ENTRY}
ROW = {"id": "first", "prompt": "1+1?", "answer": "2"}


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
    for name in ("none.jsonl", "x" * 5000, "a\0b.jsonl"):
        assert "not found" in errors_of(tmp_path / name, tokenizer)[0]
    assert "found no rows" in errors_of(write(tmp_path / "empty.jsonl"), tokenizer)[0]
    assert "accepted: .jsonl or .parquet" in errors_of(write(tmp_path / "p.csv", "a,b"), tokenizer)[0]
    assert "cannot be read as Parquet" in errors_of(write(tmp_path / "p.parquet", "a,b"), tokenizer)[0]
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9", "answer": "1"}\n')
    assert "line 1: not valid JSON" in errors_of(tmp_path / "latin.jsonl", tokenizer)[0]


DEEP = "[" * 100_000 + "]" * 100_000
HOSTILE = {  # a line -> what is said of it
    '{"prompt": "q", "reasoning_gym": {"dataset": ["chain_sum"], "entry": %s}}' % json.dumps(ENTRY): (
        "reasoning_gym.dataset: found ['chain_sum']; accepted: the name of a reasoning-gym data set"
    ),
    '{"prompt": "q", "reasoning_gym": {"dataset": {}, "entry": %s}}' % json.dumps(ENTRY): (
        "reasoning_gym.dataset: found {}; accepted"
    ),
    '{"prompt": "q", "answer": "1", "ignored": %s}' % DEEP: "not valid JSON: nested too deep; accepted: one JSON",
    '{"prompt": "q", "answer": %s}' % DEEP[99_800:100_200]: "answer: found [[[[[[",
    '{"prompt": "q", "reasoning_gym": {"dataset": "chain_sum", "entry": %s}}' % DEEP[99_800:100_200]: (
        "reasoning_gym: nested more than 100 deep; accepted: at most that"
    ),
    '{"prompt": "a\\ud800b", "answer": "1"}': (
        "prompt: found 'a\\ud800b', with half of a surrogate pair at character 2; accepted: text that UTF-8 can hold"
    ),
    '{"prompt": "q", "answer": "\\udfff"}': "answer: found '\\udfff', with half",
    '{"prompt": "q", "rubric": "\\udfff"}': "rubric: found '\\udfff', with half",
    '{"prompt": "q", "answer": "1", "id": "\\ud83d"}': "id: found '\\ud83d', with half",
    '{"prompt": "q", "answer": "1", "id": "a\\nb"}': "id: found 'a\\nb'; accepted: text of one line",
    '{"prompt": "q", "answer": "1", "id": "\\u0000"}': "id: found '\\x00'; accepted: text of one line",
    '{"prompt": "q", "answer": "1", "id": "%s"}' % ("i" * 257): "257 characters; accepted: at most 256",
    '{"prompt": "q", "answer": "1", "id": 7}': "id: found 7; accepted: text, or none",
    '{"prompt": "q", "answer": NaN}': "answer: found nan; accepted: text",
    '{"prompt": "q", "answer": "1", "ignored": %s}' % ("9" * 5000): "not valid JSON: Exceeds the limit",
    '{"prompt": "q", "answer": "1", "prompt": "r"}': "not valid JSON: an object holds 'prompt' twice",
}


@pytest.mark.parametrize(("line", "said"), HOSTILE.items(), ids=[said[:40] for said in HOSTILE.values()])
def test_a_hostile_row_is_named_in_one_line(line, said, tmp_path, tokenizer):
    path = write(tmp_path / "p.jsonl", ROW, line)
    (problem,) = errors_of(path, tokenizer)
    assert problem.startswith(f"{path}: line 2: ") and said in problem and len(problem) < len(path) + 250


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"answer": None}, "reasoning_gym.entry.answer: found nothing; accepted: text, as generated"),
        ({"answer": 4}, "reasoning_gym.entry.answer: found 4; accepted: text"),
        ({"question": None}, "reasoning_gym.entry.question: found nothing; accepted: text"),
        ({"metadata": None}, "reasoning_gym.entry.metadata: found nothing; accepted: an object"),
        ({"metadata": {"x": float("inf")}}, "reasoning_gym: found inf; accepted: finite numbers"),
        ({"metadata": {"\ud800": 1}}, "reasoning_gym: found '\\ud800', with half of a surrogate pair"),
    ],
)
def test_an_entry_that_could_never_be_graded_is_refused(changes, said, tmp_path, tokenizer):
    row = {"prompt": "q", "reasoning_gym": GYM | {"entry": ENTRY | changes}}
    path = write(tmp_path / "p.jsonl", row)
    assert [problem for problem in errors_of(path, tokenizer) if problem.startswith(f"{path}: line 1: {said}")]


def test_entries_of_every_data_set_are_taken_as_they_are_generated(tmp_path, tokenizer):
    """Of five the answer is null: they verify by the metadata. A data set made of others has no verifier."""
    rows, without = [], set()
    for name in sorted(set(DATASETS) - {"composite"}):
        entry = reasoning_gym.create_dataset(name, size=1, seed=1)[0]
        without |= {name} if entry["answer"] is None else set()
        rows.append({"prompt": f"{name}: {entry['question']}", "reasoning_gym": {"dataset": name, "entry": entry}})
    assert without == WITHOUT_ANSWER
    assert len(load_problems(write(tmp_path / "p.jsonl", *rows), tokenizer)) == len(rows) > 90
    rows[0]["reasoning_gym"]["dataset"] = "composite"
    assert "has no verifier of its own" in errors_of(write(tmp_path / "p.jsonl", rows[0]), tokenizer)[0]


def test_what_is_ignored_may_be_what_it_likes(tmp_path, tokenizer):
    """As before, also the ids that are made of a row's hash: checkpoints hold them."""
    text = '{"prompt": "q\\u0000", "answer": "2", "score": NaN, "text": "\\ud800", "deep": [[[1e999]]]}'
    (problem,) = load_problems(write(tmp_path / "p.jsonl", "\ufeff" + text, "  "), tokenizer)
    assert problem.question == "q\0" and problem.problem_id == "9119479fc3f16db3"


def test_a_question_that_the_template_refuses_is_named_by_its_line(tmp_path, tokenizer):
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('no\nb') if 'b' in messages[0].content else messages[0].content }}"
    path = write(tmp_path / "p.jsonl", ROW, {"prompt": "b", "answer": "1"}, {"prompt": "c", "answer": "1"})
    (problem,) = errors_of(path, strict)
    assert problem.startswith(f"{path}: line 2: prompt: tokenizer: its chat template fails: TemplateError: no b")
    strict.chat_template = "{{ '' if messages[0].content == 'c' else messages[0].content }}"
    (problem,) = errors_of(path, strict)
    assert problem == f"{path}: line 3: prompt: found 'c', of which the tokenizer makes no token; accepted: text"
    strict.chat_template = "{% if %}"
    assert all("TemplateSyntaxError" in problem for problem in errors_of(path, strict))


def test_without_a_tokenizer_rows_are_looked_at(tmp_path):
    assert load_problems(write(tmp_path / "p.jsonl", ROW), None) == []
    assert "line 1: not valid JSON" in errors_of(write(tmp_path / "p.jsonl", "{"), None)[0]


def test_files_of_another_kind(tmp_path, tokenizer, monkeypatch):
    path = tmp_path / "p.jsonl"
    path.write_bytes(gzip.compress(json.dumps(ROW).encode()))
    assert errors_of(path, tokenizer) == [
        f"{path}: found gzip's compression; accepted: plain text, so unpack it (gunzip)"
    ]
    path.write_bytes(json.dumps(ROW).encode("utf-16"))
    assert "line 1: not valid JSON: 'utf-8' codec can't decode" in errors_of(path, tokenizer)[0]
    for blank in (b"", b"\n  \n\t\n"):
        path.write_bytes(blank)
        assert errors_of(path, tokenizer) == [f"{path}: found no rows; accepted: at least one problem"]
    path.mkdir() if path.unlink() is None else None
    assert errors_of(path, tokenizer) == [f"{path}: problem file not found"]
    path = Path(write(tmp_path / "closed.jsonl", ROW))

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert errors_of(path, tokenizer) == [f"{path}: cannot be read: [Errno 13] Permission denied"]


def parquet(path, **columns) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet_of_odd_columns(tmp_path, tokenizer):
    path, two = tmp_path / "p.parquet", ["1", "2"]
    times = pyarrow.array([2**62, 1], pyarrow.timestamp("us"))  # the first is none that Python can hold
    assert len(load_problems(parquet(path, prompt=two, answer=two, when=times), tokenizer)) == 2
    text = pyarrow.array(["1", "2"]).dictionary_encode()
    assert [p.question for p in load_problems(parquet(path, prompt=text, answer=text), tokenizer)] == two
    for column, said in (
        ([b"1", b"2"], "row 1: prompt: found b'1'; accepted: text"),
        ([["1"], ["2"]], "row 1: prompt: found ['1']; accepted: text"),
        (times, "row 1: cannot be read: "),
        (pyarrow.array([b"\xff", b"2"]).view(pyarrow.string()), "row 1: cannot be read: 'utf-8' codec can't decode"),
    ):
        assert errors_of(parquet(path, prompt=column, answer=two), tokenizer)[0].startswith(f"{path}: {said}")
    (problem,) = errors_of(parquet(path, question=two, answer=two), tokenizer)
    assert problem == f"{path}: found the columns ['question', 'answer']; accepted: with a \"prompt\""
    gym = parquet(path, prompt=two, reasoning_gym=["{", DEEP])
    assert [problem.split(": ", 3)[3] for problem in errors_of(gym, tokenizer)] == [
        "not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); accepted: an "
        "object, or its JSON text",
        "not valid JSON: nested too deep; accepted: an object, or its JSON text",
    ]
    table = pyarrow.Table.from_arrays([pyarrow.array(two)] * 3, ["prompt", "answer", "prompt"])
    pyarrow.parquet.write_table(table, path)
    assert errors_of(path, tokenizer) == [f"{path}: found the column 'prompt' twice; accepted: once"]
    content = parquet(path, prompt=two, answer=two).read_bytes()
    for damaged in (b"", content[:50], content[:-9], content[:4] + b"\0" * 60 + content[64:]):
        path.write_bytes(damaged)
        assert errors_of(path, tokenizer)[0].startswith(f"{path}: cannot be read as Parquet: ")


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
