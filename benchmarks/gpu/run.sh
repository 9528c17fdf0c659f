#!/usr/bin/env bash
# All that needs a GPU, in one call: the `gpu` tests, then the benchmark, whose one table comes last. See README.md.
# The machine needs CUDA, Python with torch and Triton for it, and no registry: the rest is in the kit of `make gpu-kit`.
#   benchmarks/gpu/run.sh                results go to ./gpu-results, or where $OUT says
# Settings, by environment: PYTHON, KIT (the kit's folder), OUT, DATA (a directory on the filesystem to be measured),
# LIMIT_S (of the whole run), TEST_LIMIT_S (of the tests). The repository may be read-only.
# DRY_RUN=1 goes through all of it without a GPU: tests are skipped, and host memory plays the device.
# Exit status: 0 all is well, 1 tests failed, 2 the benchmark failed, 3 both, 4 this machine cannot run it.
set -uo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
repository="$(cd "$here/../.." && pwd)"
PYTHON="${PYTHON:-python3}"
KIT="${KIT:-$repository/build/gpu-kit}"
LIMIT_S="${LIMIT_S:-500}"
TEST_LIMIT_S="${TEST_LIMIT_S:-240}"

say() { printf '== %s\n' "$*"; }
give_up() { printf 'gpu-check: %s\n' "$*" >&2; exit 4; }
left_s() { echo $((LIMIT_S - SECONDS)); }

scratch="$(mktemp -d "${TMPDIR:-/tmp}/nixl-offload-gpu-XXXXXX")" || give_up "no temporary folder"
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM

# What this machine must have.
command -v "$PYTHON" >/dev/null || give_up "no $PYTHON; PYTHON=... names another"
python_version="$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
if [ -n "${DRY_RUN:-}" ]; then
  emulate=(--emulate)
else
  emulate=()
  nvidia-smi >/dev/null 2>&1 || give_up "no NVIDIA GPU here: nvidia-smi does not answer"
  "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>"$scratch/torch" ||
    give_up "$PYTHON has no torch that sees the GPU: $(tail -n 1 "$scratch/torch")"
fi

OUT="${OUT:-gpu-results}"
if ! mkdir -p "$OUT" 2>/dev/null || ! [ -w "$OUT" ]; then
  OUT="$(mktemp -d "${TMPDIR:-/tmp}/gpu-results-XXXXXX")"
fi
OUT="$(cd "$OUT" && pwd)"
DATA="${DATA:-$scratch}"

# The kit, in a folder of its own: what the machine has of its own stays as it is.
site="$scratch/site"
install() {
  "$PYTHON" -m pip --disable-pip-version-check install -q --no-index --no-deps --no-compile --no-cache-dir \
    --target "$site" "$@" >>"$OUT/install.log" 2>&1
}
: >"$OUT/install.log"
if [ -d "$KIT" ]; then
  say "wheels of $KIT for Python $python_version"
  install "$KIT"/*.whl || give_up "the kit does not fit this Python $python_version: $(tail -n 2 "$OUT/install.log" | tr '\n' ' ')"
  "$PYTHON" - "$KIT" >"$scratch/missing" <<'EOF'
import importlib.metadata, pathlib, sys
for wheel in sorted(pathlib.Path(sys.argv[1], "fallback").glob("*.whl")):
    try:
        importlib.metadata.distribution(wheel.name.split("-")[0].replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        print(wheel)
EOF
  mapfile -t missing <"$scratch/missing"
  if [ "${#missing[@]}" -gt 0 ]; then
    say "missing here, taken from the kit: $(basename -a "${missing[@]}" | cut -d- -f1 | tr '\n' ' ')"
    install "${missing[@]}" || give_up "$(tail -n 2 "$OUT/install.log" | tr '\n' ' ')"
  fi
else
  say "no kit in $KIT: what is installed here must do"
fi
export PYTHONPATH="$site:$repository${PYTHONPATH:+:$PYTHONPATH}"

# NIXL's GDS plugins want libcufile.so.0 and libcudart.so.13 of the loader; torch brings both in folders of its own.
libraries="$("$PYTHON" - <<'EOF'
import glob, os, site, sys
folders = [*sys.path, *site.getsitepackages(), "/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"]
found = []
for name in ("libcudart.so.1[23]", "libcufile.so.0"):
    for folder in folders:
        places = (f"{folder}/nvidia/cu13/lib", f"{folder}/nvidia/cuda_runtime/lib", f"{folder}/nvidia/cufile/lib", folder)
        hits = [place for place in places if place and glob.glob(os.path.join(place, name))]
        if hits:
            found.append(hits[0])
            break
print(":".join(dict.fromkeys(found)))
EOF
)"
export LD_LIBRARY_PATH="$libraries${libraries:+${LD_LIBRARY_PATH:+:}}${LD_LIBRARY_PATH:-}"
# Nothing is written beside the sources, nor to a home that may not be there.
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 TRITON_CACHE_DIR="$scratch/triton" HOME="${HOME:-$scratch}"
export CUFILE_ENV_PATH_JSON="${CUFILE_ENV_PATH_JSON:-$repository/nixl_offload/configs/cufile.json}"
export CUFILE_LOGGING_LEVEL=ERROR CUFILE_LOGFILE_PATH="$scratch/cufile.log"
cd "$repository" || give_up "no repository at $repository"

{
  echo "libraries: ${libraries:-none found}"
  "$PYTHON" - <<'EOF'
import importlib
for name in ("torch", "triton", "numpy", "cupy", "pydantic", "blake3", "xxhash", "nixl._api", "kvikio"):
    try:
        module = importlib.import_module(name)
        print(f"{name}: {getattr(module, '__version__', 'ok')} {getattr(module, '__file__', '')}")
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
EOF
  nvidia-smi
} >"$OUT/machine.txt" 2>&1
grep -E '^(nixl._api|kvikio|pydantic): .*(Error|cannot)' "$OUT/machine.txt" || true

tests_limit=$(($(left_s) < TEST_LIMIT_S ? $(left_s) : TEST_LIMIT_S))
say "tests, about ${tests_limit} s at most"
"$PYTHON" -m benchmarks.gpu.run_tests --out "$OUT" --seconds "$tests_limit" >"$scratch/tests.out" 2>&1
tests=$?

# The benchmark, with what time is left.
seconds=$(($(left_s) - 40))
[ "$seconds" -gt 60 ] || seconds=60
say "benchmark, about ${seconds} s"
timeout -k 15 $((seconds + 50)) "$PYTHON" -m benchmarks.gpu --dir "$DATA" --out "$OUT" --seconds "$seconds" \
  "${emulate[@]}" >"$scratch/benchmark.out" 2>&1
benchmark=$?
sed '/^gpu: /,$d' "$scratch/benchmark.out"
if [ ! -s "$OUT/table.txt" ]; then
  cp "$scratch/benchmark.out" "$OUT/benchmark-failed.log"
  tail -n 20 "$scratch/benchmark.out"
fi

# What one sees last: how the tests ended, then the table.
say "tests: $OUT/tests.log"
tail -n 34 "$scratch/tests.out"
say "benchmark: $OUT/benchmark.json, after $SECONDS s"
[ -s "$OUT/table.txt" ] && cat "$OUT/table.txt"
status=0
[ "$tests" -eq 0 ] || status=1
[ "$benchmark" -eq 0 ] || status=$((status + 2))
exit "$status"
