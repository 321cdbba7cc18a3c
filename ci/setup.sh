#!/bin/sh
# Make .venv hold what requirements.lock says, and write the stamp (argument 1) once it does.
# `make setup` runs this, and only when the stamp is missing or older than what it stands for. Safe to run
# again after any failure: a .venv that is whole is kept, anything else at that place is made anew.
set -eu
cd "$(dirname "$0")/.."
exec </dev/null
stamp=${1:-.venv/.complete}
python=.venv/bin/python
want=$(cut -d. -f1,2 .python-version)
# The largest wheels take longer than uv's default of 30 s on a slow line.
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-180}"
tried=

say() { printf '%s\n' "setup: $*" >&2; }
die() {
    for line; do say "$line"; done
    exit 1
}

# A Python that can be used: of the wanted version, and able to make virtual environments (Debian ships
# that part separately).
usable() {
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || return 1
    [ "$version" = "$want" ] || { tried="$tried $1 is $version;"; return 1; }
    "$1" -c 'import ensurepip, venv' 2>/dev/null || { tried="$tried $1 lacks its venv module;"; return 1; }
}

uv_python() { # UV: the path of a wanted Python that this uv has, or downloads
    # --system: not the half-made .venv that may lie here.
    "$1" python find --system "$want" 2>/dev/null ||
        { "$1" python install "$want" >&2 && "$1" python find --system "$want"; }
}

bootstrap_uv() { # a uv of our own, from whatever Python 3 there is
    bootstrap=.venv-bootstrap
    python3 -m venv --clear "$bootstrap" >&2 && install_uv "$bootstrap/bin/python" && echo "$bootstrap/bin/uv"
}

install_uv() { # PYTHON: the version and hashes of the lock hold for the installer too
    uv_lock=${1%/bin/python}/uv.lock
    awk '/^[A-Za-z0-9]/ { own = /^uv==/ } own' requirements.lock >"$uv_lock"
    "$1" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r "$uv_lock" >&2
}

find_python() {
    for candidate in "python$want" python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}/versions/$want"*/bin/python \
        "$(pyenv root 2>/dev/null)/versions/$want"*/bin/python; do
        if usable "$candidate"; then base=$candidate && return; fi
    done
    say "no Python $want on this machine; trying to obtain one with uv"
    for obtain_uv in "command -v uv" bootstrap_uv; do
        if uv=$($obtain_uv) && candidate=$(uv_python "$uv") && usable "$candidate"; then
            base=$candidate && return
        fi
    done
    die "Python $want is missing: it is not on PATH, not among pyenv's versions, and uv could not obtain it." \
        "  seen:${tried:- no Python at all}" \
        "Install one of these, then run the same command again:" \
        "  macOS         brew install python@$want" \
        "  Ubuntu 24.04  apt-get install python$want python$want-venv" \
        "  Fedora        dnf install python$want" \
        "  pyenv         pyenv install $want" \
        "  uv            uv python install $want"
}

make_venv() {
    if [ -f .venv/pyvenv.cfg ] && usable "$python" && "$python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    find_python
    say "making .venv with $("$base" -c 'import sys; print(sys.executable, sys.version.split()[0])')"
    "$base" -m venv --clear .venv ||
        die "could not make .venv here ($(pwd)): see the lines above. Is the folder writable?"
}

install_packages() {
    # uv does not read pip's settings; a mirror of the package index that is named there counts for both.
    mirror=$("$python" -m pip config list 2>/dev/null | sed -n "s/^.*\.index-url='\(.*\)'\$/\1/p" | tail -n 1)
    if [ -n "$mirror" ]; then export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$mirror}"; fi

    say "installing the packages of requirements.lock into .venv (once; about 6 GB on Linux, 2 GB on a Mac)"
    if install_uv "$python" && "$python" -m uv --version >/dev/null 2>&1; then
        # The lock constrains builds as well: what a source distribution is built with is hashed like the rest.
        # Bytecode now, once: else every process compiles what it imports where Python may not write it
        # (PYTHONDONTWRITEBYTECODE, a read-only image), and one process of a run imports some 8000 files.
        "$python" -m uv pip sync --python "$python" --require-hashes --build-constraints requirements.lock \
            --compile-bytecode requirements.lock
    else
        say "uv is not to be had; pip installs the same lock, more slowly"
        "$python" -m pip install --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
    fi || die "the packages of requirements.lock are not all installed: see the error above." \
        "  free disk space here: $(df -Pk . | awk 'NR == 2 { printf "%.1f GB", $4 / 1e6 }')" \
        "  the package index must be reachable: UV_DEFAULT_INDEX or PIP_INDEX_URL names a mirror," \
        "  HTTPS_PROXY a proxy. Then run the same command again: it goes on where it stopped."
    "$python" -c 'import av, cv2, pyarrow, torch' ||
        die "the packages are installed, but one cannot be loaded on this system: see the error above."
}

rm -f "$stamp"
make_venv
install_packages
touch "$stamp"
say "done"
