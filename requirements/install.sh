#!/usr/bin/env bash
# Install a lock by PYTHON's pip, a line for each package: its place among all of them, its name and its size.
# usage: install.sh PYTHON LOCK
# Says what to do where pip's index has torch for CUDA only, whose libraries no lock of the CPU lane holds.
set -euo pipefail
all=$(grep -c == "$2")
PYTHONUNBUFFERED=1 "$1" -m pip install --no-deps --disable-pip-version-check --progress-bar off -r "$2" | {
  count=0
  while read -r word rest; do
    case $word in
      Collecting | Requirement)
        count=$((count + 1))
        name=${rest#already satisfied: }
        printf '  %3d of %d  %s\n' "$count" "$all" "${name%% *}"
        ;;
      Downloading | Using) [[ $rest == *"("* ]] && printf '             %s\n' "${rest##*(}" | tr -d ')' ;;
      Installing) echo "  writing $all packages, a minute or two" ;;
    esac
  done
}
if ! "$1" -c "import torch" 2> /dev/null; then
  "$1" -m pip uninstall --quiet --yes torch
  {
    echo "This torch is a build for CUDA, and does not start without its libraries. Name pip the index of PyTorch's CPU builds"
    echo "(PIP_EXTRA_INDEX_URL=..., as PyTorch's page \"Start Locally\" has it under CPU), and give the same command again."
  } >&2
  exit 1
fi
