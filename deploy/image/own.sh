#!/bin/sh
# own.sh: installs the wheel in /dist for /opt/slotcar, but below /own.
set -eu
python3 -m pip --python /opt/slotcar/bin/python install --no-compile --no-index --no-deps --root /own /dist/*.whl
python3 -m compileall -q -j 1 -s /own --invalidation-mode unchecked-hash /own/opt/slotcar/lib
