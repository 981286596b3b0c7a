#!/usr/bin/env bash
# One row per relaxation: TopKDynamicModel on Fashion-MNIST with another selection matrix each, at one small equal budget, each resumed
# where it stopped: bench/vision/relaxations.sh OUT [SEED...]
# One process of one thread. The network and the steps are those of networks.sh, with EPOCHS (2) passes over 55,000 images.
set -euo pipefail
out=${1:?where the runs go}
shift
export OMP_NUM_THREADS=1
for seed in "${@:-0}"; do
  for method in ${METHODS:-softrank softsort neuralsort sinkhorn halving perturbed sequential}; do
    options="{\"patch_size\": 7, \"dim\": 64, \"depth\": 4, \"k\": 8, \"method\": \"$method\"}"
    "${PYTHON:-python}" -m khot train --recipe fashion_mnist --model topk_dynamic --model_options "$options" --seed "$seed" \
      --epochs "${EPOCHS:-2}" --batch_size 64 --lr 1e-3 --pad 0 --out "$out/relaxation-$method-$seed" --records "$out/relaxations.jsonl" --progress false
  done
done
