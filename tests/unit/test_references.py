from __future__ import annotations

from collections import Counter

import numpy as np

from megatron_ac2.algorithm.references import ReferenceBank


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_added_once_and_never_replaced() -> None:
    bank = ReferenceBank()
    assert bank.get("a") is None
    assert bank.add({"a": [ids(1, 2)]}, rng()) == ["a"]
    assert bank.add({"a": [ids(9)], "b": [ids(3)]}, rng()) == ["b"]
    assert bank.get("a").tolist() == [1, 2]
    assert bank.problem_ids() == {"a", "b"} and len(bank) == 2


def test_problem_ids_is_a_snapshot() -> None:
    bank = ReferenceBank()
    before = bank.problem_ids()
    bank.add({"a": [ids(1)]}, rng())
    assert before == frozenset()


def test_one_of_the_candidates_at_random() -> None:
    picks = Counter()
    for seed in range(600):
        bank = ReferenceBank()
        bank.add({"a": [ids(0), ids(1), ids(2)]}, rng(seed))
        picks.update(bank.get("a").tolist())
    assert all(140 < picks[n] < 260 for n in range(3))  # 200 each expected, standard deviation 11.5


def test_draws_do_not_depend_on_the_order_of_the_mapping() -> None:
    candidates = {name: [ids(n) for n in range(10)] for name in "abcdefgh"}
    forward, backward = ReferenceBank(), ReferenceBank()
    forward.add(candidates, rng(5))
    backward.add(dict(reversed(candidates.items())), rng(5))
    assert all(forward.get(name).tolist() == backward.get(name).tolist() for name in candidates)
    assert len({int(forward.get(name)[0]) for name in candidates}) > 1


def test_no_candidate_adds_nothing() -> None:
    bank = ReferenceBank()
    assert bank.add({"a": []}, rng()) == [] and bank.add({}, rng()) == []
    assert bank.get("a") is None


def test_bank_owns_its_solutions() -> None:
    bank, solution = ReferenceBank(), ids(1, 2)
    bank.add({"a": [solution]}, rng())
    solution[:] = 7
    assert bank.get("a").tolist() == [1, 2]


def test_state_round_trip() -> None:
    for candidates in ({}, {"b": [ids(1, 2, 3)], "a": [ids(4)], "c": [ids(5, 6)]}):
        bank, loaded = ReferenceBank(), ReferenceBank()
        bank.add(candidates, rng())
        loaded.add({"old": [ids(1)]}, rng())
        loaded.load_state_dict(bank.state_dict())
        assert loaded.problem_ids() == candidates.keys()
        assert all(loaded.get(name).tolist() == own[0].tolist() for name, own in candidates.items())
        assert all(loaded.get(name).dtype == np.int32 for name in candidates)
