#!/usr/bin/env bash
# All experiments of attentive group convolutions as in the paper, on a GPU, in one go:
#     examples/attentive_convolutions/on_gpu.sh OUT [options of the commands, for instance --data-dir DIR --seed 1]
# It goes on after a failure, and its exit status tells of it. Started again, it goes on where it was stopped.
set -uo pipefail
out=$(realpath -m "${1:?OUT: the folder for the results}")
shift
mkdir -p "$out"
cd "$(dirname "$0")/../.."
failed=0
for command in table1 table2 table3; do
    "${PYTHON:-python3}" examples/attentive_convolutions $command --accelerator gpu --out "$out" "$@" 2>&1 | tee -a "$out/log.txt" || failed=1
done
"${PYTHON:-python3}" examples/pictures.py --only attentive --out "$out" || failed=1
exit $failed
