#!/usr/bin/env bash
# All experiments of GSA-Nets as in the paper, on a GPU:
#     examples/gsa_nets/on_gpu.sh OUT [options of the commands, for instance --data-dir DIR --seeds 3]
# It continues after a failure and exits with a non-zero status. Running it again resumes.
set -uo pipefail
out=$(realpath -m "${1:?OUT: the folder for the results}")
shift
mkdir -p "$out"
cd "$(dirname "$0")/../.."
failed=0
for command in "table2 --data rotmnist" "table1" "table2 --data cifar10" "table2 --data pcam"; do
    # shellcheck disable=SC2086 # the words of a command are arguments of their own
    "${PYTHON:-python3}" examples/gsa_nets $command --accelerator gpu --out "$out" "$@" 2>&1 | tee -a "$out/log.txt" || failed=1
done
"${PYTHON:-python3}" examples/gsa_nets figure1 --out "$out" || failed=1
"${PYTHON:-python3}" examples/gsa_nets figure2 --out "$out" || failed=1
exit $failed
