#!/usr/bin/env bash
# Tries everything that needs a GPU, in one command, and writes what came of it into docs/gpu.md:
#
#   tests/gpu/session.sh                                  25 minutes, in .venv, which it makes
#   tests/gpu/session.sh --python PATH                    with an environment that stands
#   tests/gpu/session.sh --minutes 9 --parts fsdp_2,step  a slice: what has a result is not run again
#   tests/gpu/session.sh --list                           the parts, without running any
#
# PYTHON (default python3) runs the session itself, which needs nothing but Python 3.11.
exec "${PYTHON:-python3}" "$(dirname "$0")/session.py" "$@"
