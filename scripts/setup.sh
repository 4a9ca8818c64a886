# Sourced by the commands of this folder: makes what they need in .venv and build, and says so. Does nothing twice.
#   setup_python [EXTRA]   virtual environment with this project (in place) and its dependencies
#   setup_native TARGET..  the fork of llama.cpp and libclover
#   setup_plain            an unmodified llama.cpp

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
export PATH="$root/.venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '\n== %s\n' "$*" >&2; }

# Run a command whose output only matters when it fails.
quietly() {
    local log=$root/build/setup.log
    mkdir -p "$root/build"
    if ! "$@" >"$log" 2>&1; then
        cat "$log" >&2
        echo "failed: $*" >&2
        return 1
    fi
}

setup_python() {
    local extra=${1:-} stamp
    stamp=$root/.venv/stamp${extra:+-$extra}
    [ "$stamp" -nt "$root/pyproject.toml" ] && return
    say "Python environment in .venv${extra:+ (with what the '$extra' extra needs; torch is large)}"
    [ -x "$python" ] || python3 -m venv "$root/.venv"
    quietly "$python" -m pip install "cmake>=3.21" ninja
    quietly "$python" -m pip install --config-settings=wheel.cmake=false -e "$root${extra:+[$extra]}"
    if [ "$extra" = test ]; then # llama.h for Python, to run on our libraries: it needs none of its own
        local version
        version=$(PYTHONPATH=$root/cpp/fork "$python" -c 'import overlay; print(overlay.VERSION)')
        quietly "$python" -m pip install --no-deps --no-binary llama-cpp-python --config-settings=cmake.define.LLAMA_BUILD=OFF \
            "llama-cpp-python==$version"
    fi
    touch "$stamp"
}

setup_native() {
    configure "$root/build" OFF
    say "Building the fork of llama.cpp and libclover in build (the first time takes about 3 minutes on 2 cores)"
    NINJA_STATUS='[%f/%t, %es] ' ninja -C "$root/build" "$@" >&2
}

setup_plain() {
    configure "$root/build/plain" ON
    say "Building an unmodified llama.cpp in build/plain, to compare with (the first time takes about 3 minutes on 2 cores)"
    NINJA_STATUS='[%f/%t, %es] ' ninja -C "$root/build/plain" libraries llama-quantize >&2
}

configure() {
    local folder=$1 plain=$2 source=${CLOVER_LLAMA_SRC:-}
    grep -qsxF "CLOVER_LLAMA_SRC:PATH=$source" "$folder/CMakeCache.txt" && grep -qsxF "CLOVER_TOOLS:BOOL=ON" "$folder/CMakeCache.txt" &&
        [ -f "$folder/build.ninja" ] && return
    say "Configuring $folder"
    quietly cmake -S "$root/cpp" -B "$folder" -G Ninja -DPython3_EXECUTABLE="$python" -DCLOVER_LLAMA_SRC:PATH="$source" \
        -DCLOVER_PLAIN:BOOL="$plain" -DCLOVER_TOOLS:BOOL=ON
}
