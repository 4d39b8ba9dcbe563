#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks the format of the C++ files that a change touches, and lints and type-checks the Python files. Ends with 1 when a
# check finds something or its tool is not installed. The tools come from `scripts/python-env.sh`, or from the PATH.
#
#   scripts/lint.sh [--all] [--tidy [BUILD]] [BASE]
#   scripts/lint.sh --files FILE...
#
#   BASE      check the C++ files that differ from this commit; by default from where the branch left origin/main, and from
#             the commit before the last one where the branch has not left it
#   --all     check all C++ files
#   --files   check these files, C++ and Python, as a pre-commit hook does
#   --tidy    run clang-tidy as well, on the same C++ sources; takes minutes. BUILD has compile_commands.json and is
#             build/dev by default. Configure it with -DCMAKE_UNITY_BUILD=OFF, so that each file has its own entry.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH=$PWD/build/venv/bin:$PATH

all=0 tidy='' base='' files=()
while [ $# -gt 0 ]; do
  case $1 in
    --all) all=1 ;;
    --tidy)
      tidy=build/dev
      if [ -d "${2:-}" ]; then tidy=$2; shift; fi
      ;;
    --files)
      shift
      for file in "$@"; do files+=("$(realpath --relative-to=. "$here/$file")"); done
      if [ $# -eq 0 ]; then exit 0; fi
      break
      ;;
    -*) sed -n '3,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    *) base=$1 ;;
  esac
  shift
done

failed=0
# check NAME COMMAND...: runs a check, and notes when it fails.
check() {
  local name=$1
  shift
  if "$@"; then echo "$name: clean"; else echo "$name: FAILED" >&2; failed=1; fi
}
# need TOOL HOW: whether a tool is there; says how to install it where it is not.
need() {
  command -v "$1" >/dev/null && return 0
  echo "$1: MISSING. $2" >&2
  failed=1
  return 1
}
tidy_each() { printf '%s\n' "$@" | xargs --max-procs="$(nproc)" --max-args=1 clang-tidy --quiet -p "$tidy"; }
environment='scripts/python-env.sh installs it into build/venv'

# The files to check, one a line.
changed_files() {
  local main
  if [ ${#files[@]} -gt 0 ]; then
    printf '%s\n' "${files[@]}"
    return
  fi
  if [ $all -eq 0 ] && [ -z "$base" ]; then
    main=$(git merge-base HEAD origin/main 2>/dev/null || true)
    if [ -n "$main" ] && [ "$main" != "$(git rev-parse HEAD)" ]; then base=$main; else base=HEAD~1; fi
    if ! git rev-parse --quiet --verify "$base^{commit}" >/dev/null; then
      echo "there is no earlier commit here: all files are checked" >&2
      all=1
    fi
  fi
  if [ $all -eq 1 ]; then
    git ls-files
  else
    git diff --name-only --diff-filter=d "$base"
  fi
  git ls-files --others --exclude-standard
}
if [ -n "$base" ] && ! git rev-parse --quiet --verify "$base^{commit}" >/dev/null; then
  echo "there is no commit $base here" >&2
  exit 2
fi
mapfile -t selected < <(changed_files | sort -u)
cpp=() sources=() python=()
for file in "${selected[@]}"; do
  [ -f "$file" ] || continue
  case $file in
    *.cpp | *.hpp | *.h | *.cu | *.cuh) cpp+=("$file") ;;&
    *.cpp) sources+=("$file") ;;
    *.py) python+=("$file") ;;
  esac
done

# The version stands in CMakeLists.txt; the changelog's newest entry is about it.
same_version() {
  local version
  version=$(sed -n 's/^project(hoist VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
  grep -m 1 '^## ' CHANGELOG.md | grep -qE "^## ${version//./\\.}( |\$)" && return 0
  echo "CMakeLists.txt says version ${version:-?}, and CHANGELOG.md begins with: $(grep -m 1 '^## ' CHANGELOG.md)" >&2
  return 1
}
if [ ${#files[@]} -eq 0 ]; then check version same_version; fi

if [ ${#cpp[@]} -gt 0 ] && need clang-format "$environment, or apt-get install clang-format (version 14)"; then
  version=$(clang-format --version | grep -oE '[0-9]+' | head -n 1)
  if [ "$version" = 14 ]; then
    check "clang-format (${#cpp[@]} files)" clang-format --dry-run -Werror "${cpp[@]}"
  else
    echo "clang-format: this is version $version, and 14 formats the tree; $environment" >&2
    failed=1
  fi
else
  [ ${#cpp[@]} -gt 0 ] || echo "clang-format: no C++ file differs"
fi

if [ ${#files[@]} -eq 0 ]; then python=(.); fi
if [ ${#python[@]} -gt 0 ] && need ruff "$environment"; then check ruff ruff check --quiet "${python[@]}"; fi

# PyTorch's and transformers' types come from the environment's packages, the extension's from a build's stubs. Without the
# stubs the extension's values are Any, and a function may return one.
types() {
  local interpreter=python3 stubs options=()
  if [ -x build/venv/bin/python ]; then interpreter=build/venv/bin/python; fi
  if ! "$interpreter" -c 'from importlib.util import find_spec; assert find_spec("torch") and find_spec("transformers")' 2>/dev/null; then
    echo "PyTorch and transformers are MISSING for $interpreter, and mypy needs their types: $environment" >&2
    return 1
  fi
  stubs=$(find build/*/python/hoist -maxdepth 1 -name _hoist.pyi -printf '%T@ %p\n' 2>/dev/null | sort -n | tail -n 1 || true)
  if [ -n "$stubs" ]; then
    export MYPYPATH=${stubs#* }
    MYPYPATH=${MYPYPATH%/hoist/_hoist.pyi}
  else
    echo "mypy: no build has the extension's stubs, so its types are not checked"
    options=(--disable-error-code import-not-found --no-warn-return-any)
  fi
  mypy --no-error-summary --python-executable "$interpreter" "${options[@]}" python/hoist
}
if [[ ${#files[@]} -eq 0 || " ${python[*]}" == *" python/hoist/"* ]] && need mypy "$environment"; then
  check "mypy --strict" types
fi

if [ -n "$tidy" ] && [ ${#sources[@]} -gt 0 ] && need clang-tidy "apt-get install clang-tidy"; then
  if [ -e "$tidy/compile_commands.json" ]; then
    # Sources that this build has left out (CUDA, MPI) have no entry.
    mapfile -t built < <(for file in "${sources[@]}"; do
      grep -qF "\"file\": \"$PWD/$file\"" "$tidy/compile_commands.json" && echo "$file"
    done)
    echo "clang-tidy: ${#built[@]} of ${#sources[@]} sources are in $tidy/compile_commands.json"
    if [ ${#built[@]} -gt 0 ]; then
      check clang-tidy tidy_each "${built[@]}"
    fi
  else
    echo "clang-tidy: $tidy/compile_commands.json is MISSING: cmake --preset dev -DCMAKE_UNITY_BUILD=OFF" >&2
    failed=1
  fi
fi
exit $failed
