#!/bin/sh
# Writes the cases of make_golden.py into FOLDER and runs GOLDEN_TEST on them. FENWICK_PYTHON names the Python to use; exits
# with 77 (ctest: skipped) where it lacks a package.
#   golden_reference.sh GOLDEN_TEST FOLDER
set -eu
python=${FENWICK_PYTHON:-python3}
"$python" -c 'import autograd, h5py, numpy' 2>/dev/null || {
    echo "skipped: $python lacks numpy, h5py or autograd (tools/test installs them and sets FENWICK_PYTHON)"
    exit 77
}
rm -rf "$2"
"$python" "$(dirname "$0")/make_golden.py" "$2"
FENWICK_GOLDEN_DIR=$2 exec "$1" --gtest_brief=1
