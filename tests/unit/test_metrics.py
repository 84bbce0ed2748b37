"""Reported quantities against hand-worked numbers; the files that a run leaves, with and without a resume."""

from __future__ import annotations

import importlib.util
import io
import json
import math

import numpy as np
import pytest
from rich.console import Console as RichConsole

from megatron_ac2 import plots
from megatron_ac2.console import Console, phase_times, quantity
from megatron_ac2.metrics import (
    METRICS,
    METRICS_FILE,
    MetricsWriter,
    best_at_k,
    invalid_rate,
    mean_at_k,
    share,
)
from megatron_ac2.plots import load_metrics, moving_mean, plot_runs
from megatron_ac2.types import UserError


def test_mean_at_k_and_its_error_over_problems():
    rewards = np.array([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])  # per problem .25, .75, 0
    mean, error = mean_at_k(rewards)
    assert mean == pytest.approx(1 / 3)
    # sample variance of (.25, .75, 0): deviations -1/12, 5/12, -4/12 -> 42/144 / 2
    assert error == pytest.approx(math.sqrt(42 / 144 / 2 / 3))


def test_more_answers_to_the_same_problems_do_not_shrink_the_error():
    rewards = np.array([[1, 0], [1, 1], [0, 0]])
    assert mean_at_k(np.repeat(rewards, 8, axis=1)) == pytest.approx(mean_at_k(rewards))


def test_one_problem_has_no_error():
    mean, error = mean_at_k(np.array([[1.0, 0.0]]))
    assert mean == 0.5
    assert math.isnan(error)


def test_best_at_k():
    assert best_at_k(np.array([[1, 0], [0, 0], [0.5, 0.2]])) == pytest.approx(0.5)


def test_shares():
    assert share(np.array([[True, False], [False, False]])) == 0.25
    assert invalid_rate([True, True, False, True]) == 0.25
    assert math.isnan(share([]))
    assert math.isnan(invalid_rate([]))


def _write(run_dir, first, last, resume_step=0, **options):
    writer = MetricsWriter(run_dir, 0, total_steps=6, tensorboard=False, resume_step=resume_step, **options)
    for step in range(first, last):
        writer.write(step, {"train/reward": step / 8, "time/step": 1.5})
    writer.close()
    return (run_dir / METRICS_FILE).read_text()


def test_a_resumed_file_equals_that_of_an_uninterrupted_run(tmp_path):
    whole = _write(tmp_path / "whole", 0, 6)
    _write(tmp_path / "cut", 0, 5)  # killed after step 4; its latest checkpoint lets step 3 come next
    with (tmp_path / "cut" / METRICS_FILE).open("a") as file:
        file.write('{"step": 5, "train/rew')  # and in the middle of a row
    assert _write(tmp_path / "cut", 3, 6, resume_step=3) == whole


def test_rows_are_on_disk_at_once(tmp_path):
    writer = MetricsWriter(tmp_path, 0, total_steps=2, tensorboard=False)
    writer.write(0, {"train/reward": np.float32(0.5)})
    assert json.loads((tmp_path / METRICS_FILE).read_text()) == {"step": 0, "train/reward": 0.5}
    writer.close()


def test_a_value_that_is_not_finite_becomes_null(tmp_path):
    writer = MetricsWriter(tmp_path, 0, total_steps=1, tensorboard=False)
    writer.write(0, {"a": math.nan, "b": math.inf})
    writer.close()
    assert (tmp_path / METRICS_FILE).read_text() == '{"step": 0, "a": null, "b": null}\n'


def test_other_ranks_write_nothing(tmp_path):
    writer = MetricsWriter(tmp_path / "run", 1, total_steps=1)
    with writer.phase("sample"):
        writer.write(0, {"train/reward": 1.0})
    writer.say("not seen")
    writer.close()
    assert not (tmp_path / "run").exists()


def test_tensorboard_gets_every_metric(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(tmp_path, 0, total_steps=2)
    for step in range(2):
        writer.write(step, {"train/reward": 0.25 * step})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/reward")] == [(0, 0.0), (1, 0.25)]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_wandb_missing_is_said_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match="run.wandb.*pip install wandb"):
        MetricsWriter(tmp_path, 0, total_steps=1, wandb=True)
    assert not (tmp_path / METRICS_FILE).exists()


STEP = {"train/reward": 0.3125, "perf/decoding_flops": 1.25e12, "time/step": 4.0, "time/sample": 3.0, "time/actor": 0.5}


def test_a_log_gets_one_plain_line_a_step():
    out = io.StringIO()
    console = Console(10, console=RichConsole(file=out, soft_wrap=True, highlight=False))
    console.write(3, STEP)
    console.close()
    assert out.getvalue() == "step 3/10 | reward 0.312 | dec FLOPs 1.25T | time 4.0s (sample 3.0s, actor 0.5s)\n"


def test_a_terminal_gets_a_table_and_the_running_phase():
    out = io.StringIO()
    console = Console(10, console=RichConsole(file=out, force_terminal=True, width=180, soft_wrap=True))
    with console.phase("sample"), console.phase("grade"):
        assert console._progress.tasks[0].description == "grade"
    assert console._progress.tasks[0].description == ""
    console.write(0, STEP)
    console.write(1, STEP)
    console.close()
    assert out.getvalue().count("dec FLOPs") == 1  # the header, once
    assert out.getvalue().count("0.312") == 2


def test_numbers_for_people():
    assert [quantity(x) for x in (0.00123, 12.0, 1234.0, 2e20, math.nan)] == ["0.00123", "12", "1.23k", "2.00e+20", "-"]
    assert phase_times({"time/a": 1.0, "time/b": 2.0, "time/step": 3.0}, num_phases=1) == "b 2.0s"


def test_moving_mean_by_hand():
    assert moving_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [1, 2, 4, 6]


def test_series_skips_rows_without_the_metric(tmp_path):
    rows = [{"step": 0, "evaluation/mean": 0.5}, {"step": 1}, {"step": 2, "evaluation/mean": None}]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps, values = load_metrics(tmp_path).series("evaluation/mean")
    assert (steps.tolist(), values.tolist()) == ([0], [0.5])


@pytest.mark.parametrize("num_runs", [1, 2])
def test_a_picture_of_runs_that_report_different_things(tmp_path, num_runs):
    for run in range(num_runs):
        writer = MetricsWriter(tmp_path / f"run{run}", 0, total_steps=4, tensorboard=False)
        names = list(METRICS) if run == 0 else ["evaluation/mean", "evaluation/decoding_flops", "train/reward"]
        for step in range(4):
            writer.write(step, {name: 0.1 * (step + 1) for name in names} | {"time/sample": 1.0, "time/step": 2.0})
        writer.close()
    out = plot_runs([tmp_path / f"run{run}" for run in range(num_runs)], tmp_path / "pictures" / "curves.png")
    assert out.read_bytes().startswith(b"\x89PNG")
    assert out.stat().st_size > 20_000


def test_a_run_without_metrics_is_named(tmp_path):
    with pytest.raises(UserError, match=METRICS_FILE):
        plot_runs([tmp_path], tmp_path / "curves.png")
    (tmp_path / METRICS_FILE).write_text("")
    with pytest.raises(UserError, match="no rows"):
        load_metrics(tmp_path)


def test_plots_ask_only_for_reported_metrics():
    import ast
    import inspect

    names = {
        node.value
        for node in ast.walk(ast.parse(inspect.getsource(plots)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count("/") == 1
        and node.value.split("/")[0] in {name.split("/")[0] for name in METRICS}
    }  # fmt: skip
    assert names and names <= set(METRICS)
