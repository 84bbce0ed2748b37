"""One job of two ranks: optimizers against torch AdamW, checkpoints saved and loaded under other layouts.

usage: torchrun ... checkpoint_cases.py UNTIED_DIR TIED_DIR SCRATCH_DIR
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from megatron_ac2.config_training import OptimizerConfig, ParallelConfig
from megatron_ac2.model.build import build_model, load_hf_config
from megatron_ac2.model.checkpoint import latest, load_checkpoint, save_checkpoint
from megatron_ac2.model.data_parallel import wrap_ddp
from megatron_ac2.model.hf_weights import export_hf_weights, load_hf_weights
from megatron_ac2.parallel.context import length_multiple
from megatron_ac2.parallel.topology import init_topology
from megatron_ac2.training.context_parallel import held_part
from megatron_ac2.training.optimizer import SharedWeightsOptimizer
from megatron_ac2.training.step import forward_backward, forward_only
from megatron_ac2.types import PackedBatch, UserError
from tests.distributed.groups import leave_groups, run_cases
from tests.distributed.tiny_families import split_experts

VOCAB = 250
LENGTHS = (8, 12, 6, 16)  # one sequence a microbatch; even, for sequence parallel
TP2, TP2_SP, PP2, DP2 = (2, 1, False), (2, 1, True), (1, 2, False), (1, 1, False)
CP2, VPP2 = ParallelConfig(context=2), ParallelConfig(pipeline=2, virtual_pipeline=2)
ORDER = ("actor", "critic", "actor", "actor", "critic")
IDENTITY = {"model": "tiny", "tokenizer": "abc"}
# eps as large as small gradients: AdamW turns rounding of a gradient near zero into a whole step.
ROLES = {
    "actor": {"lr": 2e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-3, "grad_clip": 0.5},
    "critic": {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.8, 0.999), "eps": 1e-3, "grad_clip": 0.0},
}


def sequences(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]


def aims(ids: torch.Tensor, width: int) -> torch.Tensor:
    """[T, width]: what the outputs of these tokens are drawn to, by a squared error."""
    return torch.randn(len(ids), width, generator=torch.Generator().manual_seed(int(ids.sum())))


class Trainee:
    """A model in one layout, with one Adam state for each role, and what its steps gave."""

    def __init__(self, folder, layout, distributed, dtype=torch.float32, head="lm", roles=ROLES, seed=0, weights=True,
                 overlap=False):  # fmt: skip
        self.parallel = layout if isinstance(layout, ParallelConfig) else ParallelConfig(*layout)
        self.topology = init_topology(self.parallel, seed=0, timeout_minutes=2)
        self.hf_config = load_hf_config(folder)
        model = build_model(self.hf_config, self.topology, self.parallel, dtype, head, seed=seed)
        self.model = wrap_ddp(model, distributed, overlap, bucket_size=9000)  # some six buckets
        if weights:
            load_hf_weights(self.model, self.hf_config, self.topology, folder)
        configs = {name: OptimizerConfig(**fields, distributed=distributed) for name, fields in roles.items()}
        self.optimizer = SharedWeightsOptimizer(self.model, configs, dtype)
        self.head = head

    def loss(self, output: torch.Tensor, batch: PackedBatch):
        """Each tensor rank sums over its own columns; padded columns are left out."""
        first = 0 if self.head == "value" else self.topology.tensor_rank * output.shape[-1]
        aim = batch.fields["aims"][0, :, first : first + output.shape[-1]]
        total = ((output[0, :, : aim.shape[1]].float() - aim).square() * batch.loss_mask[0, :, None]).sum()
        return total, batch.loss_mask.sum(), {}

    def backward(self, step: int) -> None:
        forward_backward(self.model, self.parts(step), self.loss, self.topology)

    def outputs(self, step: int) -> list[torch.Tensor]:
        return forward_only(self.model, self.parts(step), lambda output, batch: output.clone(), self.topology)

    def parts(self, step: int) -> list[PackedBatch]:
        mine = sequences(step)[self.topology.data_rank :: self.topology.data]
        width = 1 if self.head == "value" else VOCAB
        batches = [packed(ids, width, length_multiple(self.topology.context)) for ids in mine]
        return [held_part(batch, self.topology) for batch in batches]

    def train(self, first: int, last: int, order=ORDER) -> list[tuple[float, float]]:
        trace = []
        for step in range(first, last):
            self.backward(step)
            result = self.optimizer.for_role(order[step]).step()
            assert result.ok
            trace.append((result.grad_norm, result.update_norm))
        return trace

    def weights(self) -> dict[str, torch.Tensor]:
        named = export_hf_weights(self.model, self.hf_config, self.topology)
        return {name: tensor.detach().clone() for name, tensor in named}


def packed(ids: torch.Tensor, width: int, multiple: int) -> PackedBatch:
    """One sequence, padded to a multiple."""
    padding = -len(ids) % multiple
    padded = F.pad(ids, (0, padding))
    return PackedBatch(
        token_ids=padded[None],
        position_ids=torch.arange(len(padded))[None],
        labels=padded[None],
        loss_mask=F.pad(torch.ones(1, len(ids)), (0, padding)),
        cu_seqlens=torch.tensor([0, len(padded)], dtype=torch.int32),
        max_seq_len=len(padded),
        fields={"aims": F.pad(aims(ids, width), (0, 0, 0, padding))[None]},
    )


def reference(folder: Path, steps: int) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """The same steps by transformers and two torch AdamW over the same weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    parameters = dict(model.named_parameters())
    adams = {}
    for name, fields in ROLES.items():
        fields = dict(fields)
        fields.pop("grad_clip")
        decay = fields.pop("weight_decay")
        matrices = {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": decay}
        norms = {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0}
        adams[name] = torch.optim.AdamW([matrices, norms], **fields)
    trace = []
    for step in range(steps):
        role = ORDER[step]
        batch = sequences(step)
        model.zero_grad()
        for ids in batch:
            error = model(ids[None]).logits[0] - aims(ids, VOCAB)
            (error.square().sum() / sum(map(len, batch))).backward()
        clip = ROLES[role]["grad_clip"] or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item()
        before = {name: p.detach().clone() for name, p in parameters.items()}
        adams[role].step()
        change = sum((p.detach() - before[name]).double().square().sum() for name, p in parameters.items())
        trace.append((norm, float(change) ** 0.5))
    return trace, split_experts({name: p.detach() for name, p in parameters.items()})


def assert_traces(found, expected, relative: float, what: str) -> None:
    for step, (got, want) in enumerate(zip(found, expected, strict=True)):
        for name, a, b in zip(("grad_norm", "update_norm"), got, want, strict=True):
            assert abs(a - b) <= relative * abs(b), f"{what}: {name} of step {step}: found {a}, expected {b}"


def assert_weights(found, expected, limit: float, what: str) -> None:
    assert found.keys() <= expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in found.items():
        difference = (tensor.float() - expected[name].float()).abs().max().item()
        assert difference <= limit, f"{what}: {name} differs by {difference}, accepted {limit}"


def two_adams_case(folder: Path, layouts) -> None:
    """Every layout steps as two torch AdamW do; in its norms, copies and tied weights count once."""
    trace, weights = reference(folder, len(ORDER))
    for layout, distributed in layouts:
        what = f"{folder.name} {layout} distributed={distributed}"
        trainee = Trainee(folder, layout, distributed)
        assert_traces(trainee.train(0, len(ORDER)), trace, 2e-5, what)
        assert_weights(trainee.weights(), weights, 2e-5, what)
        leave_groups()


def value_norms_case(folder: Path) -> None:
    """The value head is the same on every tensor rank and counts once; bf16 moves as fp32 to its rounding."""
    for dtype, relative in ((torch.float32, 2e-5), (torch.bfloat16, 0.05)):
        expected = Trainee(folder, DP2, False, dtype, "value").train(0, 2)
        for layout, distributed in ((DP2, True), (TP2, False), (TP2_SP, True), (PP2, True), (CP2, True)):
            trace = Trainee(folder, layout, distributed, dtype, "value").train(0, 2)
            assert_traces(trace, expected, relative, f"value {dtype} {layout}")


def overlap_case(folder: Path, scratch: Path, layout=DP2) -> None:
    """Communication behind computation changes no number, and who reads weights after a step gets the new ones."""
    for distributed in (True, False):
        expected = overlap_history(Trainee(folder, layout, distributed), stale=False)
        trainee = Trainee(folder, layout, distributed, overlap=True)
        assert len(trainee.model.bucket_groups) > 2
        found = overlap_history(trainee, stale=distributed)
        for step, (got, want) in enumerate(zip(found, expected, strict=True)):
            what = f"overlapped, distributed={distributed}, step {step}"
            assert_traces(got[0], want[0], 2e-5, what)
            for a, b in zip(got[1], want[1], strict=True):
                assert (a - b).abs().max() <= 1e-5, what
            assert_weights(got[2], want[2], 1e-5, what)
        root = scratch / f"overlap_{distributed}"
        trainee.train(2, 3)
        save_checkpoint(root, 5, {"m": trainee.model}, {"m": trainee.optimizer}, {}, 1, IDENTITY)
        other = Trainee(folder, PP2, distributed, seed=31, weights=False)
        load_checkpoint(root, {"m": other.model}, {"m": other.optimizer}, IDENTITY)
        assert_weights(other.weights(), trainee.weights(), 0, "saved between two steps")


def overlap_history(trainee: Trainee, stale: bool) -> list:
    """Of each step its norms, the outputs after it and the weights, which are read first after every other step."""
    history = []
    for step in range(5):
        trace = trainee.train(step, step + 1)
        outputs = trainee.outputs(9) if step % 2 else []
        before = [parameter.detach().clone() for parameter in trainee.model.parameters()]
        weights = trainee.weights()
        moved = any((p != old).any() for p, old in zip(trainee.model.parameters(), before, strict=True))
        assert moved == (stale and not step % 2), (step, moved)
        trainee.backward(7)  # gradients that no step is made of
        history.append((trace, outputs, weights))
    return history


def non_finite_case(folder: Path) -> None:
    for distributed in (False, True):
        trainee = Trainee(folder, DP2, distributed, torch.bfloat16)
        before = trainee.weights()
        trainee.backward(0)
        if dist.get_rank() == 1 or not distributed:  # plain: gradients are equal on all data ranks
            for parameter in trainee.model.parameters():
                parameter.main_grad.view(-1)[-1] = float("nan")
        result = trainee.optimizer.step("actor")
        assert not result.ok and result.update_norm == 0 and result.grad_norm != result.grad_norm
        assert trainee.optimizer.for_role("actor").num_steps == 0
        assert_weights(trainee.weights(), before, 0, "after a refused step")
        assert_traces(trainee.train(0, 2), Trainee(folder, DP2, distributed, torch.bfloat16).train(0, 2), 0, "go on")


def resume_case(folder, root, source, targets, dtype=torch.float32, head="lm") -> None:
    """Save after two steps, go on; load into each target and go on: the same steps, bit for bit in the same layout."""
    trainee = Trainee(folder, *source, dtype, head)
    trainee.train(0, 2)
    trainee.optimizer.for_role("critic").set_lr(7e-4)
    state = {"next_step": 2, "nested": [{"x": 0.5}]}
    save_checkpoint(root, 2, {"m": trainee.model}, {"m": trainee.optimizer}, state, 1, IDENTITY)
    trace, weights = trainee.train(2, 5), trainee.weights()
    for target in targets:
        exact = target == source
        what = f"{folder.name} {head} {dtype} {source} -> {target}"
        other = Trainee(folder, *target, dtype, head, seed=31, weights=False)
        assert load_checkpoint(root, {"m": other.model}, {"m": other.optimizer}, IDENTITY) == state
        assert [other.optimizer.for_role(name).num_steps for name in ROLES] == [1, 1]
        assert [other.optimizer.for_role(name).lr for name in ROLES] == [2e-3, 7e-4]
        relative, limit = (2e-5, 2e-5) if dtype == torch.float32 else (0.05, 0.05)
        assert_traces(other.train(2, 5), trace, 0 if exact else relative, what)
        assert_weights(other.weights(), weights, 0 if exact else limit, what)


def master_weights_case(folder: Path, root: Path, source, targets) -> None:
    """bf16: fp32 master weights and moments come through a change of layout bit for bit."""
    trainee = Trainee(folder, *source, torch.bfloat16, "value")
    trainee.train(0, 3)
    save_checkpoint(root, 3, {"m": trainee.model}, {"m": trainee.optimizer}, {}, 1, IDENTITY)
    for number, (layout, distributed) in enumerate(targets):
        other = Trainee(folder, layout, distributed, torch.bfloat16, "value", seed=31, weights=False)
        load_checkpoint(root, {"m": other.model}, {"m": other.optimizer}, IDENTITY)
        again = root.with_name(f"{root.name}_{number}")
        save_checkpoint(again, 3, {"m": other.model}, {"m": other.optimizer}, {}, 1, IDENTITY)
    if dist.get_rank() == 0:
        expected = stored_tensors(latest(root))
        assert any("m.master." in key for key in expected) and any("critic.exp_avg_sq" in key for key in expected)
        for again in root.parent.glob(f"{root.name}_*"):
            found = stored_tensors(latest(again))
            assert found.keys() == expected.keys()
            for key, tensor in found.items():
                assert torch.equal(tensor, expected[key]), f"{again.name}: {key}"
    dist.barrier()


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, by torch.distributed alone."""
    from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    reader = FileSystemReader(folder / "tensors")
    metadata = reader.read_metadata().state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    _load_state_dict(found, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    return found


def assert_refused(action: Callable[[], object], kind: type[Exception], *words: str) -> None:
    """On every rank, and at once."""
    start = time.monotonic()
    try:
        action()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in: {error}"
    else:
        raise AssertionError(f"not refused; expected {words}")
    assert time.monotonic() - start < 20
    dist.barrier()


def refusals_case(folder: Path, scratch: Path) -> None:
    trainee = Trainee(folder, TP2, True)
    models, optimizers = {"m": trainee.model}, {"m": trainee.optimizer}
    root = scratch / "refused"
    load = lambda **changes: load_checkpoint(  # noqa: E731
        root, **{"models": models, "optimizers": optimizers, "identity": IDENTITY, **changes}
    )
    assert load() is None  # nothing there yet
    save_checkpoint(root, 1, models, optimizers, {"a": 1}, 1, IDENTITY)
    before = trainee.weights()
    assert_refused(lambda: load(identity={**IDENTITY, "model": "huge"}), UserError, "model:", "'tiny'", "'huge'")
    load(identity={**IDENTITY, "unknown then": "none"})
    assert_refused(lambda: load(identity={**IDENTITY, "unknown then": "some"}), UserError, "unknown then: found none")
    assert_refused(lambda: load(models={"n": trainee.model}), UserError, "model n: found none")
    half = Trainee(folder, TP2, True, torch.bfloat16)
    assert_refused(lambda: load(models={"m": half.model}, optimizers={}), UserError, "float32", "bfloat16")
    every = {"models": {"m": half.model}, "optimizers": {"m": half.optimizer}, "identity": {"model": "x", "new": "y"}}
    differences = ("model: found 'tiny'", "but this run has 'x'", "tokenizer: found 'abc'", "new: found none")
    assert_refused(
        lambda: load(**every), UserError, *differences, "model m: found 'float32'", "optimizer m: found", "'master'"
    )
    one = Trainee(folder, TP2, True, roles={"actor": ROLES["actor"]})
    assert_refused(lambda: load(optimizers={"m": one.optimizer}), UserError, "optimizer m", "critic.exp_avg")
    assert_weights(trainee.weights(), before, 0, "after refusals")
    largest = max((latest(root) / "tensors").glob("*.distcp"), key=lambda path: path.stat().st_size)
    if dist.get_rank() == 0:
        with open(largest, "r+b") as file:
            file.seek(1000)
            file.write(b"damage")
    dist.barrier()
    assert_refused(load, UserError, str(largest), "damaged", "no undamaged checkpoint; start anew")
    if dist.get_rank() == 0:
        largest.unlink()
    dist.barrier()
    assert_refused(load, UserError, str(largest), "missing")
    assert_refused(lambda: load(verify=False), UserError, str(largest), "missing")
    save = lambda path, state: save_checkpoint(path, 2, models, optimizers, state, 1, IDENTITY)  # noqa: E731
    assert_refused(lambda: save(latest(root) / "state.npz", {}), RuntimeError, "rank 0", "state.npz")
    assert_refused(lambda: save(root, {"x": {1}}), RuntimeError, "state.run.x")
    write_failure_case(root, models, optimizers)


def write_failure_case(root: Path, models, optimizers) -> None:
    """One rank cannot write its tensors: every rank hears of it, and the former checkpoint stays the latest."""
    from torch.distributed.checkpoint import FileSystemWriter

    save_checkpoint(root, 3, models, optimizers, {}, 1, IDENTITY)
    original = FileSystemWriter.write_data
    if dist.get_rank() == 1:

        def full(self, plan, planner):
            raise OSError(28, "No space left on device")

        FileSystemWriter.write_data = full
    try:
        save = lambda: save_checkpoint(root, 4, models, optimizers, {}, 1, IDENTITY)  # noqa: E731
        assert_refused(save, RuntimeError, "cannot be written", "No space left")
    finally:
        FileSystemWriter.write_data = original
    assert latest(root).name == "step_000003"
    save_checkpoint(root, 4, models, optimizers, {}, 1, IDENTITY)
    assert latest(root).name == "step_000004" and not list(root.glob("*.tmp"))


def two_models_case(folder: Path, scratch: Path) -> None:
    """An actor and a value-head critic in one checkpoint; the actor alone can be read from it."""
    actor = Trainee(folder, DP2, True)
    critic = Trainee(folder, DP2, True, head="value", roles={"critic": ROLES["critic"]})
    actor.train(0, 1), critic.train(0, 1, order=("critic",))
    root = scratch / "two"
    parts = {"actor": actor, "critic": critic}
    models = {name: part.model for name, part in parts.items()}
    optimizers = {name: part.optimizer for name, part in parts.items()}
    save_checkpoint(root, 1, models, optimizers, {}, 1, IDENTITY)
    alone = Trainee(folder, PP2, False, seed=8, weights=False)
    load_checkpoint(root, {"actor": alone.model}, {}, IDENTITY)
    assert_weights(alone.weights(), actor.weights(), 0, "the actor alone")


def main() -> None:
    untied, tied, scratch = map(Path, sys.argv[1:])
    f32, bf16, sp = torch.float32, torch.bfloat16, (TP2_SP, True)
    every = [(layout, distributed) for layout in (TP2, PP2, DP2) for distributed in (True, False)]
    all_layouts = [*every, (CP2, True), (CP2, False), (TP2_SP, False), (VPP2, True), (VPP2, False)]
    cases = {
        "two adams untied": lambda: two_adams_case(untied, all_layouts),
        "two adams tied": lambda: two_adams_case(tied, all_layouts),
        "value norms": lambda: value_norms_case(untied),
        "overlap": lambda: overlap_case(untied, scratch),
        "non-finite": lambda: non_finite_case(untied),
        "resume tp2": lambda: resume_case(untied, scratch / "a", (TP2, True), [every[0], every[2], every[4], every[5]]),
        "resume dp2 tied": lambda: resume_case(tied, scratch / "b", (DP2, True), [every[4], every[0], every[2]]),
        "resume pp2 tied plain": lambda: resume_case(tied, scratch / "c", (PP2, False), [every[3], every[0]]),
        "resume pp2 vpp2": lambda: resume_case(untied, scratch / "h", (VPP2, True), [(VPP2, True), *every[0:5:2]]),
        "resume to vpp2 tied": lambda: resume_case(tied, scratch / "i", (DP2, True), [(VPP2, True), (VPP2, False)]),
        "resume bf16 value": lambda: resume_case(untied, scratch / "d", (DP2, True), every[4::-4], bf16, "value"),
        "resume bf16 plain": lambda: resume_case(untied, scratch / "e", (TP2, False), [every[1], every[2]], bf16),
        "resume value": lambda: resume_case(untied, scratch / "f", (TP2_SP, True), [sp, every[4]], f32, "value"),
        "resume cp2": lambda: resume_case(tied, scratch / "j", (CP2, True), [(CP2, True), every[0], every[5]]),
        "master weights": lambda: master_weights_case(
            untied, scratch / "g", every[0], [every[4], every[3], every[0], (VPP2, True)]
        ),
        "refusals": lambda: refusals_case(untied, scratch),
        "two models": lambda: two_models_case(untied, scratch),
    }
    run_cases(cases)


if __name__ == "__main__":
    main()
