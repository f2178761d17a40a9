#!/bin/sh
# Writes locks/cpu.txt and locks/gpu.txt from the .in files with uv. No index address is emitted.
set -e
cd "$(dirname "$0")"
over=$(mktemp)
grep '^torch==' cpu.in > "$over"
grep -vE '^vllm==' cpu.in > cpu.in.tmp
{
    echo "# CPU target: Linux x86-64, Python 3.11 or newer. Made by \`make lock\`, installed by \`make setup\`."
    echo "# vLLM is installed without its dependencies: the GPU-only ones are left out, and torch is newer than its own pin."
    grep -E '^(torch|vllm)==' cpu.in
    uv pip compile --quiet --python-version 3.11 --override "$over" --no-header --no-annotate cpu.in.tmp |
        grep -vE '^(torch==|triton==|nvidia-|cuda-)'
} > cpu.txt
{
    echo "# GPU target: Linux x86-64, Python 3.12, CUDA 13. Made by \`make lock\`; pip install -r locks/gpu.txt."
    uv pip compile --quiet --python-version 3.12 --python-platform x86_64-manylinux_2_34 --no-header --no-annotate gpu.in
} > gpu.txt
rm -f cpu.in.tmp "$over"
