#!/bin/sh
# What can be shown on a machine with one CUDA GPU and PyTorch, in less than 8 minutes: see gpu_one.py.
#   benchmarks/gpu_one.sh [parts]        PYTHON: the interpreter; OUT: a folder for gpu_one.json
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH="$PWD" OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
exec "${PYTHON:-python3}" benchmarks/gpu_one.py --out "${OUT:-benchmarks/out}/gpu_one.json" "$@"
