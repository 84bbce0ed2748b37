"""Write all that the quickstart needs into one folder: tokenizer, base model, problems, worked solutions.

The task is reasoning-gym's `chain_sum`: twelve one-digit terms, answered by a list of running values, one line a term:

    +4=+04
    -7=-03
    ...
    Answer: -03

Every line is six tokens long, which a tiny model learns to align with the problem in seconds. Some worked solutions
are wrong on purpose: a fixed, hashed share of the facts (last digit of the value, sign, digit) comes out one too high
nearly half of the time, and every error is carried on. A model fitted to them knows the format and both answers to a
hard fact, and passes rarely: it leaves reinforcement learning something to find. Errors only ever go up, so they never
cancel: the final answer is right exactly when every running value is.

That holds for a model only as far as it fitted them: its own slips go both ways, and where they are many, most answers
that pass do so by luck and no critic can tell a good state. --learnable: sums that never fall below 0, and flaws that
hang on the term (sign, digit) alone. Half a million parameters fit those in two minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

import reasoning_gym

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.quickstart_model import TURN_WORDS, train_tokenizer, write_base_model  # noqa: E402

TASK = "chain_sum"


@dataclass(frozen=True)
class Flaw:
    """How demonstrations go wrong: `hard_share` of the facts fail with `hard_error`, all others with `base_error`.

    A fact is the value's last digit with the term, or, `by_term`, the term alone.
    """

    hard_share: float = 0.40
    hard_error: float = 0.45
    base_error: float = 0.005
    by_term: bool = False
    seed: int = 0

    def error_rate(self, value: int, sign: str, digit: int) -> float:
        fact = f"{sign}{digit}" if self.by_term else f"{value % 10}{sign}{digit}"
        hard = _unit_hash(f"{self.seed}:{fact}") < self.hard_share
        return self.hard_error if hard else self.base_error


@cache
def _unit_hash(text: str) -> float:
    """A number in [0, 1) that depends on the text alone (Python's own `hash` differs between processes)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def parse_expression(expression: str) -> list[tuple[str, int]]:
    """`4 + 1 - 7` -> [("+", 4), ("+", 1), ("-", 7)]."""
    words = ["+", *expression.split()]
    return [(sign, int(digit)) for sign, digit in zip(words[::2], words[1::2], strict=True)]


def work(entry: dict, flaw: Flaw | None = None, rng: random.Random | None = None) -> dict:
    """The worked solution of one entry, with step labels; without `flaw` it is right throughout.

    `step_ends[i]` is the character offset in `response` after step i (the answer line is the last step), and
    `step_correct[i]` is 1 when every running value up to there is right.
    """
    value, true_value, response = 0, 0, ""
    step_ends: list[int] = []
    step_correct: list[int] = []
    for index, (sign, digit) in enumerate(parse_expression(entry["metadata"]["expression"])):
        delta = digit if sign == "+" else -digit
        is_wrong = index > 0 and flaw is not None and rng.random() < flaw.error_rate(value, sign, digit)
        value, true_value = value + delta + is_wrong, true_value + delta
        response += f"{sign}{digit}={value:+03d}\n"
        step_ends.append(len(response))
        step_correct.append(int(value == true_value))
    response += f"Answer: {value:+03d}"
    return {
        "prompt": entry["question"],
        "response": response,
        "step_ends": [*step_ends, len(response)],
        "step_correct": [*step_correct, int(value == true_value)],
        "correct": int(value == true_value),
    }


def draw_entries(num: int, seed: int, num_terms: int, non_negative: bool = False) -> list[dict]:
    """`num` chain_sum entries with distinct questions, the same for the same seed; their running values never negative
    if so asked.

    reasoning-gym seeds entry i with `seed + i`: one long data set, cut into parts, is disjoint where two are not.
    """
    options = dict(min_terms=num_terms, max_terms=num_terms, min_digits=1, max_digits=1)
    size = (12 if non_negative else 2) * num + 100
    dataset = reasoning_gym.create_dataset(TASK, seed=seed * 10_000_019, size=size, **options)
    distinct: dict[str, dict] = {}
    for index in range(size):
        entry = dataset[index]
        if non_negative and min(running_values(entry)) < 0:
            continue
        distinct.setdefault(entry["question"], entry)
        if len(distinct) == num:
            return list(distinct.values())
    raise SystemExit(f"--terms {num_terms}: only {len(distinct)} distinct problems found, {num} wanted; use more terms")


def running_values(entry: dict) -> list[int]:
    terms = parse_expression(entry["metadata"]["expression"])
    return list(accumulate(digit if sign == "+" else -digit for sign, digit in terms))


def problem_row(name: str, entry: dict) -> dict:
    return {"id": name, "prompt": entry["question"], "reasoning_gym": {"dataset": TASK, "entry": entry}}


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def worked_rows(entries: list[dict], flaw: Flaw, reference_share: float = 0.9) -> Iterator[dict]:
    """Most rows also hold a right solution: a critic warmed up on them learns to read one, and to do without."""
    rng = random.Random(f"worked {flaw.seed}")
    for entry in entries:
        row = work(entry, flaw, rng)
        if rng.random() < reference_share:
            row["reference"] = work(entry)["response"]
        yield row


def prepare(
    out: Path, seed: int, num_terms: int, num_train: int, num_validation: int, num_worked: int,
    learnable: bool = False, **size: int,
) -> dict:  # fmt: skip
    """Write everything into `out`; returns what was written, in numbers. `size`: what `base_config` takes."""
    out.mkdir(parents=True, exist_ok=True)
    entries = draw_entries(num_train + num_validation + num_worked, seed, num_terms, learnable)
    train, entries = entries[:num_train], entries[num_train:]
    validation, demonstrated = entries[:num_validation], entries[num_validation:]
    worked = list(worked_rows(demonstrated, Flaw(seed=seed, by_term=learnable)))
    write_rows(out / "train.jsonl", (problem_row(f"train-{i}", entry) for i, entry in enumerate(train)))
    write_rows(out / "validation.jsonl", (problem_row(f"validation-{i}", e) for i, e in enumerate(validation)))
    write_rows(out / "worked.jsonl", worked)

    texts = [text for row in worked[:2000] for text in (row["prompt"], row["response"], TURN_WORDS)]
    tokenizer = train_tokenizer(texts)
    tokenizer.save_pretrained(out / "tokenizer")
    model = write_base_model(out / "base", tokenizer, seed, **size)
    return {
        "vocabulary": len(tokenizer),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "correct share of worked": sum(row["correct"] for row in worked) / len(worked),
        "longest response (tokens)": max(len(tokenizer.encode(row["response"])) for row in worked[:2000]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart/inputs"), help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--terms", type=int, default=12, help="terms of a sum")
    parser.add_argument(
        "--learnable", action="store_true", help="sums and flaws that a tiny model fits well, see above"
    )
    parser.add_argument("--num-train", type=int, default=512)
    parser.add_argument("--num-validation", type=int, default=256)
    parser.add_argument("--num-worked", type=int, default=30_000)
    parser.add_argument("--hidden-size", type=int, default=96, help="of the base model, whose heads stay 4 of 32")
    parser.add_argument("--layers", type=int, default=4, help="of the base model")
    args = parser.parse_args()
    for name in ("terms", "num_train", "num_validation", "num_worked", "hidden_size", "layers"):
        if getattr(args, name) < (2 if name == "terms" else 1):
            option = "--" + name.replace("_", "-")
            parser.error(f"{option}: found {getattr(args, name)}, accepted: 1 or more (--terms: 2 or more)")
    numbers = (args.seed, args.terms, args.num_train, args.num_validation, args.num_worked, args.learnable)
    summary = prepare(args.out, *numbers, hidden_size=args.hidden_size, num_layers=args.layers)
    print(f"wrote {args.out}: " + ", ".join(f"{name} {value:.4g}" for name, value in summary.items()))


if __name__ == "__main__":
    main()
