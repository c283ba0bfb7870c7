#!/bin/sh
# Work pools and deployments, made or brought up to date. Runs in the image that the workers have, because Prefect
# records the folder from which a flow was deployed, and workers run it there.
set -eu

for pool in qinglan qinglan-trainer; do
    prefect work-pool inspect "$pool" >/dev/null 2>&1 || prefect --no-prompt work-pool create "$pool" --type process
done
prefect --no-prompt deploy --all --prefect-file deployments/prefect.yaml
