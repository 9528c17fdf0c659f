#!/usr/bin/env bash
# vLLM with nixl-offload on this node by one `docker run`, with exactly the devices and mounts that it needs.
#
#   examples/docker/run.sh MODEL [options of vllm serve]
#
# From the environment: CONFIG (kv-nvme.yaml beside this script), DRIVE (/mnt/nvme/kv, mounted under the same path),
# IMAGE (vllm-nixl-offload), PORT (8000), DRY_RUN=1 to see the command only. HF_TOKEN and AWS credentials are passed on
# where they are set. A profile is not: the container has no ~/.aws. Instead, before this:
#   eval "$(aws configure export-credentials --profile NAME --format env)"
set -euo pipefail
[[ $# -ge 1 && $1 != -* ]] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
config="${CONFIG:-$here/kv-nvme.yaml}" drive="${DRIVE:-/mnt/nvme/kv}" image="${IMAGE:-vllm-nixl-offload}"
[[ -r $config ]] || { echo "run.sh: $config cannot be read; say CONFIG=/path/to/kv.yaml" >&2; exit 2; }
config="$(realpath "$config")"
transfer='{"kv_connector": "NixlOffloadConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute", '
transfer+='"kv_connector_extra_config": {"config": "/etc/nixl-offload/kv.yaml"}}'

options=(
  --rm --name "vllm-${PORT:-8000}" --gpus all --publish "127.0.0.1:${PORT:-8000}:8000"
  --volume "$config:/etc/nixl-offload/kv.yaml:ro" --volume nixl-offload-cache:/home/vllm/.cache
  --shm-size 16g --ulimit memlock=-1:-1 --ulimit nofile=65536:65536
  --cap-drop ALL --security-opt no-new-privileges:true --stop-timeout 60
)
# A node of GPUDirect Storage: the drive, udev's data, and nvidia-fs where its module is loaded (with P2PDMA it need not
# be).
if [[ -d $drive ]]; then
  options+=(--volume "$drive:$drive" --volume /run/udev:/run/udev:ro)
  options+=(--env CUFILE_ENV_PATH_JSON=/usr/local/share/nixl-offload/cufile.json)
  for node in "${DEVICES:-/dev}"/nvidia-fs*; do
    [[ -e $node ]] && options+=(--device "$node")
  done
else
  echo "run.sh: no directory $drive here: no drive is mounted (tiers slab and shared_dir need one: DRIVE=/path)" >&2
fi
# By name only: the values stay in the environment, out of the command line and of the process list.
for name in HF_TOKEN AWS_REGION AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN; do
  [[ -n ${!name:-} ]] && options+=(--env "$name")
done
if [[ -n ${AWS_PROFILE:-} && -z ${AWS_ACCESS_KEY_ID:-} ]]; then
  echo "run.sh: AWS_PROFILE is not passed on, for the container has no ~/.aws; first:" >&2
  echo '  eval "$(aws configure export-credentials --format env)"' >&2
fi

command=(docker run "${options[@]}" "$image" "$1" --kv-transfer-config "$transfer" --shutdown-timeout 45 "${@:2}")
if [[ ${DRY_RUN:-} == 1 ]]; then printf '%q ' "${command[@]}"; echo; else exec "${command[@]}"; fi
