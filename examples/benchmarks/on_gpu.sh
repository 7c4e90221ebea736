#!/usr/bin/env bash
# The tests that need a GPU and all benchmarks on it:
#     examples/benchmarks/on_gpu.sh OUT [--minutes N] [--g-selfatt DIR] [--gevit DIR] [--platonic DIR] [--octic-vits DIR] \
#         [--att-gconvs DIR] [--lie-transformer DIR]
# Output goes to OUT. It continues after a failure and exits with a non-zero status. With --minutes it ends after about so
# many: each command has a share of them, prints what it has measured so far, and is named if it is not finished.
set -uo pipefail
out=$(realpath -m "${1:?OUT: the folder for the results}")
shift
minutes=""
if [[ ${1:-} == --minutes ]]; then
    minutes=${2:?--minutes: a number is needed}
    [[ $minutes =~ ^[0-9]+$ && $minutes -gt 0 ]] || { echo "--minutes: got $minutes, needed a positive integer" >&2; exit 2; }
    shift 2
fi
mkdir -p "$out"
cd "$(dirname "$0")/../.."
failed=0

# Runs a command for at most a share of the minutes, in per cent, or without a limit; its output goes to a file too.
run() {
    local share=$1 log=$2
    shift 2
    if [[ -n $minutes ]]; then
        local left=$((minutes * 60 - SECONDS)) most=$((minutes * share * 60 / 100))
        ((left > 5)) || { echo "not begun: $*"; return 0; }
        # Interrupted, pytest sums up what failed, and a benchmark ends the process that it measures.
        set -- timeout --signal INT --kill-after 5 "$((most < left ? most : left))" "$@"
    fi
    "$@" 2>&1 | tee "$log"
    case ${PIPESTATUS[0]} in
        0) ;;
        124 | 137) echo "not finished: $*" ;;
        *) failed=1 ;;
    esac
}

once=()
[[ -z $minutes ]] || once=(--repeats 1)

# A command of the benchmarks, in a precision, for a share of the minutes.
benchmark() {
    local share=$1 command=$2 dtype=$3
    shift 3
    run "$share" "$out/$command-$dtype.txt" python3 examples/benchmarks "$command" --device cuda --dtype "$dtype" \
        "${once[@]}" --out "$out/$dtype" "$@"
}

# All cores compile kernels, which are then in Triton's cache.
tests=(python3 -m pytest -q -m gpu -n auto --tb short)
first=(tests/test_devices.py tests/functional/points/test_triton.py)
run 30 "$out/tests-first.txt" "${tests[@]}" "${first[@]}"
if [[ -n $minutes ]]; then
    benchmark 8 frames float32 "$@"
    benchmark 8 frames bfloat16 "$@"
    benchmark 20 networks float32 "$@"
    benchmark 12 graphs float32 "$@"
fi
run 15 "$out/tests.txt" "${tests[@]}" tests --deselect "${first[0]}" --deselect "${first[1]}"
if [[ -n $minutes ]]; then
    for command in dense backends points layers rotary others fields attentive; do
        benchmark 10 "$command" float32 "$@"
    done
else
    benchmark 100 all float32 "$@"
    benchmark 100 frames bfloat16 "$@"
fi
benchmark 10 layers bfloat16 "$@"
exit $failed
