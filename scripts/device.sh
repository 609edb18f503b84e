#!/usr/bin/env bash
# Checks and times the native engine on the GPU of this machine: environment, every kernel against its reference, graphs
# and engine, timings against torch. Needs `pip install '.[cuda,test]'` with a CUDA build of torch; takes about 8 minutes.
#
#   scripts/device.sh            exit 0 all passed, 1 something failed, 3 there is no GPU
#   scripts/device.sh --check    without a GPU: whatever a CPU can do of it, then exit 3 (1 if that failed)
#
# PYTHON chooses the interpreter, OUT the folder of the details (default ./device-out). It reads the GPU's settings and
# changes none.
set -uo pipefail
cd "$(dirname "$0")/.."

usage() {
    echo "usage: scripts/device.sh [--check]" >&2
    exit 2
}

check=no
case "${1-}" in
    '') ;;
    --check) check=yes ;;
    *) usage ;;
esac
[ $# -le 1 ] || usage

PYTHON=${PYTHON:-python3}
OUT=${OUT:-device-out}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TRITON_DEFAULT_FP_FUSION=1
unset TRITON_INTERPRET

table=()
failed=0

# step NAME SECONDS COMMAND…: runs it with a time limit, its output in $OUT/NAME.txt, and adds a row to the table.
step() {
    local name=$1 limit=$2 began=$SECONDS code=0 result
    shift 2
    timeout --kill-after=10 "$limit" "$@" >"$OUT/$name.txt" 2>&1 || code=$?
    case $code in
        0) result=ok ;;
        124 | 137) result="stopped after $limit s" ;;
        *) result="failed ($code)" ;;
    esac
    [ "$code" -eq 0 ] || failed=1
    table+=("$(printf '%-12s %-20s %4d s  %s' "$name" "$result" $((SECONDS - began)) "$(tail -n 1 "$OUT/$name.txt" | cut -c 1-90)")")
    echo "${table[-1]}"
}

environment() {
    "$PYTHON" - <<'PY'
import importlib.metadata, importlib.util, os, platform
import torch

print(platform.platform(), "Python", platform.python_version(), "cores", len(os.sched_getaffinity(0)))
for name in ("torch", "triton", "numpy", "autotune"):
    known = importlib.util.find_spec(name) is not None
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "from source" if known else "is not installed")
print("CUDA of torch", torch.version.cuda)
for index in range(torch.cuda.device_count()):
    facts = torch.cuda.get_device_properties(index)
    print(index, facts.name, f"sm_{facts.major}{facts.minor}", facts.multi_processor_count, "multiprocessors", facts.total_memory, "bytes")
PY
    local code=$?
    if command -v nvidia-smi >/dev/null; then
        nvidia-smi --format=csv --query-gpu=index,name,driver_version,compute_cap,memory.total,memory.used,power.limit,clocks.max.sm,clocks.max.mem,mig.mode.current,pcie.link.gen.current,pcie.link.width.current || true
        nvidia-smi topo -m || true
    else
        echo "nvidia-smi is not installed"
    fi
    return $code
}

report() {
    echo
    printf '%s\n' "${table[@]}"
    echo "details: $OUT"
}

environment >"$OUT/environment.txt" 2>&1 || {
    cat "$OUT/environment.txt"
    echo "torch cannot be imported by $PYTHON: pip install '.[cuda,test]'" >&2
    exit 1
}
cat "$OUT/environment.txt"
gpu=$("$PYTHON" -c 'import torch; print("yes" if torch.cuda.is_available() else "no")')

if [ "$gpu" = no ]; then
    if [ "$check" = no ]; then
        echo "no GPU was found: torch.cuda.is_available() is false. Nothing was checked; --check does what a CPU can." >&2
        exit 3
    fi
    step compile 600 "$PYTHON" scripts/compile_kernels.py --first
    step cases 600 "$PYTHON" scripts/bench_kernels.py --check
    step tests 300 "$PYTHON" -m pytest tests/device -q -p no:cacheprovider
    report
    echo "no GPU was found: the kernels compiled for sm80 and ran in the interpreter, nothing ran on a device."
    [ "$failed" -eq 0 ] && exit 3
    exit 1
fi

[ "$check" = no ] || echo "a GPU was found: --check changes nothing here"
quiet=(-m pytest -q -p no:cacheprovider --durations 10)
step kernels 240 "$PYTHON" "${quiet[@]}" tests/device/test_kernels.py --junitxml "$OUT/kernels.xml"
step engine 120 "$PYTHON" "${quiet[@]}" tests/device/test_engine.py --junitxml "$OUT/engine.xml"
# Every way of transfer is for a longer run: pytest tests/device
step graphs 100 "$PYTHON" "${quiet[@]}" tests/device/test_graphs.py -k "plain or memory" --junitxml "$OUT/graphs.xml"
step bench 180 "$PYTHON" scripts/bench_kernels.py --quick --out "$OUT/bench.jsonl"
sed '$d' "$OUT/bench.txt"
report
exit $failed
