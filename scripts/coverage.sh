#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the preset `coverage`, runs the fast tests and reports which lines and branches of the library they reach:
# build/coverage/report/index.html and summary.txt. Takes longer than scripts/test.sh, because nothing is optimised much.
#
#   scripts/coverage.sh [CTEST ARGUMENT...]
#
# Processes that a test kills write no counters, so what only they run (half of a commit, say) counts as not reached. The
# command line, the benchmarks, the examples and the Python package are not counted. Without gcovr 8 it is installed into
# build/gcovr, which needs the module venv (Debian: python3-venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install-deps.sh
export PATH=$PWD/build/gcovr/bin:$PATH
if ! gcovr --version 2>/dev/null | grep -q '^gcovr 8\.'; then
  python3 -c 'import ensurepip' 2>/dev/null ||
    { echo "gcovr 8 and Python's module venv are MISSING: apt-get install python3-venv" >&2; exit 1; }
  python3 -m venv build/gcovr
  build/gcovr/bin/pip install --quiet --disable-pip-version-check 'gcovr>=8,<9'
fi
cmake --preset coverage
NINJA_STATUS='[%f of %t, %e s] ' cmake --build --preset coverage
find build/coverage -name '*.gcda' -delete
# Programs that are built outside of the tree do not link the counters' library.
status=0
ctest --preset coverage --parallel $((2 * $(nproc))) --exclude-regex '^system\.embed_' "$@" || status=$?

mkdir -p build/coverage/report
# Headers are found by way of a link in the build folder. Kernels are compiled once for each instruction set, so a function
# can begin at several lines.
modules='(core|platform|aio|comm|optim_cpu|tiers|scheduler|zero|interchange|config|measure)/'
gcovr --root . --filter "$modules" --filter "build/coverage/include/hoist/$modules" --merge-mode-functions=separate \
  --exclude-throw-branches --gcov-suspicious-hits-threshold=0 -j "$(nproc)" --print-summary --txt build/coverage/report/summary.txt \
  --html-details build/coverage/report/index.html build/coverage
exit "$status"
