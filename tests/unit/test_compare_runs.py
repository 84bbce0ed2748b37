from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from megatron_ac2.comparison import Estimate, RunSummary, by_variant, summarize_run, to_results, to_table
from megatron_ac2.comparison_plot import plot_comparison
from megatron_ac2.experiment import Experiment, Stage, check_jobs, jobs_of, load_experiment, unfinished
from megatron_ac2.types import UserError
from tools.compare_runs import prepare, report

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "examples").rglob("experiment.yaml"))
BASE = "{model: {path: m}, data: {train: t.jsonl}, run: {num_steps: 4}, sampling: {routing: grpo}}"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def experiment_of(tmp_path: Path, base: Path, **changes: object) -> Experiment:
    fields = dict(out=str(tmp_path / "out"), base=str(base), seeds=[0, 1],
                  variants={"plain": [], "low rate": ["actor.optimizer.lr=1e-7"]})  # fmt: skip
    return Experiment(**fields | changes)


def write_metrics(folder: Path, scores: list[float], tokens_per_step: int = 100, k3: float = 0.01) -> None:
    """A run of 4 steps, evaluated before steps 0 and 2 and after the last."""
    rows = [
        {
            "step": step, "perf/generated_tokens": (step + 1) * tokens_per_step, "mismatch/kl_k3": k3 * step,
            "mismatch/ratio_above_2": 0.1, "mismatch/ratio_below_half": 0.2, "mismatch/ess": 0.9,
        }
        for step in range(4)
    ]  # fmt: skip
    rows[0]["evaluation/mean"], rows[2]["evaluation/mean"] = scores[:2]
    rows.append({"step": 4, "evaluation/mean": scores[2]})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_by_hand(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0.2, 0.4, 0.8])
    run = summarize_run(tmp_path, "s", "v", 3)
    # Step s's row counts its own tokens: before step 2 two steps had sampled, after the last all four.
    assert run.tokens == [0.0, 200.0, 400.0] and run.score == [0.2, 0.4, 0.8] and run.final == 0.8
    assert run.area == pytest.approx((200 * 0.3 + 200 * 0.6) / 400)  # trapezoids
    assert run.kl_k3 == pytest.approx(0.01 * (0 + 1 + 2 + 3) / 4)
    assert (run.ratio_above_2, run.ratio_below_half, run.ess) == pytest.approx((0.1, 0.2, 0.9))
    assert (run.setting, run.variant, run.seed) == ("s", "v", 3)


def test_a_run_without_a_later_evaluation_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "evaluation/mean": 0.5}\n')
    with pytest.raises(UserError, match=r"found 1 evaluation\(s\)"):
        summarize_run(tmp_path, "", "v", 0)


def test_means_and_standard_errors_by_hand() -> None:
    estimate = Estimate.of([0.1, 0.2, 0.6])  # mean .3; deviations -.2 -.1 .3: variance .14 / 2, / 3 seeds
    assert estimate.mean == pytest.approx(0.3) and estimate.error == pytest.approx(math.sqrt(0.07 / 3))
    assert str(Estimate.of([0.5])) == "0.500" and math.isnan(Estimate.of([0.5]).error)


def summaries(finals: dict[tuple[str, str], list[float]]) -> list[RunSummary]:
    return [
        RunSummary(setting, variant, seed, [0.0, 1000.0], [0.1, final], (0.1 + final) / 2, 0.002, 0.01, 0.02, 0.95)
        for (setting, variant), values in finals.items()
        for seed, final in enumerate(values)
    ]


def test_the_table_and_the_results_by_hand() -> None:
    runs = summaries({("fp8", "plain"): [0.3, 0.5], ("fp8", "tis"): [0.6]})
    lines = to_table("engine", runs).splitlines()
    assert lines[0].startswith("| engine | variant | seeds | final score |") and len(lines) == 4
    # (.3 + .5) / 2; deviations of .1: variance .02, / 2 seeds, its root .1
    assert lines[2] == "| fp8 | plain | 2 | 0.400 ± 0.100 | 0.250 ± 0.050 | 0.002 | 1.00% | 2.00% | 0.950 | 1k |"
    assert lines[3].startswith("| fp8 | tis | 1 | 0.600 | 0.350 |")
    assert to_table("", runs).splitlines()[2].startswith("| plain | 2 |")
    results = to_results("title", "engine", runs)
    plain, tis = results["variants"]
    assert plain["final"] == {"mean": pytest.approx(0.4), "error": pytest.approx(0.1)} and plain["seeds"] == [0, 1]
    assert tis["final"] == {"mean": 0.6, "error": None} and len(results["runs"]) == 3
    json.dumps(results, allow_nan=False)


def test_a_curve_is_the_mean_over_seeds() -> None:
    (group,) = by_variant(
        [
            RunSummary("", "v", 1, [0.0, 100.0, 200.0], [0.0, 0.2, 0.9], 0, 0, 0, 0, 1),
            RunSummary("", "v", 0, [0.0, 140.0], [0.2, 0.6], 0, 0, 0, 0, 1),
        ]
    )
    tokens, score, error = group.curve()
    assert tokens.tolist() == [0, 120] and score.tolist() == pytest.approx([0.1, 0.4])
    assert error.tolist() == pytest.approx([0.1, 0.2])
    assert [run.seed for run in group.runs] == [0, 1]


def test_jobs_are_training_command_lines(tmp_path: Path, base: Path) -> None:
    settings = {"lag 0": [], "lag 4": ["engine.publish_every=2"]}
    jobs = jobs_of(experiment_of(tmp_path, base, common=["run.tensorboard=false"], axis="lag", settings=settings))
    assert len(jobs) == 2 * 2 * 2 and len({job.folder for job in jobs}) == 8
    assert [job.seed for job in jobs] == [0] * 4 + [1] * 4
    job = next(job for job in jobs if job.name == "lag 4 / low rate / seed 1")
    assert job.folder == tmp_path / "out" / "lag_4" / "low_rate" / "seed1"
    assert job.arguments[:4] == (
        str(base),
        "run.tensorboard=false",
        "engine.publish_every=2",
        "actor.optimizer.lr=1e-7",
    )
    config = job.config()
    assert config.run.seed == 1 and config.run.dir == str(job.folder) and config.actor.optimizer.lr == 1e-7
    assert config.engine.publish_every == 2 and not config.run.tensorboard


def test_every_mistake_of_every_job_is_reported_at_once(tmp_path: Path, base: Path) -> None:
    variants = {"a": ["actor.loss=no_such"], "b": ["no.such=1"], "c": [], "c!": [], "c?": []}
    with pytest.raises(UserError) as caught:
        check_jobs(jobs_of(experiment_of(tmp_path, base, seeds=[0], variants=variants)))
    text = "\n".join(caught.value.problems)
    for part in ("a / seed 0: actor.loss: found 'no_such'", "b / seed 0: no", "two jobs have one folder"):
        assert part in text


def test_finished_jobs_are_skipped_and_changed_ones_refused(tmp_path: Path, base: Path) -> None:
    experiment = experiment_of(tmp_path, base)
    configs = check_jobs(jobs_of(experiment))
    jobs = list(configs)
    assert unfinished(configs, fresh=False) == jobs
    write_metrics(jobs[0].folder, [0.1, 0.2, 0.3])
    for job in jobs[:2]:
        job.record()
    assert jobs[0].num_rows() == 5 and jobs[1].num_rows() == 0
    assert unfinished(configs, fresh=False) == jobs[1:]

    half = (jobs[0].folder / "metrics.jsonl").read_text().splitlines(keepends=True)[:3]
    (jobs[1].folder / "metrics.jsonl").write_text("".join(half))
    assert unfinished(configs, fresh=False) == jobs[1:]  # it goes on from there

    changed = check_jobs(jobs_of(experiment_of(tmp_path, base, common=["actor.optimizer.lr=1e-3"])))
    with pytest.raises(UserError) as caught:
        unfinished(changed, fresh=False)
    assert len(caught.value.problems) == 1 and str(jobs[0].folder) in caught.value.problems[0]  # lr is low rate's own
    assert (jobs[0].folder / "metrics.jsonl").exists()
    assert len(unfinished(changed, fresh=True)) == 4 and not jobs[0].folder.exists()


def test_the_report_of_finished_jobs(tmp_path: Path, base: Path) -> None:
    experiment = experiment_of(tmp_path, base, title="a title", picture=str(tmp_path / "images" / "p.png"))
    jobs = jobs_of(experiment)
    for job, final in zip(jobs, (0.4, 0.8, 0.6, 0.8), strict=True):  # seed 0: plain, low rate; seed 1: the same
        write_metrics(job.folder, [0.2, 0.3, final])
    console = Console(file=io.StringIO(), width=300)
    report(experiment, jobs, console)
    table = (tmp_path / "out" / "results.md").read_text()
    assert "| plain | 2 | 0.500 ± 0.100 |" in table and "| low rate | 2 | 0.800 ± 0.000 |" in table
    assert table in console.file.getvalue()
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["variant"] for row in results["variants"]] == ["plain", "low rate"]
    assert (tmp_path / "images" / "p.png").stat().st_size > 5000


def test_a_picture_of_settings_that_lack_a_variant(tmp_path: Path) -> None:
    runs = summaries({("a", "plain"): [0.1, 0.2, 0.3], ("a", "tis"): [0.4], ("b", "tis"): [0.5, 0.6]})
    assert plot_comparison(runs, tmp_path / "p.svg", "title", "lag").read_text().count("plain") >= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{base: b.yaml, out: o, variants: {a: []}, seed: [0]}", "seed"),
        ("{base: b.yaml, out: o, variants: {a: []}, seeds: []}", "seeds: found none"),
        ("{base: b.yaml, out: o}", "variants: found none"),
        ("{base: b.yaml, out: o, variants: {a: []}, axis: lag}", "one without the other"),
        ("{out: o, variants: {a: []}}", "base"),
        ("{base: b.yaml, out: o, variants: {a: 3}}", "a"),
        ("title: [", "line 2, column 1: "),
        ("- 1", "incompatible container types"),
        ("title: ${nope}", "'nope' not found"),
    ],
)
def test_a_bad_experiment_file_is_named_with_its_mistake(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_experiment(path)


def test_a_missing_experiment_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not found"):
        load_experiment(tmp_path / "experiment.yaml")


def test_preparation_runs_once_and_its_failure_is_an_error(tmp_path: Path) -> None:
    made = tmp_path / "made"
    stage = Stage(output=str(made), run=f"-c \"open('{made}', 'a').write('x')\"")
    console = Console(file=io.StringIO())
    for _ in range(2):
        prepare([stage], console)
    assert made.read_text() == "x"
    with pytest.raises(UserError, match="exit status 3"):
        prepare([Stage(output=str(tmp_path / "other"), run='-c "exit(3)"')], console)
    with pytest.raises(UserError, match="not written by"):
        prepare([Stage(output=str(tmp_path / "other"), run='-c "exit(0)"')], console)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_every_job_of_every_shipped_experiment_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    experiment = load_experiment(path)
    configs = check_jobs(jobs_of(experiment))
    assert len(experiment.seeds) >= 3 and len(configs) >= 3 * len(experiment.variants)
    assert all(config.run.dir.startswith(experiment.out) for config in configs.values())


def test_both_experiments_are_shipped() -> None:
    assert {path.parent.name for path in SHIPPED} >= {"mismatch", "staleness"}
