#!/usr/bin/env bash
# The tests that need a GPU and all benchmarks on it:
#     examples/benchmarks/on_gpu.sh OUT [--minutes N] [--g-selfatt DIR] [--gevit DIR] [--platonic DIR] [--att-gconvs DIR] \
#         [--lie-transformer DIR]
# Output goes to OUT. It continues after a failure and exits with a non-zero status. With --minutes it ends after about so
# many: the tests get a third, and every command the rest; unfinished commands are named.
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

# Runs a command for at most so many seconds, or without a limit; its output goes to a file too.
run() {
    local most=$1 log=$2
    shift 2
    if [[ -n $minutes ]]; then
        local left=$((minutes * 60 - SECONDS))
        ((left > 5)) || { echo "not begun: $*"; return 0; }
        set -- timeout --kill-after 5 "$((most < left ? most : left))" "$@"
    fi
    "$@" 2>&1 | tee "$log"
    case ${PIPESTATUS[0]} in
        0) ;;
        124 | 137) echo "not finished: $*" ;;
        *) failed=1 ;;
    esac
}

run "$((${minutes:-0} * 20))" "$out/tests.txt" python3 -m pytest -q -m gpu tests
once=()
commands=(all)
if [[ -n $minutes ]]; then
    once=(--repeats 1)
    commands=(graphs layers points rotary dense backends others fields attentive)
fi
for command in "${commands[@]}"; do
    run 100000 "$out/$command.txt" python3 examples/benchmarks "$command" --device cuda "${once[@]}" \
        --out "$out/float32" "$@"
done
run 100000 "$out/bfloat16.txt" python3 examples/benchmarks layers --device cuda --dtype bfloat16 "${once[@]}" \
    --out "$out/bfloat16"
exit $failed
