"""Labels of a value head in a packed batch, the loss of each head on them, and the head itself, by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_ac2.config import Config
from megatron_ac2.config_training import CriticConfig
from megatron_ac2.data.packing import pack
from megatron_ac2.model.value_head import HEAD_OUTPUTS, ValueHead
from megatron_ac2.training.value_head_critic import ValueHeadCritic, context_problems
from megatron_ac2.training.value_labels import check_labels, head_values, label_fields, label_loss, places_of
from megatron_ac2.types import CriticState, DenseExample, PackedBatch, Problem

PROMPT = np.arange(3, dtype=np.int32)
STATE = CriticState(Problem("p", PROMPT, "", {}), np.arange(4, dtype=np.int32), None)


def example(positions, targets, weight=1.0, mask=None, old_values=None) -> DenseExample:
    as_array = lambda x, dtype: None if x is None else np.array(x, dtype=dtype)  # noqa: E731
    return DenseExample(
        STATE, np.array(positions), np.array(targets, dtype=np.float32), weight, as_array(mask, bool),
        as_array(old_values, np.float32),
    )  # fmt: skip


def labelled(*examples: DenseExample, align: int = 4) -> PackedBatch:
    """Contexts of 3 + 4 tokens each, end to end, and padding up to a multiple of `align`."""
    contexts = [np.concatenate([PROMPT, e.state.response_ids]) for e in examples]
    batch = pack(contexts, {}, [len(ids) for ids in contexts], align, 0)
    places = [places_of(len(ids), 4, e.positions) for ids, e in zip(contexts, examples, strict=True)]
    batch.fields.update(label_fields(batch, examples, places, scale=2.0))
    return batch


def test_a_value_is_read_at_the_last_token_of_its_state():
    assert places_of(7, 4, np.array([0, 1, 4])).tolist() == [2, 3, 6]
    assert places_of(4, 4, np.array([4, 1])).tolist() == [3, 0]
    assert places_of(7, 4, np.array([])).tolist() == []


@pytest.mark.parametrize(("context_len", "position"), [(7, 5), (7, -1), (4, 0)])
def test_positions_without_a_token_are_refused(context_len: int, position: int):
    with pytest.raises(ValueError, match=f"response tokens, found \\[{position}\\]"):
        places_of(context_len, 4, np.array([position]))


def test_labels_in_a_packed_batch():
    """The second context starts at 7, so that its position 1 is place 7 + 2 + 1 = 10. Weights are doubled by the scale
    and shared by a row's targets: 0.5 * 2 / 2 each, and all of it where one is masked."""
    first = example([0, 4], [[0.1, 0.2], [0.3, math.nan]], 0.5, [[1, 1], [1, 0]])
    batch = labelled(first, example([1], [0.9], 3.0, old_values=[0.4]))
    targets, weights, old = (batch.fields[name][0] for name in ("targets", "target_weights", "old_values"))
    assert targets.shape == weights.shape == (16, 2) and old.shape == (16,)
    assert weights[[2, 6, 10]].tolist() == [[0.5, 0.5], [1.0, 0.0], [6.0, 0.0]] and weights.sum() == 8
    torch.testing.assert_close(targets[[2, 6, 10]], torch.tensor([[0.1, 0.2], [0.3, 0.0], [0.9, 0.0]]))
    assert old.isnan().sum() == 15 and old[10] == pytest.approx(0.4)


def test_a_batch_without_labels_has_every_field_and_no_loss():
    batch = labelled()
    for head, outputs in HEAD_OUTPUTS.items():
        output = torch.full((1, 4, outputs), math.nan, requires_grad=True)
        loss, count, _ = label_loss(CriticConfig(head=head), output, batch)
        loss.backward()
        assert loss == 0 and count == 0 and (output.grad == 0).all()


def loss_and_gradient(head: str, output: torch.Tensor, batch: PackedBatch, clip: float | None = None):
    output.requires_grad_()
    loss, count, sums = label_loss(CriticConfig(head=head, value_clip=clip), output, batch)
    loss.backward()
    return loss.item(), count.item(), sums, output.grad


def test_losses_of_a_row_are_averaged_not_its_targets():
    """Logit 0 everywhere, so V = 1/2; targets 0 and 1 at one place, weight 2: the squared losses are both 1/8, and
    their mean is 2 * 1/8, where the loss of the mean target would be 0. The gradients cancel. Targets 1 and 1 at
    another: the same loss, and the gradient of 2 * (V - 1) V (1 - V) = -1/4."""
    batch = labelled(example([0, 2], [[0.0, 1.0], [1.0, 1.0]]))
    loss, count, sums, gradient = loss_and_gradient("mse", torch.zeros(1, 8, 1), batch)
    assert loss == pytest.approx(0.5) and count == 2
    assert gradient[0, :, 0].tolist() == pytest.approx([0, 0, 0, 0, -0.25, 0, 0, 0])
    assert {name: sums[name].item() for name in ("weight", "target", "error", "abs_error")} == pytest.approx(
        {"weight": 4, "target": 2 * 0.5 + 2 * 1, "error": 2 * 0.5, "abs_error": 2 * 0.5}
    )


def test_a_value_beyond_its_clip_is_not_driven_on():
    """V = 1/2, clip 0.1. Old value 0.2, target 1: v_clipped = 0.3, and (0.3 - 1)^2 > (0.5 - 1)^2, so no gradient. Old
    value 0.2, target 0: the value's own error is larger. No old value: no clip. Weight 2, so 2 * 1/2 * error^2."""
    clipped, back = example([4], [1.0], old_values=[0.2]), example([4], [0.0], old_values=[0.2])
    loss, _, _, gradient = loss_and_gradient("mse", torch.zeros(1, 7, 1), labelled(clipped, align=1), clip=0.1)
    assert loss == pytest.approx(0.49) and (gradient == 0).all()
    for one, expected in ((back, 0.25), (example([4], [1.0]), -0.25)):
        loss, _, _, gradient = loss_and_gradient("mse", torch.zeros(1, 7, 1), labelled(one, align=1), clip=0.1)
        assert loss == pytest.approx(0.25) and gradient[0, 6, 0] == pytest.approx(expected)
    assert loss_and_gradient("mse", torch.zeros(1, 7, 1), labelled(clipped, align=1))[0] == pytest.approx(0.25)


def test_cross_entropies_of_an_undecided_head():
    """Logits 0: log 2 a target for the bounded scalar, log 11 for the distribution; 0.25 is half 0.2 and half 0.3."""
    batch = labelled(example([4], [[0.25, 0.9]], mask=[[1, 0]]), align=1)
    assert loss_and_gradient("bce", torch.zeros(1, 7, 1), batch)[0] == pytest.approx(2 * math.log(2), rel=1e-6)
    loss, _, _, gradient = loss_and_gradient("two_hot", torch.zeros(1, 7, 11), batch)
    expected = [2 / 11 - (1 if index in (2, 3) else 0) for index in range(11)]
    assert loss == pytest.approx(2 * math.log(11), rel=1e-6)
    assert gradient[0, 6].tolist() == pytest.approx(expected, abs=1e-6) and (gradient[0, :6] == 0).all()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (example([1, 1], [0.1, 0.2]), "distinct positions"),
        (example([1, 2], [0.1]), "2 labels, but targets of shape \\(1,\\)"),
        (example([1], [[[0.1]]]), "targets of shape"),
        (example([1, 2], [[0.1, 0.2]] * 2, mask=[[1, 1]]), "mask: found shape \\(1, 2\\)"),
        (example([1, 2], [[0.1, 0.2]] * 2, mask=[[1, 1], [0, 0]]), "without any target"),
        (example([1, 2], [0.1, 0.2], old_values=[0.5]), "old_values of shape"),
    ],
)
def test_labels_that_do_not_fit_are_refused(wrong: DenseExample, words: str):
    with pytest.raises(ValueError, match=words):
        check_labels(wrong)


@pytest.mark.parametrize("head", HEAD_OUTPUTS)
def test_a_fresh_head_is_undecided(head: str):
    config = SimpleNamespace(hidden_size=64, sequence_parallel=False)
    fresh = ValueHead(config, torch.device("cpu"), 5, HEAD_OUTPUTS[head])
    again = ValueHead(config, torch.device("cpu"), 5, HEAD_OUTPUTS[head])
    assert fresh.weight.shape == (HEAD_OUTPUTS[head], 64) and torch.equal(fresh.weight, again.weight)
    output, bias = fresh(torch.randn(9, 1, 64, generator=torch.Generator().manual_seed(1)).bfloat16())
    values = head_values(head, output)
    assert bias is None and output.dtype == torch.float32 and values.shape == (9, 1)
    assert ((values - 0.5).abs() < 0.12).all() and values.std() > 0


@pytest.mark.parametrize(("found", "fits"), [(None, True), (1, True), (512, True), (513, False), (0, False)])
def test_context_limit_against_the_model(found: int | None, fits: bool):
    config = Config()
    config.critic.max_context_len = found
    problems = context_problems(config, 512)
    assert (problems == []) == fits
    assert fits or problems[0].startswith(f"critic.max_context_len: found {found}, accepted: 1 to 512")


def test_what_needs_a_snapshot_says_so():
    critic = ValueHeadCritic(None, None, None, Config(), separator_id=3, model_max_len=500, align=1)
    with pytest.raises(RuntimeError, match="snapshot_model"):
        critic.score_paths([STATE], [np.array([1])], frozen=True)
    with pytest.raises(RuntimeError, match="snapshot_model"):
        critic.refresh_snapshot()
