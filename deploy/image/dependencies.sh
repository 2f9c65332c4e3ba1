#!/bin/sh
# dependencies.sh PART...: makes /opt/slotcar, an environment with what these parts of slotcar need, and no pip.
set -eu
python3 deploy/image/requirements.py "$@" > /tmp/requirements.txt
python3 -m venv --without-pip /opt/slotcar
python3 -m pip --python /opt/slotcar/bin/python install --no-compile --requirement /tmp/requirements.txt
# Hashes instead of times in the bytecode: the same sources give the same layer, and no start looks at them again. torch
# has a file that only a newer Python reads.
python3 -m compileall -q -j 1 --invalidation-mode unchecked-hash -x /py312_ /opt/slotcar/lib
