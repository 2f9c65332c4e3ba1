#!/bin/sh
# bases.sh BASE BUILD_BASE: makes the two images that deploy/Dockerfile starts from, if they are missing, of Debian's
# packages, so that no registry of images is needed. As root.
set -eu
base=$1 build_base=$2
if ! buildah inspect --type image "$base" > /dev/null 2>&1; then
    root=$(mktemp -d)
    trap 'rm -rf "$root"' EXIT
    debootstrap --variant=minbase --include=python3 bookworm "$root"
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/var/log/*
    container=$(buildah from scratch)
    buildah add -q "$container" "$root" /
    buildah commit -q --rm "$container" "$base"
fi
if ! buildah inspect --type image "$build_base" > /dev/null 2>&1; then
    container=$(buildah from "$base")
    buildah run --isolation chroot "$container" -- sh -c '
        apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
            g++ python3-pip python3-venv && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb'
    buildah commit -q --rm "$container" "$build_base"
fi
