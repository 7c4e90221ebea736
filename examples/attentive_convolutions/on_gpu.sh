#!/usr/bin/env bash
# All experiments of attentive group convolutions as in the paper, on a GPU:
#     examples/attentive_convolutions/on_gpu.sh OUT [options of the commands, for instance --data-dir DIR --seeds 5]
# It continues after a failure and exits with a non-zero status. Running it again resumes.
set -uo pipefail
out=$(realpath -m "${1:?OUT: the folder for the results}")
shift
mkdir -p "$out"
cd "$(dirname "$0")/../.."
failed=0
# The paper has the best of four learning rates for the All-CNNs; 0.05 is that of the first table2.
for command in table1 table2 table3 "table2 --learning-rate 0.01" "table2 --learning-rate 0.1" "table2 --learning-rate 0.25"; do
    # shellcheck disable=SC2086 # the words of a command are arguments of their own
    "${PYTHON:-python3}" examples/attentive_convolutions $command --accelerator gpu --out "$out" "$@" 2>&1 | tee -a "$out/log.txt" || failed=1
done
"${PYTHON:-python3}" examples/pictures.py --only attentive --out "$out" || failed=1
exit $failed
