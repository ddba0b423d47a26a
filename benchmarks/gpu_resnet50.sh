#!/usr/bin/env bash
# ResNet-50 on one GPU with every engine, types and batches: one command, under 10 minutes.
#
#   bash benchmarks/gpu_resnet50.sh [OUT]          on a machine with an NVIDIA GPU
#   DEVICE=cpu bash benchmarks/gpu_resnet50.sh     a rehearsal with tiny sizes
#
# Environment: PYTHON (python3) runs the baselines, XLA_PYTHON (PYTHON) the engine xla, for
# machines where torch_xla has an interpreter of its own; LIMIT_S (540) ends it in time, and
# what was measured until then is reported. ACCBENCH_CUDA_PLUGIN names the PJRT plugin by hand.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" benchmarks/gpu_resnet50.py "${1:-runs/gpu-resnet50-$(date +%Y%m%d-%H%M%S)}" "${@:2}"
