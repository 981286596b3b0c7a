#!/usr/bin/env bash
# The rows of the Fashion-MNIST table, one after the other, each resumed where it stopped: bench/vision/fashion.sh OUT [SEED...]
# One process of one thread. Every row sees the same images in the same order: EPOCHS (3) passes over 55,000 images.
# The networks are small, so that three seeds of five rows take half an hour: 16 patches of 7 x 7, dim 64, depth 4, about 0.22 M parameters.
# SIZE=preset runs the preset `tiny` instead (49 patches, dim 96, depth 6, 0.73 M parameters).
set -euo pipefail
out=${1:?where the runs go}
shift
export OMP_NUM_THREADS=1
options() {
  [[ ${SIZE:-small} == preset ]] && { echo '{}'; return; }
  local common='"patch_size": 7, "dim": 64, "depth": 4'
  case $1 in
    vit) echo "{$common, \"num_heads\": 4}" ;;
    mixer) echo "{$common, \"tokens_hidden\": 256, \"mlp_ratio\": 5.25}" ;;
    *) echo "{$common, \"k\": 8}" ;;
  esac
}
for seed in "${@:-0}"; do
  for model in ${MODELS:-vit topk_dynamic topk_attention topk_attention_none mixer topk_attention_attend topk}; do
    "${PYTHON:-python}" -m khot train --recipe fashion_mnist --model "$model" --model_options "$(options "$model")" --seed "$seed" \
      --epochs "${EPOCHS:-3}" --batch_size "${BATCH:-64}" --lr "${LR:-1e-3}" --pad 0 --out "$out/fashion_mnist-$model-$seed" --records "$out/fashion_mnist.jsonl" --progress false
  done
done
