#!/bin/sh
# Prints the lines for .env that pin the images of others by digest, as the registries have them now. Needs buildx.
#
#   docker/pin-images.sh >> .env
set -eu

# compose.yaml has each as ${QINGLAN_NAME_IMAGE:-image:tag}.
sed -n 's/.*${\(QINGLAN_[A-Z0-9]*_IMAGE\):-\([^}]*\)}.*/\1 \2/p' "$(dirname "$0")/../compose.yaml" | sort -u |
    while read -r name image; do
        digest=$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$image")
        printf '%s=%s@%s\n' "$name" "$image" "$digest"
    done
