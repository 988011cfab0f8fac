#!/bin/sh
# Last step inside mmdebstrap, as in images/guest. Called as customize.sh ROOT_DIRECTORY.
set -eu
root=$1
"$(dirname "$(readlink -f "$0")")/../guest/customize.sh" "$root"
