#!/usr/bin/env bash
# The rows of the Fashion-MNIST table, one after the other, each resumed where it stopped: bench/vision/fashion.sh OUT [SEED...]
# One process of one thread. Every row sees the same images: 3 epochs, at most 40 CPU-minutes.
set -euo pipefail
out=${1:?where the runs go}
shift
export OMP_NUM_THREADS=1
for seed in "${@:-0}"; do
  for model in vit topk_dynamic topk_attention topk_attention_none mixer topk_attention_attend topk; do
    "${PYTHON:-python}" -m khot train --recipe fashion_mnist --model "$model" --seed "$seed" --epochs 3 \
      --out "$out/fashion_mnist-$model-$seed" --records "$out/fashion_mnist.jsonl" --progress false
  done
done
