#!/usr/bin/env bash
# Install a lock by PYTHON's pip, a line for each package: its place among all of them, its name and its size.
# usage: install.sh PYTHON LOCK
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
