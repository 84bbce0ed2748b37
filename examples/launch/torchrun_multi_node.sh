#!/usr/bin/env bash
# Several machines without a scheduler: start it on every one of them, with the same arguments and the same MASTER_ADDR.
#   NODES=4 MASTER_ADDR=node0 examples/launch/torchrun_multi_node.sh CONFIG.yaml [section.field=value ...]
# The machines must see the same files under the same paths: configuration, model, problems and run.dir.
#   NODES         number of machines (required)
#   MASTER_ADDR   name or address of one of them; it hosts the rendezvous (required)
#   MASTER_PORT   a free port there (29500)
#   RUN_ID        tells this job's rendezvous from another's (megatron_ac2)
#   JOIN_TIMEOUT  seconds to wait for the last machine (900)
#   RANKS         processes a machine (its number of GPUs)
# A rank that dies ends the job everywhere. Start it again: it goes on from the latest checkpoint in run.dir.
set -euo pipefail

[[ $# -ge 1 ]] || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
: "${NODES:?set the number of machines}" "${MASTER_ADDR:?set the machine that hosts the rendezvous}"
ranks=${RANKS:-$(nvidia-smi --list-gpus | wc -l)}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# A collective that fails on one rank must not leave the others waiting for run.timeout_minutes.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}

exec python -m torch.distributed.run \
    --nnodes "$NODES" \
    --nproc-per-node "$ranks" \
    --max-restarts 0 \
    --rdzv-backend c10d \
    --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}" \
    --rdzv-id "${RUN_ID:-megatron_ac2}" \
    --rdzv-conf "join_timeout=${JOIN_TIMEOUT:-900}" \
    -m megatron_ac2.train "$@"
