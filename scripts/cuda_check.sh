#!/usr/bin/env bash
# Everything that takes an NVIDIA GPU, with one table at the end: ops, models, promises, bandwidth, and NVIDIA's checkers.
#
#     scripts/cuda_check.sh PROGRAM TESTS [MODEL…]
#
#     PROGRAM  target/release/tinyvllm
#     TESTS    what `cargo test --release --test cuda --no-run` names
#     MODEL    GGUF files or folders that `tinyvllm bench` measures; the built-in model is always measured
#
# Neither Rust nor CUDA's toolkit has to be on the machine: only the driver and the run-time compiler, whose folder
# TINYVLLM_CUDA_LIBRARIES may name. The golden models are those of the checkout with this script. What is printed on the
# way is kept in a folder, which is named at the end. BENCH_ARGS are further arguments of `tinyvllm bench`.
set -euo pipefail

if [ $# -lt 2 ]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit 2
fi
program=$(realpath "$1")
tests=$(realpath "$2")
shift 2
models=()
for model in "$@"; do models+=("$(realpath "$model")"); done
cd "$(dirname "$0")/.."

logs=$(mktemp -d)
table=$logs/table.txt
failed=0

# A line of the table: check NAME COMMAND…
check() {
    local name=$1 log=$logs/${1//[^a-zA-Z0-9._-]/_}.log start=$SECONDS result=pass
    shift
    echo "== $name"
    if ! "$@" 2>&1 | tee "$log"; then
        result=FAIL
        failed=1
    fi
    printf '%-70s %-6s %5d s\n' "$name" "$result" $((SECONDS - start)) >>"$table"
}

export TINYVLLM_REQUIRE_CUDA=1
check "self-test" "$program" self-test --device cuda --quick
"$tests" --list on_a_gpu:: | sed -n 's/: test$//p' >"$logs/tests.txt"
[ -s "$logs/tests.txt" ] || { echo "$tests has no tests for a GPU" >&2; exit 1; }
while read -r name; do
    check "$name" "$tests" --exact "$name" --nocapture </dev/null
done <"$logs/tests.txt"
# NVIDIA's checkers of memory and of barriers, which come with its toolkit, in prompts and in steps of 1 to 100 sequences.
sanitizer=$(command -v compute-sanitizer || true)
for tool in memcheck synccheck; do
    [ -n "$sanitizer" ] || { echo "skipped: compute-sanitizer is not there"; break; }
    check "$tool" "$sanitizer" --tool "$tool" --error-exitcode 9 "$program" bench --device cuda --model demo \
        --prompt-lens 300 --context-lens 40,700 --batch-sizes 1,20,100 --max-num-seqs 100 --output-len 3 --repeats 1
done
for model in demo "${models[@]}"; do
    # shellcheck disable=SC2086  # several arguments in one variable
    check "bench $(basename "$model")" "$program" bench --device cuda --model "$model" ${BENCH_ARGS:-}
done

printf '\n%-70s %-6s %7s\n' name result seconds
cat "$table"
echo "details: $logs"
exit "$failed"
