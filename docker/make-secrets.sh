#!/bin/sh
# Writes what compose.yaml mounts as secrets, with random values. What is there already stays as it is.
#
#   docker/make-secrets.sh [FOLDER]      secrets/ if not given
#
# The folder is its owner's alone. The files in it can be read by everybody, because compose mounts them as they are,
# and the containers' users are not this machine's.
set -eu

folder=${1:-secrets}
umask 077
mkdir -p "$folder"
chmod 700 "$folder"

random() {
    od -An -N24 -tx1 /dev/urandom | tr -d ' \n'
}

# NAME TEXT: the file NAME, unless it is there. It ends without a line end, which some readers would take as a part.
keep() {
    [ -e "$folder/$1" ] && return
    printf %s "$2" >"$folder/$1"
    chmod 444 "$folder/$1"
    printf '%s\n' "$folder/$1"
}

read_back() {
    cat "$folder/$1"
}

for name in postgres_password prefect_password mlflow_password ledger_password valkey_password \
    s3_access_key s3_secret_key serve_key ray_token; do
    keep "$name" "$(random)"
done
keep prefect_auth "admin:$(random)"

# These follow from the ones above.
keep ledger_url "postgresql+psycopg://ledger:$(read_back ledger_password)@postgres:5432/ledger"
keep docket_url "redis://:$(read_back valkey_password)@valkey:6379/1"
keep valkey.conf "requirepass $(read_back valkey_password)"
keep s3.json "{\"identities\": [{\"name\": \"mlflow\", \"credentials\": [{\"accessKey\": \"$(read_back s3_access_key)\", \
\"secretKey\": \"$(read_back s3_secret_key)\"}], \"actions\": [\"Admin\", \"Read\", \"List\", \"Tagging\", \"Write\"]}]}"

# One file for each API key that a profile names: secrets/keys/OPENAI_API_KEY.
mkdir -p "$folder/keys"
chmod 755 "$folder/keys"
