#!/usr/bin/env bash
# Finds the Python that the lock was resolved for and hands over to infra/bootstrap.py.
# BESSEMER_PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
want="$(sed -n 's/^# python: *//p' infra/locks/cpu.txt)"

usable() { "$1" -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$want')" 2>/dev/null; }
find_python() {
    for candidate in "${BESSEMER_PYTHON:-}" "python$want" python3 python; do
        if [ -n "$candidate" ] && usable "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

if ! python="$(find_python)"; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "setup: no Python $want with venv found; installing it with apt-get" >&2
        { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y install "python$want" "python$want-venv"; } >&2 || true
    fi
    if ! python="$(find_python)"; then
        cat >&2 <<EOF
setup: Python $want (with the venv module) was not found.
  why:  the lock file infra/locks/cpu.txt pins builds for Python $want.
  fix:  apt-get install python$want python$want-venv     (Debian 12, as root)
        or name an interpreter: BESSEMER_PYTHON=/path/to/python$want make ...
EOF
        exit 1
    fi
fi
exec "$python" -m infra.bootstrap "$@"
