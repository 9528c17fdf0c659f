# vLLM's own image with nixl-offload added. Build: docker build -t vllm-nixl-offload .
# Run:   docker run --gpus all -v /mnt/nvme/kv:/mnt/nvme/kv -v $PWD/configs:/etc/nixl-offload:ro vllm-nixl-offload \
#          --model MODEL --kv-transfer-config "$(nixl-offload show --kv-transfer-config /etc/nixl-offload/local-nvme.yaml)"
# GPUDirect Storage needs more of the host: the nvidia-fs module, /run/udev mounted, and a filesystem that it supports
# (ext4 or xfs; never overlayfs, so put the path of the file tier on a volume).
ARG VLLM_TAG=v0.33.0
FROM vllm/vllm-openai:${VLLM_TAG}

WORKDIR /opt/nixl-offload
COPY pyproject.toml README.md LICENSE ./
COPY nixl_offload ./nixl_offload
# --no-deps for NIXL: torch and CUDA are the image's, and must stay as they are.
RUN cuda="$(python3 -c 'import torch; print(torch.version.cuda.split(".")[0])')" \
 && python3 -m pip install --no-cache-dir --no-deps nixl==1.5.1 "nixl-cu${cuda}==1.5.1" \
 && python3 -m pip install --no-cache-dir '.[s3]' \
 && nixl-offload --version
WORKDIR /
