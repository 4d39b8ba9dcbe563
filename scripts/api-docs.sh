#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the API reference of the public headers and the Python package, with Doxygen: build/api/html/index.html. Ends with
# 1 when Doxygen finds a mistake in a comment; what has no comment is only counted (build/api/warnings.txt lists it).
#
#   scripts/api-docs.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v doxygen >/dev/null || { echo "doxygen is MISSING: apt-get install doxygen, or dnf install doxygen" >&2; exit 1; }

# The headers that cmake/HoistInstall.cmake installs, without the private ones.
read -ra open < <(sed -n 's/^set(open \(.*\))$/\1/p' cmake/HoistInstall.cmake)
declare -A seen
while [ ${#open[@]} -gt 0 ]; do
  header=${open[0]}
  open=("${open[@]:1}")
  [ -z "${seen[$header]:-}" ] || continue
  seen[$header]=1
  mapfile -t included < <(sed -n 's/^#include <hoist\/\([^>]*\)>.*/\1/p' "$header")
  open+=("${included[@]}")
done
mapfile -t headers < <(printf '%s\n' "${!seen[@]}" | grep -v '/detail/' | sort)
python=(python/hoist/{__init__,aio,optim/__init__,store}.py python/hoist/torch/{__init__,engine,optimizer,model/units,transformers}.py
  python/hoist/torch/deepspeed/{__init__,checkpoint,universal}.py)
# A build has the stubs of the extension.
stubs=$(find build/*/python/hoist -maxdepth 1 -name _hoist.pyi -printf '%T@ %p\n' 2>/dev/null | sort -n | tail -n 1 || true)

mkdir -p build/api
{
  cat docs/api/Doxyfile
  echo "PROJECT_NUMBER = $(sed -n 's/^project(hoist VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)"
  echo "OUTPUT_DIRECTORY = build/api"
  echo "WARN_LOGFILE = build/api/warnings.txt"
  echo "INPUT = docs/api/mainpage.md ${headers[*]} ${python[*]} ${stubs#* }"
} | doxygen -

undocumented=$(grep -c ' is not documented' build/api/warnings.txt || true)
# Doxygen takes a class for its base when both have one name, as hoist.torch.transformers.Trainer and its base have, and it
# does not know the class that a specialization of std::hash belongs to.
mistakes=$(grep -v -e ' is not documented' -e 'potential recursive class relation' -e 'scope for class std::hash' -e '^$' \
  build/api/warnings.txt || true)
echo "${#headers[@]} headers, ${#python[@]} Python files: build/api/html/index.html"
echo "$undocumented names have no comment (build/api/warnings.txt)"
if [ -n "$mistakes" ]; then
  echo "$(wc -l <<<"$mistakes") warnings:" >&2
  echo "$mistakes" >&2
  exit 1
fi
echo "no warnings"
