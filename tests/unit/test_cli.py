"""The command of that name, and that every file is as the formatter and the linter want it."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megatron_ac2 import cli

ROOT = Path(__file__).resolve().parents[2]


def test_every_command_is_a_module_and_is_listed(capsys):
    assert cli.main([]) == 0
    listed = capsys.readouterr().out
    for name in cli.COMMANDS:
        module = ROOT / "megatron_ac2" / name
        assert f"\n  {name} " in listed
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()


def test_a_command_is_run_as_its_module_is(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--help"])
    assert ended.value.code == 0 and "Preflight in seconds" in capsys.readouterr().out


def test_an_unknown_command_is_named_with_those_that_are_known(capsys):
    assert cli.main(["trian"]) == 2
    assert "found 'trian', accepted: train, sft, doctor" in capsys.readouterr().err


def test_the_script_is_installed():
    (script,) = (script for script in metadata.entry_points(group="console_scripts") if script.name == "megatron-ac2")
    assert script.load() is cli.main


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_every_file_is_in_style(command):
    """What `make check` does."""
    run = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
