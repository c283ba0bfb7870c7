#!/bin/sh
# One database with its own user for each of Prefect, MLflow and the ledger. PostgreSQL's image runs this once, when its
# volume is empty.
set -eu

for name in prefect mlflow ledger; do
    password_file="${QINGLAN_SECRETS:-/run/secrets}/${name}_password"
    export password_file
    # psql reads the password itself: in its arguments everybody could see it.
    psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 --username "${POSTGRES_USER:-postgres}" --dbname postgres \
        --set name="$name" <<'SQL'
\set password `cat "$password_file"`
CREATE ROLE :"name" LOGIN PASSWORD :'password';
CREATE DATABASE :"name" OWNER :"name";
REVOKE CONNECT ON DATABASE :"name" FROM PUBLIC;
SQL
done
