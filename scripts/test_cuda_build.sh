#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the extension with its CUDA kernels, in an environment of its own whose torch is a CUDA
# build, and runs the tests that need no GPU. Nothing is installed or compiled twice.
#
#   test_cuda_build.sh PYTHON FOLDER [PYTEST-ARGUMENT...]
#
#   CUDA_TORCH=torch==2.14.1    the torch to install, unless a CUDA build is there
#   TORCH_CUDA_ARCH_LIST=9.0    what to compile for; one architecture keeps it short
set -euo pipefail

base=$1 folder=$2
shift 2
say() { echo "==> CUDA build: $*"; }
nvcc=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc
command -v "$nvcc" > /dev/null || [ -x /usr/local/cuda/bin/nvcc ] || {
  say "not tested: nvcc was not found"
  exit 0
}

scripts/make_venv.sh "$base" "$folder"
python=$(cd "$folder" && pwd)/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1
is_cuda_build() { "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2> /dev/null; }
if ! is_cuda_build; then
  say "installing ${CUDA_TORCH:=torch==2.14.1} (several GB)"
  "$python" -m pip install -qq "$CUDA_TORCH"
  is_cuda_build || {
    say "not tested: $CUDA_TORCH is no CUDA build here (CUDA_TORCH names another)"
    exit 0
  }
fi
for file in build test; do
  [ -f "$folder/$file.stamp" ] && [ "$folder/$file.stamp" -nt "requirements/$file.txt" ] ||
    "$python" scripts/install_requirements.py "requirements/$file.txt" "$folder/$file.stamp"
done

# In folders of its own: the checkout's extension may be built for another torch.
out=$PWD/build/cuda
export DELTANET_CUDA=on TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
say "compiling"
start=$SECONDS
PATH=$(dirname "$python"):$PATH scripts/build_extension.sh "$python" \
  build --build-base build/cuda --build-lib "$out/lib" --build-temp "$out/objects"
say "built in $((SECONDS - start)) s"

say "tests"
cd tests # so that the package is the one that was built
DELTANET_CUDA_BUILD=1 PYTHONPATH=$out/lib "$python" -m pytest -q -m cuda_build test_cuda_build.py "$@"
