#!/usr/bin/env bash
# Prints a launch file with the image of launch/image.env in place of ${IMAGE}; IMAGE in the
# environment comes first.
#
#   launch/with_image.sh launch/kubernetes.yaml | kubectl apply -f -
#   launch/with_image.sh launch/skypilot.yaml >sky.yaml && sky launch sky.yaml
set -euo pipefail

if [ $# -ne 1 ] || [ ! -f "$1" ]; then
    sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
given=${IMAGE:-}
# shellcheck source=launch/image.env
source "$(dirname "$0")/image.env"
sed "s|\${IMAGE}|${given:-$IMAGE}|g" "$1"
