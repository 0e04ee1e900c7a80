#!/usr/bin/env bash
# Compares the contracts with those of the main branch (or, on it, of the commit before): `breaking.sh path/to/buf`.
set -euo pipefail
buf=$(realpath "$1")
baseline=$(git rev-parse --verify --quiet origin/main || git rev-parse --verify --quiet main || true)
if [[ -z $baseline || $baseline == $(git rev-parse HEAD) ]]; then
    baseline=$(git rev-parse --verify --quiet 'HEAD^' || true)
fi
if [[ -z $baseline ]] || ! git cat-file -e "$baseline:protos/buf.yaml" 2>/dev/null; then
    echo "no earlier version of the contracts to compare with"
    exit 0
fi
# buf compares with an archive rather than with .git: a shallow clone or a worktree has no repository it could clone.
earlier=$(mktemp -d)
trap 'rm -rf "$earlier"' EXIT
git archive "$baseline" protos | tar -x -C "$earlier"
cd protos
"$buf" breaking --against "$earlier/protos"
