#!/usr/bin/env bash
# All experiments on point clouds with the published sizes, on a GPU:
#     ESCNN_ATTENTION_DATA=DATA examples/point_clouds/on_gpu.sh OUT [options of all commands, for instance --seed 1]
# DATA: the folder with qm9.npz; otherwise the published files are downloaded, which lack the polarizability tensor.
# It continues after a failure and exits with a non-zero status. Running it again resumes.
set -uo pipefail
out=$(realpath -m "${1:?OUT: the folder for the results}")
shift
mkdir -p "$out"
cd "$(dirname "$0")/../.."
failed=0
for command in springs constellations qm9; do
    "${PYTHON:-python3}" examples/point_clouds $command --accelerator gpu --out "$out" "$@" 2>&1 | tee -a "$out/log.txt" || failed=1
done
exit $failed
