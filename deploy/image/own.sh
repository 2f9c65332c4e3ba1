#!/bin/sh
# own.sh: installs the wheel in /dist for /opt/slotcar, but below /own, and lists there, for CycloneDX, all of both.
set -eu
python3 -m pip --python /opt/slotcar/bin/python install --no-compile --no-index --no-deps --root /own /dist/*.whl
python3 -m compileall -q -j 1 -s /own --invalidation-mode unchecked-hash /own/opt/slotcar/lib
cp -a /own/opt/slotcar/. /opt/slotcar
/opt/cyclonedx/bin/cyclonedx-py environment --output-reproducible --output-format JSON \
    --output-file /own/opt/slotcar/sbom.cdx.json /opt/slotcar/bin/python
