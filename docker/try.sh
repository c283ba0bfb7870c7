#!/bin/sh
# Builds both images, brings compose.yaml up from nothing, runs the pipeline in it, breaks it, and restores it from a
# backup; prints what took how long. Needs no GPU: the trainer's image is built with vLLM's and torch's builds for CPUs.
#
#   docker/try.sh                 with Docker's engine and Compose 2.24 or newer
#   docker/try.sh --install       where they are missing, on Debian as root: brings them for as long as this runs
#   docker/try.sh --keep          leaves the services running at the end
#   docker/try.sh --before HEAD~9 begins with the images of an earlier commit, and upgrades from them
#
# Nothing of a site on this machine is touched but the images' tags: the project is named qinglan-try, its files lie in a
# folder of /var/tmp. Where no image registry is reached, docker/base-images.sh makes what is needed (as root).
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/pyproject.toml")
export COMPOSE_PROJECT_NAME=qinglan-try COMPOSE_PROFILES=gpu QINGLAN_PREFECT_PORT=14200 QINGLAN_MLFLOW_PORT=15000 \
    QINGLAN_SERVE_PORT=18000
install=no keep=no before= failed=start
while [ $# -gt 0 ]; do
    case $1 in
    --install) install=yes ;;
    --keep) keep=yes ;;
    --before) before=$(git -C "$root" rev-parse --verify "$2^{commit}") && shift ;;
    *) echo "try: unknown option $1; --install, --keep or --before COMMIT" >&2; exit 2 ;;
    esac
    shift
done

site=$(mktemp -d /var/tmp/qinglan-try.XXXXXX)
chmod 755 "$site"
began=$(date +%s)

fail() {
    printf 'try: %s\n' "$1" >&2
    exit 1
}

# NAME COMMAND...: run it, and note how long it took.
step() {
    failed=$1 start=$(date +%s)
    shift
    printf '\n== %s\n' "$failed"
    "$@"
    printf '| %s | %s s |\n' "$failed" "$(($(date +%s) - start))" >>"$site/table"
    failed=
}

finish() {
    status=$?
    [ -z "$failed" ] || [ "$status" = 0 ] || {
        printf 'try: failed at: %s\n' "$failed" >&2
        [ ! -e "$site/compose.yaml" ] || compose logs --tail 30 >&2 || true
    }
    printf '\n| Step | Took |\n| --- | ---: |\n'
    cat "$site/table" 2>/dev/null || true
    printf '| all | %s s |\n' "$(($(date +%s) - began))"
    if [ "$keep" = yes ]; then
        printf 'left running: cd %s && COMPOSE_PROFILES=gpu docker compose --project-name qinglan-try ps\n' "$site"
        exit "$status"
    fi
    [ ! -e "$site/compose.yaml" ] || COMPOSE_PROFILES='*' compose down --volumes --timeout 20 >/dev/null 2>&1 || true
    docker volume rm --force qinglan-try_alone qinglan-try_alone_runs >/dev/null 2>&1 || true
    [ ! -e "$site/engine/pid" ] || { kill "$(cat "$site/engine/pid")"; sleep 3; }
    rm -rf "$site"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

compose() {
    (cd "$site" && docker compose "$@")
}

in_worker() {
    compose exec -T worker entrypoint "$@"
}

# Docker's engine in a folder, from the packages of Debian 13, which Debian 12's libraries carry too. It needs runc,
# containerd's and iptables' own packages are those of this machine.
bring_engine() {
    mkdir -p "$site/engine/plugins/cli-plugins"
    apt-get install --yes --no-install-recommends runc iptables debootstrap >/dev/null
    mirror=$(apt-get indextargets --format '$(SITE)' 'Label: Debian' 'Created-By: Packages' | head -n 1)
    (
        cd "$site/engine"
        echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >list
        mkdir lists
        set -- -o "Dir::Etc::SourceList=$PWD/list" -o Dir::Etc::SourceParts=- -o "Dir::State::Lists=$PWD/lists"
        apt-get "$@" update >/dev/null
        apt-get "$@" download docker.io docker-cli docker-compose docker-buildx containerd tini >/dev/null
        for package in *.deb; do dpkg-deb -x "$package" files; done
        rm -rf ./*.deb lists
        cp files/usr/libexec/docker/cli-plugins/* plugins/cli-plugins/
    )
    export PATH="$site/engine/files/usr/bin:$site/engine/files/usr/sbin:$PATH"
    export DOCKER_HOST="unix://$site/engine/socket" DOCKER_CONFIG="$site/engine/plugins"
    # A limit of its own keeps it from raising those that this machine may not raise.
    dockerd --data-root "$site/engine/data" --exec-root "$site/engine/run" --pidfile "$site/engine/pid" \
        --host "$DOCKER_HOST" --init-path "$site/engine/files/usr/bin/tini-static" \
        --default-ulimit nofile=4096:8192 --default-ulimit nproc=8192:8192 >"$site/engine/log" 2>&1 &
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
        docker info >/dev/null 2>&1 && return
        sleep 2
    done
    tail -n 5 "$site/engine/log" >&2
    fail "Docker's engine did not start"
}

find_engine() {
    docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1 && return
    [ "$install" = yes ] || fail "Docker's engine with Compose 2 does not answer here; on Debian, as root, --install brings it"
    bring_engine
}

# The names of others' images in compose.yaml.
published() {
    sed -n "s/.*\${QINGLAN_\($1\)_IMAGE:-\([^}]*\)}.*/\2/p" "$root/compose.yaml" | sort -u
}

get_base_images() {
    for image in $(published 'PYTHON\|POSTGRES\|VALKEY\|S3'); do
        docker image inspect "$image" >/dev/null 2>&1 || timeout 300 docker pull --quiet "$image" 2>/dev/null || {
            command -v debootstrap >/dev/null || fail "$image: can't be pulled, and debootstrap is not installed to replace it"
            "$root/docker/base-images.sh"
            break
        }
    done
    # trainer.Dockerfile copies CUDA's toolkit from an image. This one has an empty folder in its place.
    mkdir -p "$site/cuda/usr/local/cuda-13.0"
    tar -C "$site/cuda" -c . | docker import - qinglan-no-cuda:1 >/dev/null
}

# What pip is told on this machine, and the first folder of wheels that it knows.
read_pip() {
    python3 -m pip config list 2>/dev/null |
        sed -n "s/^[a-z:]*\.\(index-url\|extra-index-url\|trusted-host\|default-timeout\|cert\)='\(.*\)'$/\1 = \2/p" |
        grep -v 'file:' | sort -u -t ' ' -k 1,1 >"$site/settings" || true
    { echo '[global]'; cat "$site/settings"; } >"$site/pip.conf"
    wheels=
    for folder in $(python3 -m pip config list 2>/dev/null | sed -n "s/^[a-z:]*\.find-links='\(.*\)'$/\1/p"); do
        [ ! -d "$folder" ] || wheels=$folder
    done
}

# NAME ARGUMENT...: build docker/NAME.Dockerfile of $source.
build() {
    name=$1
    shift
    docker build --network=host --secret "id=pip,src=$site/pip.conf" --file "$source/docker/$name.Dockerfile" \
        --tag "qinglan-$name:$version" "$@" "$source" >"$site/$name.log" 2>&1 || { tail -n 40 "$site/$name.log"; return 1; }
    size=$(docker image inspect --format '{{.Size}}' "qinglan-$name:$version")
    base=$(docker image inspect --format '{{.Size}}' "$(published PYTHON)")
    printf '| image of the %s, over its base | %s MB |\n' "$name" "$(((size - base) / 1000000))" >>"$site/table"
}

build_trainer() {
    build trainer --build-arg LOCK=docker/trainer-cpu.lock --build-arg CUDA=qinglan-no-cuda:1 \
        --build-arg "TORCH=$(grep -o '^torch==[^ ]*' "$source/requirements.lock")" ${wheels:+--build-context "wheels=$wheels"}
}

# COMMIT: its files in a folder, which is what the images are built of.
take_source() {
    source=$site/source
    mkdir "$source"
    git -C "$root" archive "$1" | tar -C "$source" -x
}

# An image alone: COMMAND... of it as uid 1000, without capabilities, and with nothing to write to but what is mounted.
alone() {
    image=$1
    shift
    docker run --rm --read-only --cap-drop=ALL --security-opt=no-new-privileges --shm-size=2g \
        --tmpfs /tmp:exec --tmpfs /home/qinglan:mode=1777 --volume qinglan-try_alone:/srv/qinglan/.qinglan \
        --volume qinglan-try_alone_runs:/srv/qinglan/runs "$image" "$@"
}

lay_out_site() {
    mkdir -p "$site/profiles" "$site/data" "$site/backup"
    chmod 777 "$site/backup"
    cp -r "$source/docker" "$source/compose.yaml" "$site/"
    cp "$root/docker/try.compose.yaml" "$site/compose.override.yaml"
    (cd "$site" && sh docker/make-secrets.sh >/dev/null)
    sed 's/^extends: .*/extends: embedded_vllm/' "$root/docker/try.profile.yaml" >"$site/profiles/small.yaml"
    cat >"$site/profiles/mine.yaml" <<'MINE'
extends: small
serve: {deadline_ms: 60000}
automations: {crashed_after_s: 90, retry_after_s: 10}
MINE
    sed 's/^extends: .*/extends: mine/' "$root/docker/team.example.yaml" >"$site/profiles/team.yaml"
    # On a Ray cluster the answer judge, whose RL asks no service: Ray's nodes reach no simulator of the flow's machine.
    cat >"$site/profiles/judge.yaml" <<'JUDGE'
extends: answer_judge
embedded: {sample_train_rows: 80, sample_dev_rows: 24, sample_test_rows: 48, pretrain_steps: 20}
rl: {total_steps: 3, save_freq: 1, test_freq: 1, rollouts_per_prompt: 4, ppo_micro_batch_size_per_gpu: 32}
evaluate: {latency_queries: 3}
automations: {crashed_after_s: 90, retry_after_s: 10}
JUDGE
    sed 's/^name: .*/name: cluster/; s/^extends: .*/extends: judge/; s/^  # ray_/  ray_/' "$root/docker/team.example.yaml" \
        >"$site/profiles/cluster.yaml"
}

# PATH [BODY]: what Prefect's server answers.
prefect_api() {
    curl --silent --show-error --fail --user "$(cat "$site/secrets/prefect_auth")" --header 'content-type: application/json' \
        ${2:+--data "$2"} "http://127.0.0.1:$QINGLAN_PREFECT_PORT/api/$1"
}

# PROFILE DEPLOYMENT OPTION...: start a run; its id.
start_run() {
    profile=$1
    shift
    in_worker prefect deployment run --param "profile=$profile" "$@" >"$site/started"
    grep -o '[0-9a-f]\{8\}-[0-9a-f-]\{27\}' "$site/started" | head -n 1
}

state_of() {
    prefect_api "flow_runs/$1" | sed 's/.*"state_type":"\([A-Z]*\)".*/\1/'
}

# ID SECONDS: wait until the run is done.
wait_for_run() {
    until=$(($(date +%s) + $2))
    while state=$(state_of "$1" || echo UNREACHABLE) && [ "$state" != COMPLETED ]; do
        case $state in FAILED | CANCELLED) fail "run $1 ended as $state" ;; esac
        [ "$(date +%s)" -lt "$until" ] || fail "run $1 is $state after $2 s"
        sleep 3
    done
}

run_to_its_end() {
    wait_for_run "$(start_run team "$1")" 1500
}

# SERVICE PROFILE: a run whose worker is killed in RL, as a machine's failure would do it: the first process of the
# container, from outside, without a word to Docker.
kill_in_rl() {
    trained=$(in_worker sh -c 'ls runs/*/rl/rl.log | wc -l')
    run=$(start_run "$2" pipeline/pipeline --param 'overrides=["rl.seed=2"]')
    until=$(($(date +%s) + 1500))
    until [ "$(in_worker sh -c 'ls runs/*/rl/rl.log | wc -l')" -gt "$trained" ]; do
        case $(state_of "$run") in COMPLETED | FAILED | CRASHED) fail "run $run ended before its RL began" ;; esac
        [ "$(date +%s)" -lt "$until" ] || fail "the RL of run $run has not begun after 1500 s"
        sleep 1
    done
    kill -9 "$(docker inspect --format '{{.State.Pid}}' "$(compose ps --quiet "$1")")"
    wait_for_run "$run" 1500
}

# Training and generation as jobs of Ray, which outlive the container of their flow.
train_on_ray() {
    compose stop trainer
    COMPOSE_PROFILES=cluster compose up --detach --wait
    COMPOSE_PROFILES=cluster kill_in_rl submitter cluster
    COMPOSE_PROFILES=cluster compose rm --stop --force submitter ray-worker ray-head
    compose up --detach --wait
}

# Between runs: one that opens the ledger while PostgreSQL is away fails (docs/how-to/containers.md#what-goes-wrong).
restart_postgres() {
    compose restart postgres
    compose up --detach --wait
    run_to_its_end refresh/refresh
}

# Version 1 answers a question through the router. It is promoted by hand, as so small a pipeline shows no gain.
serve_a_model() {
    in_worker qinglan release promote 1 --force --reason 'docker/try.sh' --profile team
    COMPOSE_PROFILES=gpu,serve compose up --detach --wait serve
    question='{"model": "champion", "messages": [{"role": "user", "content": "虾青素怎么吃"}]}'
    until=$(($(date +%s) + 600))
    until curl --silent --include --header "authorization: Bearer $(cat "$site/secrets/serve_key")" \
        --header 'content-type: application/json' --data "$question" \
        "http://127.0.0.1:$QINGLAN_SERVE_PORT/v1/chat/completions" | tee "$site/answer" | grep -q 'x-qinglan-version: 1'; do
        [ "$(date +%s)" -lt "$until" ] || { cat "$site/answer"; return 1; }
        sleep 3
    done
    COMPOSE_PROFILES=gpu,serve compose rm --stop --force serve
}

# To the images of this checkout, where the site began with earlier ones; as a machine's restart, in any case.
upgrade_and_reboot() {
    if [ -n "$before" ]; then
        source=$root
        build orchestrator
        build_trainer
        cp -r "$source/docker" "$source/compose.yaml" "$site/"
    fi
    compose stop
    compose run --rm mlflow mlflow db upgrade postgresql+psycopg://mlflow@postgres:5432/mlflow
    compose down
    compose up --detach --wait
}

# What is kept: flow runs, the files of runs (a backup has no locks), the ledger, MLflow's models, its files.
count_what_is_kept() {
    prefect_api flow_runs/count '{}' && echo
    in_worker sh -c 'find runs -name "*.json*" | wc -l'
    compose exec -T postgres psql --username=ledger --tuples-only --no-align --command='select count(*) from calls' ledger
    compose exec -T postgres psql --username=mlflow --tuples-only --no-align --command='select count(*) from model_versions' mlflow
    compose exec -T s3 sh -c 'find /data -type f | wc -l'
}

# ARGUMENT...: tar with the volume of the store, which is stopped.
tar_store() {
    docker run --rm --user 0:0 --entrypoint tar --volume "${COMPOSE_PROJECT_NAME}_s3:/data" --volume "$site/backup:/backup" \
        "qinglan-orchestrator:$version" "$@"
}

back_up() {
    for name in mlflow prefect; do compose exec -T postgres pg_dump -U "$name" -Fc "$name" >"$site/backup/$name.dump"; done
    compose stop s3
    tar_store -C /data -czf /backup/s3.tar.gz .
    compose start s3
    compose run --rm --no-deps --volume "$site/backup:/backup" worker qinglan backup /backup/site --profile team
    compose exec -T postgres pg_dump -U ledger -Fc ledger >"$site/backup/ledger.dump"
}

restore() {
    compose down --volumes
    compose up --detach --wait postgres valkey s3
    for name in mlflow prefect ledger; do
        compose exec -T postgres pg_restore -U "$name" --no-owner --exit-on-error -d "$name" <"$site/backup/$name.dump"
    done
    compose stop s3
    tar_store -C /data -xzf /backup/s3.tar.gz
    compose run --rm --no-deps --volume "$site/backup:/backup" worker qinglan restore /backup/site --profile team
    compose up --detach --wait
}

failed='find an engine'
find_engine
read_pip
step 'base images' get_base_images
source=$root
[ -z "$before" ] || take_source "$before"
step 'build the orchestrator image' build orchestrator
step 'build the trainer image' build_trainer
step 'data stages in the orchestrator image, read-only' alone "qinglan-orchestrator:$version" \
    qinglan run refresh --profile embedded --set data.limit=60
failed='lay out a site'
lay_out_site
step 'compose up: healthy from nothing' compose up --detach --wait
step 'pipeline/pipeline to its end' run_to_its_end pipeline/pipeline
step 'the same with another seed, its worker killed in RL' kill_in_rl trainer team
step 'the answer judge on a Ray cluster, its submitter killed in RL' train_on_ray
step 'version 1 served by vLLM' serve_a_model
step 'PostgreSQL restarted, and a refresh' restart_postgres
step 'upgrade, down and up' upgrade_and_reboot
count_what_is_kept >"$site/before"
step 'backup' back_up
step 'all volumes removed and restored' restore
failed='compare what is kept'
count_what_is_kept >"$site/after"
diff "$site/before" "$site/after" || fail 'the restored site has other counts of runs, files, answers or models'
step 'pipeline/pipeline again, its stages reused' run_to_its_end pipeline/pipeline
failed=
docker stats --no-stream --format '| memory of {{.Name}} | {{.MemUsage}} |' | sed 's,/.*,|,' | sort >>"$site/table"
