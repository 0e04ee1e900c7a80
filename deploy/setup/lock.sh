#!/usr/bin/env bash
# Resolves all dependencies of all extras in a scratch environment and writes their versions:
# `lock.sh python3 2.13.0 deploy/locks/constraints.txt`.
#
# torch is not locked, because each host needs its own build; nor are packages that only a CUDA build of torch requires.
set -euo pipefail
python=$1 torch=$2 output=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$python" -m venv "$scratch/venv"
deploy/setup/torch.sh "$scratch/venv/bin/pip" "$torch" cpu
"$scratch/venv/bin/pip" install --quiet 'pip>=25.1' # which knows dependency groups
"$scratch/venv/bin/pip" install --quiet -e '.[all,analysis]' --group dev
{
    echo "# Written by \`make lock\`: the versions that \`make\` installs. torch is chosen by deploy/setup/torch.sh."
    "$scratch/venv/bin/pip" freeze --all --exclude-editable --exclude torch --exclude pip | LC_ALL=C sort --ignore-case
} >"$scratch/constraints.txt"
mv "$scratch/constraints.txt" "$output"
echo "$(grep -c == "$output") packages locked in $output"
