#!/bin/sh
# Secrets by file become environment variables; then the command takes over this process, and so gets its signals.
#
#   /run/secrets/NAME, /run/keys/NAME    the file's one line becomes NAME; names in small letters stay files
#   NAME__FILE=/some/path                the same for a file elsewhere; two underscores, because SSL_CERT_FILE and
#                                        its like mean themselves
set -eu

fail() {
    printf 'entrypoint: %s\n' "$1" >&2
    exit 78
}

give() {
    [ -f "$2" ] && [ -r "$2" ] || fail "$2: no file that this user can read; $1 comes from it, see docs/how-to/containers.md"
    value=$(cat -- "$2")
    case $value in
        '') fail "$2 is empty; write the value of $1 into it" ;;
        *'
'*) fail "$2 has several lines; $1 takes one" ;;
    esac
    eval "given=\${$1-\$value}"
    [ "$given" = "$value" ] || fail "$1 is set to something else than $2 holds; remove one of them"
    export "$1=$value"
}

[ "$#" -gt 0 ] || fail 'no command to run'

for file in "${QINGLAN_SECRETS:-/run/secrets}"/* "${QINGLAN_KEYS:-/run/keys}"/*; do
    case ${file##*/} in
        '*' | [!A-Z]* | *[!A-Z0-9_]*) ;;
        *) give "${file##*/}" "$file" ;;
    esac
done
for variable in $(env | sed -n 's/^\([A-Z][A-Z0-9_]*\)__FILE=.*/\1/p'); do
    eval "file=\${${variable}__FILE-}"
    give "$variable" "$file"
done
unset file given value variable

exec "$@"
