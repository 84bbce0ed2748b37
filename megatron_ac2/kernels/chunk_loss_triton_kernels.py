"""The Triton kernels of chunk_loss_triton.py. Rows are tokens, columns the vocabulary of this rank."""

# No `from __future__ import annotations`: Triton wants tl.constexpr itself, not its name.
import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1 when this module was imported: CPU tensors, for tests


@triton.jit
def logits_kernel(
    hidden, weight, reference, tile, partial, num_rows, columns, width, hidden_stride, weight_stride, tile_stride,
    scale, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, GROUP: tl.constexpr,
    EVEN_H: tl.constexpr, STORE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Of one block: maximum m, sum e^(z - m), sum e^(z - m) (z - m) of each row -> partial [3, vocabulary blocks, n];
    with STORE, e^(z - reference) -> tile [n, tile_stride]."""
    row_blocks = tl.cdiv(num_rows, BLOCK_T)
    column_blocks = tl.cdiv(columns, BLOCK_V)
    program = tl.program_id(0)
    first = program // (GROUP * column_blocks) * GROUP
    group = tl.minimum(row_blocks - first, GROUP)
    within = program % (GROUP * column_blocks)
    column_block = within // group
    rows = (first + within % group) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = column_block * BLOCK_V + tl.arange(0, BLOCK_V)
    depth = tl.arange(0, BLOCK_H)
    # Blocks that overhang read the last row again; what comes of it is masked below.
    left = hidden + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * hidden_stride + depth[None, :]
    right = weight + tl.minimum(cols, columns - 1).to(tl.int64)[:, None] * weight_stride + depth[None, :]
    logits = tl.zeros((BLOCK_T, BLOCK_V), dtype=tl.float32)
    for start in range(0, width, BLOCK_H):
        if EVEN_H:
            x = tl.load(left)
            y = tl.load(right)
        else:
            x = tl.load(left, mask=depth[None, :] < width - start, other=0.0)
            y = tl.load(right, mask=depth[None, :] < width - start, other=0.0)
        if WIDEN:  # The interpreter multiplies the bit patterns of bf16.
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        logits = tl.dot(x, tl.trans(y), logits, input_precision="ieee")
        left += BLOCK_H
        right += BLOCK_H
    own_rows = rows < num_rows
    own_cols = cols < columns
    logits = tl.where(own_cols[None, :], logits * scale, float("-inf"))
    maximum = tl.max(logits, 1)
    logits -= maximum[:, None]
    weights = tl.exp(logits)
    place = partial + column_block * num_rows + rows
    tl.store(place, maximum, mask=own_rows)
    tl.store(place + column_blocks * num_rows, tl.sum(weights, 1), mask=own_rows)
    products = tl.where(own_cols[None, :], weights * logits, 0.0)
    tl.store(place + 2 * column_blocks * num_rows, tl.sum(products, 1), mask=own_rows)
    if STORE:
        shift = tl.exp(maximum - tl.load(reference + rows, mask=own_rows, other=0.0))
        where = tile + rows.to(tl.int64)[:, None] * tile_stride + cols[None, :]
        entries = (weights * shift[:, None]).to(tile.dtype.element_ty)
        tl.store(where, entries, mask=own_rows[:, None] & own_cols[None, :])


@triton.jit
def pick_kernel(
    hidden, weight, ids, picked, num_ids, columns, width, hidden_stride, weight_stride, scale, BLOCK: tl.constexpr
):  # fmt: skip
    """The scaled logits of ids [n, K], 0 for those elsewhere: fp32 products and sums."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + place)
    left = hidden + place // num_ids * hidden_stride
    right = weight + tl.minimum(row, columns - 1) * weight_stride
    depth = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        mask = depth < width - start
        x = tl.load(left + start + depth, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(right + start + depth, mask=mask, other=0.0).to(tl.float32)
        total += x * y
    logit = tl.sum(total, 0) * scale
    tl.store(picked + place, tl.where(row < columns, logit, 0.0))


@triton.jit
def entropy_kernel(tile, constants, slopes, columns, tile_stride, BLOCK: tl.constexpr):
    """w -> w (constant + slope log w), in place: constant and slope are the row's."""
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < columns
    place = tile + row.to(tl.int64) * tile_stride + cols
    weights = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    logs = tl.log(tl.where(weights > 0, weights, 1.0))
    found = weights * (tl.load(constants + row) + tl.load(slopes + row) * logs)
    tl.store(place, found.to(tile.dtype.element_ty), mask=mask)
