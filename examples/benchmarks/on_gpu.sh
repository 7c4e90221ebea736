#!/usr/bin/env bash
# The tests that need a GPU and all benchmarks on it, in one go:
#     examples/benchmarks/on_gpu.sh OUT [--g-selfatt DIR] [--gevit DIR] [--platonic DIR] [--att-gconvs DIR] \
#         [--lie-transformer DIR]
# Everything is written below OUT. It goes on after a failure, and its exit status tells of it.
set -uo pipefail
out=$(realpath -m "${1:?OUT: the folder for the results}")
shift
mkdir -p "$out"
cd "$(dirname "$0")/../.."
failed=0
python3 -m pytest -q -m gpu tests 2>&1 | tee "$out/tests.txt" || failed=1
python3 examples/benchmarks all --device cuda --out "$out/float32" "$@" 2>&1 | tee "$out/float32.txt" || failed=1
python3 examples/benchmarks layers --device cuda --dtype bfloat16 --out "$out/bfloat16" 2>&1 \
    | tee "$out/bfloat16.txt" || failed=1
exit $failed
