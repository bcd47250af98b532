#!/usr/bin/env bash
# Writes the Homebrew formula of a release to standard output.
# Usage: scripts/deploy/formula.sh VERSION SHA256SUMS, a file with the sums of that release's archives.
set -euo pipefail
version=$1
text=$(sed "s/@VERSION@/$version/g" "$(dirname "$0")/tinyvllm.rb" | sed 1d)
for target in aarch64-apple-darwin aarch64-unknown-linux-musl x86_64-unknown-linux-musl; do
    sum=$(awk -v name="tinyvllm-$version-$target.tar.gz" '$2 == name { print $1 }' "$2")
    if [ ${#sum} != 64 ]; then
        echo "$2 has no sum of tinyvllm-$version-$target.tar.gz" >&2
        exit 1
    fi
    text=${text//@SHA256:$target@/$sum}
done
printf '%s\n' "$text"
