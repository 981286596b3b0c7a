#!/usr/bin/env bash
# Token reduction on CIFAR-10: one base, then 2 epochs of fine-tuning from it per score and keep rate, each resumed where it stopped.
# bench/vision/cifar.sh OUT [KEEP...]   one process of one thread
# BASE=bench/results/vision/tokens-base.safetensors fine-tunes the base of the records instead of training one.
set -euo pipefail
out=${1:?where the runs go}
shift
export OMP_NUM_THREADS=1
model='{"image_size": 32, "in_channels": 3, "dim": 64, "num_heads": 4, "stem": "conv"}'
run() {
  "${PYTHON:-python}" -m khot train --recipe cifar10 --model vit --model_options "$model" --batch_size 64 --pad 2 --records "$out/cifar10.jsonl" --progress false "$@"
}
base=${BASE:-$out/tokens-base/model.safetensors}
[[ -n ${BASE:-} ]] || run --epochs "${EPOCHS:-12}" --lr 1e-3 --warmup_epochs 0.5 --out "$out/tokens-base"
for keep in "$@"; do
  for score in ${SCORES:-cls learned-sample random fused learned-straight learned-gumbel}; do
    case $score in
      fused) how='"score": "cls", "fuse": true' ;;
      learned-*) how="\"score\": \"learned\", \"gradient\": \"${score#learned-}\"" ;;
      *) how="\"score\": \"$score\"" ;;
    esac
    run --epochs 2 --lr 3e-4 --warmup_epochs 0.1 --weights "$base" --reduce "{\"at\": [1, 3, 4], $how}" \
      --keep "[$keep, $keep]" --out "$out/tokens-$score-$keep"
  done
done
