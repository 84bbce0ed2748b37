#!/usr/bin/env bash
# One machine, one process a GPU:
#   examples/launch/torchrun_one_node.sh examples/qwen3_4b_proofs.yaml [section.field=value ...]
# RANKS sets the number of processes; its default is the number of GPUs, or 2 where there is none.
set -euo pipefail

[[ $# -ge 1 ]] || { sed -n '2,4s/^# \{0,1\}//p' "$0" >&2; exit 2; }
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
ranks=${RANKS:-$((gpus > 0 ? gpus : 2))}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if ((gpus > 0)); then
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
else
    export TORCHDYNAMO_DISABLE=${TORCHDYNAMO_DISABLE:-1}
fi

python -m megatron_ac2.doctor "$@"
exec python -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m megatron_ac2.train "$@"
