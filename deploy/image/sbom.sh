#!/bin/sh
# sbom.sh: writes what is installed in /opt/slotcar to /sbom.cdx.json, in CycloneDX's form.
set -eu
/opt/cyclonedx/bin/cyclonedx-py environment --output-reproducible --output-format JSON --output-file /sbom.cdx.json \
    /opt/slotcar/bin/python
