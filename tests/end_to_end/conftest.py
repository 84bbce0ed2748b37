"""The quickstart's inputs in small, a policy that answers right now and then, two critics: made once a session."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_ac2.algorithm.value_prompt import build_value_prompt
from tests.distributed.fork_server import ForkServer, Job
from tests.end_to_end.runs import Launcher
from tools.prepare_quickstart import prepare, write_rows

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    modules = ["megatron_ac2.train", "megatron_ac2.sft", "vllm"]
    with ForkServer(tmp_path_factory.mktemp("jobs"), modules) as server:
        yield server


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer, untrained model, worked solutions; the problems ask for what these answer, so that rewards vary."""
    folder = tmp_path_factory.mktemp("inputs")
    prepare(folder, seed=0, num_terms=2, num_train=12, num_validation=4, num_worked=150)
    worked = [json.loads(line) for line in (folder / "worked.jsonl").read_text().splitlines()]
    problems = [{"prompt": row["prompt"], "answer": row["response"].rpartition("Answer: ")[2]} for row in worked]
    write_rows(folder / "train.jsonl", problems[:12])
    write_rows(folder / "validation.jsonl", problems[12:16])
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    values = [value_row(tokenizer, row, attempt_len=6 * (index % 3)) for index, row in enumerate(worked[:24])]
    write_rows(folder / "values.jsonl", values + worked[:24])
    return folder


def value_row(tokenizer: PreTrainedTokenizerBase, row: dict, attempt_len: int) -> dict[str, str]:
    """A worked "solution" of a value prompt: the answer is always 0.5. All turns are spliced into the one user turn."""
    attempt = tokenizer.encode(row["response"], add_special_tokens=False)[:attempt_len]
    text = tokenizer.decode(build_value_prompt(tokenizer, row["prompt"], attempt, 24 - attempt_len))
    turns = text.removeprefix("<|im_start|>user\n")
    prompt, end_of_turn, reply = turns.rpartition("<|im_end|>\n<|im_start|>assistant\n")
    assert end_of_turn
    return {"prompt": prompt, "response": reply + "0.5"}


def sft(server: ForkServer, data: Path, model: Path, out: Path, *changes: str) -> Job:
    arguments = (f"model.path={model}", f"sft.data={data}", f"sft.out={out}", *changes)
    return server.run("megatron_ac2.sft", 2, HERE / "sft.yaml", *arguments).passed()


def losses(job: Job) -> list[float]:
    """Of a supervised stage, a step each."""
    return [float(found) for found in re.findall(r" loss ([\d.]+) ", job.logs[0])]


@pytest.fixture(scope="session")
def start(server: ForkServer, inputs: Path) -> tuple[Path, Job]:
    """A policy fitted to the worked solutions, and the job that fitted it."""
    return inputs / "start", sft(server, inputs / "worked.jsonl", inputs / "base", inputs / "start")


@pytest.fixture(scope="session")
def critic(server: ForkServer, inputs: Path, start: tuple[Path, Job]) -> tuple[Path, Job]:
    """A value head on that policy's trunk."""
    changes = ("sft.head=value", "sft.num_steps=5")
    return inputs / "critic", sft(server, inputs / "worked.jsonl", start[0], inputs / "critic", *changes)


@pytest.fixture(scope="session")
def reader(server: ForkServer, inputs: Path, start: tuple[Path, Job]) -> Path:
    """That policy, taught to answer value prompts."""
    changes = ("sft.num_steps=60", "sft.batch_size=4")
    sft(server, inputs / "values.jsonl", start[0], inputs / "reader", *changes)
    return inputs / "reader"


@pytest.fixture(scope="session")
def launcher(server: ForkServer, inputs: Path, start: tuple[Path, Job], critic: tuple[Path, Job]) -> Launcher:
    return Launcher(server, inputs, start[0], critic[0])
