"""The kernels of the chunk loss compiled for Hopper, without one; prints {kernel: what its binary takes} as JSON."""

from __future__ import annotations

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_ac2.kernels.chunk_loss_triton import HOPPER
from megatron_ac2.kernels.chunk_loss_triton_kernels import entropy_kernel, logits_kernel, pick_kernel


def compiled() -> dict[str, dict[str, int]]:
    blocks = {"BLOCK_T": HOPPER.tokens, "BLOCK_V": HOPPER.vocab, "BLOCK_H": HOPPER.hidden, "GROUP": HOPPER.group}
    logits = blocks | {"EVEN_H": True, "STORE": True, "WIDEN": False}
    whole = {"num_rows": "i32", "columns": "i32", "width": "i32", "hidden_stride": "i32", "weight_stride": "i32"}
    whole |= {"tile_stride": "i32", "num_ids": "i32", "scale": "fp32", "ids": "*i64", "picked": "*fp32"}
    whole |= {name: "*fp32" for name in ("reference", "partial", "constants", "slopes")}
    whole |= {name: "*bf16" for name in ("hidden", "weight", "tile")}
    found = {}
    for name, kernel, constants in (
        ("logits", logits_kernel, logits),
        ("logits, odd H, one column", logits_kernel, logits | {"EVEN_H": False, "columns": 1}),
        ("logits, scores only, one row", logits_kernel, logits | {"STORE": False, "num_rows": 1}),
        ("pick, one id", pick_kernel, {"BLOCK": 1024, "num_ids": 1}),
        ("entropy", entropy_kernel, {"BLOCK": 4096}),
    ):
        signature = {key: "constexpr" if key in constants else whole[key] for key in kernel.arg_names}
        # As at a launch: pointers are multiples of 16, and so are sizes where the case's name does not say otherwise.
        kinds = ("*",) if "odd" in name else ("*", "i32")
        aligned = [index for index, key in enumerate(kernel.arg_names) if signature[key].startswith(kinds)]
        source = ASTSource(kernel, signature, constants, {(index,): [["tt.divisibility", 16]] for index in aligned})
        options = {"num_warps": HOPPER.warps, "num_stages": HOPPER.stages}
        binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        found[name] = {
            "bytes": len(binary.asm["cubin"]),
            "shared": binary.metadata.shared,
            "wgmma": binary.asm["ptx"].count("wgmma.mma_async"),
        }
    return found


if __name__ == "__main__":
    print(json.dumps(compiled()))
