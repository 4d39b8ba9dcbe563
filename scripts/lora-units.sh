#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Describes a model of equal layers that LoRA trains, for `hoist plan --units FILE` and `check`: LAYERS layers, each of FROZEN
# parameters with adapters of TRAINED. hoist.torch.write_units() describes a model exactly (docs/pytorch.md).
#
#   scripts/lora-units.sh LAYERS FROZEN TRAINED
set -euo pipefail
[ $# -eq 3 ] || { sed -n '3,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
units=''
for i in $(seq "$1"); do
  units+=$(printf '\n{"name": "%d", "parameters": [{"name": "%d.base", "shape": [%d], "trainable": false}, ' "$i" "$i" "$2")
  units+=$(printf '{"name": "%d.lora", "shape": [%d]}]},' "$i" "$3")
done
printf '{"units": [%s\n]}\n' "${units%,}"
