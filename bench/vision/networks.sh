#!/usr/bin/env bash
# The rows of the table of networks, one after the other, each resumed where it stopped: [DATA=cifar10] bench/vision/networks.sh OUT [SEED...]
# One process of one thread. Every row sees the same images in the same order: EPOCHS (8) passes over the training images.
# The networks are small, so that three seeds of seven rows take an hour and a half: 16 patches of 7 x 7, dim 64, depth 4, about 0.22 M parameters;
# for CIFAR-10 64 patches of 4 x 4. SIZE=preset runs the preset `tiny` instead (49 or 64 patches, dim 96, depth 6, 0.73 M parameters).
set -euo pipefail
out=${1:?where the runs go}
shift
export OMP_NUM_THREADS=1
data=${DATA:-fashion_mnist}
pad=0
[[ $data == cifar10 ]] && pad=2
options() {
  [[ ${SIZE:-small} == preset ]] && { [[ $data == cifar10 ]] && echo '{"image_size": 32, "in_channels": 3}' || echo '{}'; return; }
  local common='"patch_size": 7, "dim": 64, "depth": 4' k=8 vit=4.5 mixer='"tokens_hidden": 256, "mlp_ratio": 5.25'
  [[ $data == cifar10 ]] && common='"image_size": 32, "in_channels": 3, "dim": 64, "depth": 4' k=32 vit=5.0 mixer='"tokens_hidden": 176'
  case $1 in
    vit) echo "{$common, \"num_heads\": 4, \"mlp_ratio\": $vit}" ;;
    mixer) echo "{$common, $mixer}" ;;
    *) echo "{$common, \"k\": $k}" ;;
  esac
}
for seed in "${@:-0}"; do
  for model in ${MODELS:-vit topk_dynamic topk_attention topk_attention_none mixer topk_attention_attend topk}; do
    "${PYTHON:-python}" -m khot train --recipe "$data" --model "$model" --model_options "$(options "$model")" --seed "$seed" \
      --epochs "${EPOCHS:-8}" --batch_size "${BATCH:-64}" --lr "${LR:-1e-3}" --warmup_epochs 0.5 --pad "$pad" \
      --out "$out/$data-$model-$seed" --records "$out/$data.jsonl" --progress false
  done
done
