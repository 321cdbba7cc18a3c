#!/bin/sh
# Put what requirements-metaworld.lock holds into .venv, see that this machine can draw without a screen, and draw once.
# `make metaworld` runs this. Safe to run again; needed again after `make setup` has changed .venv.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}

say() { printf '%s\n' "metaworld: $*" >&2; }

# One of these opens where OpenGL can draw without a screen.
can_draw() {
    "$python" -c 'import ctypes, sys
for library in ("libEGL.so.1", "libOSMesa.so.8"):
    try:
        sys.exit(ctypes.CDLL(library) is None)
    except OSError:
        continue
sys.exit(1)'
}

"$python" -m pip install --disable-pip-version-check --no-deps --require-hashes -r requirements-metaworld.lock
packages="libegl1 libegl-mesa0 libgl1-mesa-dri"
if [ "$(uname)" = Linux ] && ! can_draw; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages
    fi
    if ! can_draw; then
        say "nothing here can draw without a screen: neither libEGL.so.1 nor libOSMesa.so.8 is installed." \
            "Have somebody who may install them: apt-get install $packages (or libosmesa6 alone)," \
            "then run the same command again."
        exit 1
    fi
fi
"$python" -c 'from vla_finetuning.envs.stage import choose_gl
choose_gl()
from vla_finetuning.envs.metaworld import Metaworld
env = Metaworld("reach-v3", image_size=(64, 64), quality="fast")
seen, _ = env.reset(seed=0)
assert seen["pixels"].std() > 10, "Meta-World draws a picture of one colour"
env.close()'
say "python record.py --env.type metaworld --env.task reach-v3 --root data/reach records its expert"
