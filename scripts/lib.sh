# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts beside it; sourced, not run. Expects `set -euo pipefail`.

kvd_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
kvd_build=${KVD_BUILD:-$kvd_root/build}

# Runs a command as root: directly, or through sudo.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        echo "$0: this needs root: $*" >&2
        echo "$0: run it as root, or install sudo" >&2
        return 1
    fi
}

# Configures (once) and builds. $1: build folder; the rest: options for meson setup.
build_in() {
    local dir=$1
    shift
    if [ ! -f "$dir/build.ninja" ]; then
        meson setup "$dir" "$kvd_root" "$@" >"$dir.setup.log" 2>&1 || {
            cat "$dir.setup.log" >&2
            return 1
        }
        rm -f "$dir.setup.log"
    fi
    ninja -C "$dir" -j2 >"$dir/build.log" 2>&1 || {
        grep -E -A5 'error|FAILED' "$dir/build.log" | head -n 60 >&2
        echo "the build failed; all of it is in $dir/build.log" >&2
        return 1
    }
}

# Makes sure that at least $1 hugepages are free, and remembers what to put back.
kvd_added_hugepages=0
take_hugepages() {
    local want=$1 file=/proc/sys/vm/nr_hugepages now free
    now=$(cat $file)
    free=$(awk '/HugePages_Free/ { print $2 }' /proc/meminfo)
    [ "$free" -ge "$want" ] && return 0
    as_root sh -c "echo $((now + want - free)) > $file" 2>/dev/null || true
    kvd_added_hugepages=$(($(cat $file) - now))
    free=$(awk '/HugePages_Free/ { print $2 }' /proc/meminfo)
    [ "$free" -ge "$want" ]
}

put_back_hugepages() {
    [ "$kvd_added_hugepages" -gt 0 ] || return 0
    # As many fewer, not the number of before: somebody else may have taken some meanwhile.
    as_root sh -c "echo $(($(cat /proc/sys/vm/nr_hugepages) - kvd_added_hugepages)) > /proc/sys/vm/nr_hugepages" ||
        true
    kvd_added_hugepages=0
}
