# megatron_ac2 on NVIDIA's PyTorch container.
#
#   docker build -t megatron_ac2 .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 \
#       -v /data:/data -it megatron_ac2 \
#       examples/launch/torchrun_one_node.sh examples/qwen3_4b_proofs.yaml
#
# What comes with the image and is kept: Python 3.12, CUDA 13.1, cuDNN, NCCL, NVIDIA's build of torch (2.10),
# Transformer Engine and apex, all compiled against each other. What we add: Megatron-Core, vLLM, and small packages.
# vLLM's wheel is compiled against torch from PyPI and would replace NVIDIA's; here it is compiled against the torch of
# the image. Take an image of another month with --build-arg NGC_TAG=..., and a vLLM that fits its torch with
# --build-arg VLLM_VERSION=...
#
# The images come without Megatron-Core. Its own CI builds 0.16.1 on image 25.11 and 0.19.0 on image 26.06 (its file
# docker/.ngc_version.dev); 0.16.1 names Transformer Engine 2.9 to 2.11, 0.19 names no range. For 0.19 pass
# NGC_TAG=26.06-py3 and MEGATRON_CORE_VERSION=0.19.2. Our tests pass with both on CPU (`make test`,
# `make test-megatron-0.19`); neither image has been built or run with this project.
ARG NGC_TAG=25.12-py3
FROM nvcr.io/nvidia/pytorch:${NGC_TAG}

ARG VLLM_VERSION=0.32.0
ARG MEGATRON_CORE_VERSION=0.16.1
ARG MAX_JOBS=16
# GPU generations to compile for: Hopper and Blackwell.
ARG TORCH_CUDA_ARCH_LIST="9.0 10.0"

# The image pins every package it was built with, among them some that vLLM needs newer. Only what is compiled against
# NVIDIA's torch has to stay, so this list takes the place of /etc/pip/constraint.txt for everything below.
RUN pip list --format=freeze \
        | grep -iE '^(torch|torchvision|(pytorch-)?triton|transformer[-_]engine|apex|flash[-_]attn)==' \
        > /opt/keep.txt && cat /opt/keep.txt
ENV PIP_CONSTRAINT=/opt/keep.txt \
    PIP_NO_CACHE_DIR=1

# vLLM against the torch of the image: use_existing_torch.py takes torch out of its requirements.
RUN git clone --depth 1 --branch v${VLLM_VERSION} https://github.com/vllm-project/vllm.git /opt/vllm \
    && cd /opt/vllm \
    && python use_existing_torch.py \
    && pip install -r requirements/build*.txt \
    && MAX_JOBS=${MAX_JOBS} TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST}" pip install --no-build-isolation . \
    && rm -rf /opt/vllm

WORKDIR /workspace/megatron_ac2
COPY requirements.txt pyproject.toml ./
# Without the lines of what is already here, compiled against the image.
RUN grep -vE '^(torch|vllm|megatron-core|transformer-engine)\b' requirements.txt > /tmp/requirements.txt \
    && pip install -r /tmp/requirements.txt \
    && pip install --no-deps megatron-core==${MEGATRON_CORE_VERSION}

COPY . .
RUN pip install --no-deps --no-build-isolation -e . \
    && python -c "import torch; assert torch.version.cuda, 'a dependency replaced the CUDA build of torch'"

# The engine sleeps between steps, which expandable segments do not go with: leave PYTORCH_CUDA_ALLOC_CONF unset.
# Tensor parallelism overlaps communication only if kernels are launched in the order they were enqueued.
ENV CUDA_DEVICE_MAX_CONNECTIONS=1 \
    VLLM_NO_USAGE_STATS=1
CMD ["python", "-m", "megatron_ac2.doctor"]
