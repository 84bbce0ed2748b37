"""A memory plan for a person: tables on a terminal, plain lines in a log."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_ac2.memory.advice import Change, changes, together
from megatron_ac2.memory.question import Question
from megatron_ac2.memory.result import CARDS, Item, MemoryPlan, Stage, total
from megatron_ac2.perf import gib

_SHOWN = 3  # single changes


def show(question: Question, plan: MemoryPlan, console: Console) -> None:
    console.print(_heading(question), markup=False)
    _table(console, f"stage {plan.worst.index}, the fullest of {len(plan.stages)}", ["", "a GPU", "how known"],
           list(_rows(plan.worst)))  # fmt: skip
    if len(plan.stages) > 1:
        rows = [(str(s.index), gib(s.resident_bytes), gib(s.peak_bytes), s.worst_phase) for s in plan.stages]
        _table(console, "pipeline stages, without the engine", ["stage", "resident", "peak", "in"], rows)
    engine = plan.engine
    cache = f"{engine.block_bytes / engine.block_size / 1024:.0f} KiB a token"
    keeps = "also while the trainer works" if plan.offload == "none" else "and sleeps while the trainer works"
    console.print(f"engine: weights {gib(engine.weights)}, workspace about {gib(engine.workspace)}, cache {cache}; "
                  f"it takes {plan.utilization:.0%} of a card, {keeps}", markup=False)  # fmt: skip
    rows = [_card_row(plan, name, card) for name, card in CARDS.items()]
    _table(console, "cards", ["card", "usable", "trainer", "engine", "cached tokens", "left"], rows)
    for line in advice(question, plan):
        console.print(line, markup=False)
    for note in plan.notes:
        console.print(f"note: {note}", markup=False)


def _heading(question: Question) -> str:
    config, parallel = question.config, question.config.parallel
    cut = [f"tensor {parallel.tensor}", f"pipeline {parallel.pipeline}"]
    cut += [f"{name} {degree}" for name in ("virtual_pipeline", "context", "expert")
            if (degree := getattr(parallel, name, None) or 1) > 1]  # fmt: skip
    cut += ["sequence"] if parallel.sequence else []
    return f"{config.model.path}, {config.model.dtype}, {question.num_gpus} GPU(s): {', '.join(cut)}"


def _rows(stage: Stage) -> Iterator[tuple[str, ...]]:
    yield from map(_row, stage.resident)
    yield "resident", gib(stage.resident_bytes), ""
    for name, items in stage.phases.items():
        yield f"{name}, besides", gib(total(items)), ""
        yield from (_row(item, "  ") for item in items)
    yield f"peak, in {stage.worst_phase}", gib(stage.peak_bytes), ""


def _row(item: Item, indent: str = "") -> tuple[str, ...]:
    return indent + item.name, gib(item.num_bytes), item.basis


def _card_row(plan: MemoryPlan, name: str, card: int) -> tuple[str, ...]:
    left = plan.spare(card)
    tokens = plan.cached_tokens(card)
    cached = f"{tokens:,}" + (f", too few for one request of {plan.longest:,}" if tokens < plan.longest else "")
    verdict = gib(left) if left >= 0 else f"missing {gib(-left)}"
    return name, gib(card), gib(plan.worst.peak_bytes), gib(plan.engine_bytes(card)), cached, verdict


def advice(question: Question, plan: MemoryPlan) -> Iterator[str]:
    """For each card that the plan does not fit on."""
    for name, card in CARDS.items():
        if plan.problem(card) is None:
            continue
        single = changes(question, card)
        yield f"for {name}, what helps most:"
        yield from (f"  {_change_text(change)}" for change in single[:_SHOWN])
        taken = None if single and single[0].fits else together(question, card)
        if taken:
            yield f"  fits with: {' '.join(change.overrides for change in taken)}"
        elif not (single and single[0].fits):
            yield "  no few changes of layout and memory suffice; more GPUs or a smaller model do"


def _change_text(change: Change) -> str:
    return f"{change.overrides}: {gib(change.gain)} a GPU{', and it fits' if change.fits else ''}"


def _table(console: Console, title: str, columns: list[str], rows: list[tuple[str, ...]]) -> None:
    if console.is_terminal:
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    console.print(f"{title}:", markup=False)
    for row in [tuple(columns), *rows]:
        first, *rest = (cell.ljust(width) if number == 0 else cell.rjust(width)
                        for number, (cell, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        console.print("  ".join([first, *rest]).rstrip(), markup=False)
