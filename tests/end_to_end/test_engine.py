"""The engine against Transformers, in one process and over two ranks; see engine_cases.py and engine_ranks.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.fork_server import ForkServer
from tests.distributed.launch import ROOT

HERE = Path(__file__).parent
CASES = re.findall(r"^def case_(\w+)", (HERE / "engine_cases.py").read_text(), re.MULTILINE) + [
    "needs_a_process_group",
    "bad_options_are_named",
    "building_leaves_global_state_alone",
    "sampling_leaves_global_state_alone",
    "loading_leaves_global_state_alone",
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[str, str]:
    """Of a process of its own: what vLLM does to a process is part of the cases."""
    folder = tmp_path_factory.mktemp("engine")
    command = [sys.executable, str(HERE / "engine_cases.py"), str(folder)]
    # Not environment(): the cases also hold without the variables that it sets.
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=False)
    result = folder / "verdicts.json"
    assert result.is_file(), f"the cases did not run to the end:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    report = json.loads(result.read_text())
    print(json.dumps({name: text for name, text in report["details"].items() if text}, indent=1))
    assert "Loading safetensors" not in done.stdout + done.stderr, "vLLM's own output came through"
    return report["verdicts"]


@pytest.mark.parametrize("case", CASES)
def test_one_engine(verdicts, case):
    assert verdicts[case] == "passed", verdicts[case]


@pytest.mark.parametrize("family", ["qwen2_untied", "llama3", "qwen3_moe"])
def test_other_families(server: ForkServer, tmp_path: Path, family: str):
    """Published from Megatron and verified on the way, biases of q, k and v too: the engine computes that model."""
    server.run(HERE / "engine_families.py", 1, family, tmp_path, timeout=600).passed()


def test_replayed_routers_agree_with_the_engines_in_half_precision(server: ForkServer, tmp_path: Path):
    """Where bf16 ends a near-tie otherwise in the trainer; see engine_routing.py."""
    server.run(HERE / "engine_routing.py", 1, tmp_path, timeout=600).passed()


@pytest.mark.parametrize("layout", ["replicas", "tensor_parallel"])
def test_two_ranks(server: ForkServer, tmp_path: Path, layout: str):
    """Two replicas share the work; or one replica lies over both ranks. Either way both ranks get the same list."""
    segments = set(os.listdir("/dev/shm"))
    server.run(HERE / "engine_ranks.py", 2, layout, tmp_path, timeout=600).passed()
    assert not [name for name in set(os.listdir("/dev/shm")) - segments if "cpushm" in name]
