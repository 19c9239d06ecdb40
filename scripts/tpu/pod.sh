#!/usr/bin/env bash
# Trains on a Cloud TPU slice of any number of hosts ("workers") with gcloud. docs/clusters.md has the details.
#   scripts/tpu/pod.sh COMMAND --name NAME --zone ZONE --project PROJECT [OPTIONS] [-- OPTIONS OF dcvit.train]
#
# create    create the slice, or use the existing slice of this name; a preempted slice is deleted first
# install   copy the checked-out commit to every worker and install it there
# start     start dcvit.train on every worker in the background, unless a run is active there
# follow    print the log of worker 0 until the run ends, and exit with the status of the run
# run       create, install, start and follow; after a preemption, repeat them and resume from the latest checkpoint
# delete    delete the slice and the queued resource of its name
#
# --type TYPE --version VERSION    create, run: accelerator type and runtime version, such as v5p-256 v2-alpha-tpuv5
# --queued, --spot                 create, run: request a queued resource; request Spot capacity
# --nfs SERVER:/EXPORT             install, run: NFS export to mount at /mnt/dcvit on every worker
# --config CONFIG --workdir DIR    start, run: a config of the checkout; a folder that all workers share
# --dry-run                        print the commands without running them
# DCVIT_POLL=30                    environment variable: seconds between two checks of a state

# shellcheck disable=SC2329  # functions are called through the name of the command
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
poll=${DCVIT_POLL:-30} mount=/mnt/dcvit script=scripts/tpu/pod.sh
name='' zone='' project='' type='' version='' queued='' spot='' nfs='' config='' workdir='' words=()
dry='' lost='' commit=HEAD

say() { printf 'pod.sh: %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$2" >&2; exit "$1"; }
misused() { die 2 "$* (see $script --help)"; }

quoted() { # print the words as one line for a shell
  local word line=''
  for word; do [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] && line+=" $word" || line+=" ${word@Q}"; done
  printf '%s\n' "${line# }"
}
perform() { if [ -n "$dry" ]; then quoted "$@" >&3; else "$@"; fi; }
cloud() { perform gcloud compute tpus "$@" --zone="$zone" --project="$project" --quiet </dev/null; }
on_worker() { cloud tpu-vm ssh "$name" --worker="$1" --command="$2"; }

look_up() { cloud "$1" list --filter="name~/$name\$" --format="value($2)"; } # prints nothing if the name is unknown
slice_state() { # print the state of the slice or, without a slice, of its request; nothing if both are missing
  local asked state
  # The request is queried first: if it is ACTIVE, the second query finds its slice.
  asked=$(look_up queued-resources state.state) || return
  state=$(look_up tpu-vm state) || return
  printf '%s\n' "${state:-$asked}"
}

create() {
  local state before=- requested='' kind=tpu-vm words=(--version="$version")
  [ -z "$queued" ] || kind=queued-resources words=(--runtime-version="$version" --node-id="$name")
  [ -z "$spot" ] || words+=(--spot)
  while :; do
    state=$(slice_state) || return
    [[ $state = "$before" || -n $dry ]] || say "$name: ${state:-not found}"
    before=$state
    case $state$requested in
      READY*) return ;;
      "" | yes)
        cloud "$kind" create "$name" --accelerator-type="$type" "${words[@]}" || return
        requested=yes
        [ -z "$dry" ] || return 0
        ;;
      FAILEDyes) die 1 "the request failed; gcloud compute tpus queued-resources describe $name shows the reason" ;;
      PREEMPTED* | TERMINATED* | UNKNOWN* | ACTIVE* | SUSPENDED* | FAILED) delete || return ;; # ACTIVE: no slice
      *) sleep "$poll" ;;
    esac
  done
}

delete() {
  local state
  state=$(look_up queued-resources state.state) || return
  [ -z "$state$dry" ] || cloud queued-resources delete "$name" --force || return
  state=$(look_up tpu-vm state) || return
  [[ -z $state$dry || $state = DELETING ]] || cloud tpu-vm delete "$name"
}

install() {
  local folder=${TMPDIR:-/tmp} new="rm -rf dcvit.new && mkdir dcvit.new && tar -xzf dcvit.tar.gz -C dcvit.new"
  [ -n "$dry" ] || git -C "$root" diff --quiet HEAD ||
    say "uncommitted changes are not installed: workers get commit ${commit::9}"
  [ -n "$dry" ] || folder=$(mktemp -d) || return
  perform git -C "$root" archive --format=tar.gz --output="$folder/dcvit.tar.gz" "$commit" || return
  cloud tpu-vm scp "$folder/dcvit.tar.gz" "$name:dcvit.tar.gz" --worker=all || return
  [ -n "$dry" ] || rm -r "$folder"
  on_worker all "$new && $(quoted bash "dcvit.new/$script" worker install "$nfs")"
}

start() {
  on_worker all "$(quoted bash "dcvit/$script" worker start --config "$config" --workdir "$workdir" "${words[@]}")"
}

follow() { # sets `lost` if the run is gone without an exit status
  local answer='' state
  while [[ $answer != *lost ]]; do
    on_worker 0 "bash dcvit/$script worker follow" || true # also ends if the connection breaks: `status` distinguishes
    answer=$(on_worker 0 "bash dcvit/$script worker status") || answer=none
    [ -z "$dry" ] || return 0
    [[ ! $answer =~ ended\ ([0-9]+)$ ]] || return "${BASH_REMATCH[1]}"
    if [ "$answer" = none ]; then # without network access, the state of the slice is unknown too
      state=$(slice_state) || state=READY
      say "worker 0 does not answer; state of the slice: ${state:-not found}"
      [ "$state" = READY ] || break
    fi
    sleep "$poll"
  done
  lost=yes
  say "no run is active on $name, and no run has ended there"
  return 75
}

run() {
  local status state
  create || return
  while :; do
    lost='' status=0
    { install && start && follow; } || status=$?
    [ "$status" != 0 ] || break
    sleep "$poll" # hosts disappear before the state of the slice changes
    until state=$(slice_state); do sleep "$poll"; done
    [[ -n $lost || $state != READY ]] || return "$status"
    say "interrupted: restarting from the latest checkpoint"
    until create; do sleep "$poll"; done # an earlier request succeeded, so only capacity is missing
  done
  [ -n "$dry" ] || say "completed; $name still exists and costs money until it is deleted"
}

worker() { # runs on a worker, called by the functions above
  local task=$1 state=$HOME/dcvit-run busy=''
  export DCVIT_VENV=$HOME/dcvit-venv
  mkdir -p "$state"
  exec 9>>"$state/lock" # all processes of a run inherit the descriptor: the lock is held while one of them exists
  flock -w 0.2 9 || busy=busy- # waits because a `status` from here holds the lock for a moment
  case $busy$task in
    busy-install | busy-start) say "a run is active on $(hostname): skipped $task" ;;
    busy-follow) tail -n 100 -F --pid="$(<"$state/pid")" "$state/log" ;;
    follow) tail -n 100 "$state/log" ;;
    *status) if [ -e "$state/status" ]; then echo "ended $(<"$state/status")"; else echo "${busy:-lost}"; fi ;;
    install) worker_install "$2" ;;
    start)
      cd "$HOME/dcvit"
      rm -f "$state/status"
      # shellcheck disable=SC2016  # the inner shell expands these variables
      STATE=$state setsid bash -c '"$DCVIT_VENV/bin/python" -u -m dcvit.train "$@"
        echo $? >"$STATE/new" && mv "$STATE/new" "$STATE/status"' "$@" </dev/null >>"$state/log" 2>&1 &
      echo $! >"$state/pid"
      say "started on $(hostname), log in $state/log"
      ;;
  esac
}

worker_install() {
  local python=python3
  rm -rf "$HOME/dcvit"
  mv "$HOME/dcvit.new" "$HOME/dcvit"
  if [ -n "$1" ] && ! mountpoint -q "$mount"; then
    command -v mount.nfs >/dev/null ||
      { sudo apt-get -q update && sudo apt-get -qy -o DPkg::Lock::Timeout=600 install nfs-common; }
    sudo mkdir -p "$mount"
    sudo mount -t nfs "$1" "$mount"
    [ -w "$mount" ] || sudo chmod a+rwxt "$mount" # a new export belongs to root
  fi
  if [ ! -x "$DCVIT_VENV/bin/python" ] && ! python3 -c 'import ensurepip, tomllib' 2>/dev/null; then
    python3 -m pip install --quiet --user uv # images of TPU VMs have Python 3.10, without tomllib
    python3 -m uv python install --quiet 3.11
    python=$(python3 -m uv python find --managed-python 3.11)
  fi
  PYTHON=$python bash "$HOME/dcvit/scripts/setup.sh" tpu,data,lm,gcs
}

main() {
  local command=${1:---help} needed="name zone project" word
  case $command in
    -h | --help) awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "${BASH_SOURCE[0]}"; return ;;
    worker) "$@"; return ;;
    create) needed+=" type version" ;;
    start) needed+=" config workdir" ;;
    run) needed+=" type version config workdir" ;;
    install | follow | delete) ;;
    *) misused "unknown command $command" ;;
  esac
  while shift; [ $# -gt 0 ]; do
    case $1 in
      --) words=("${@:2}"); break ;;
      --dry-run) dry=yes ;;
      --queued | --spot) printf -v "${1#--}" yes ;;
      --name | --zone | --project | --type | --version | --nfs | --config | --workdir)
        [[ ${2:---} != --* ]] || misused "$1 needs a value"
        printf -v "${1#--}" %s "$2"
        shift
        ;;
      --?*=*) set -- = "${1%%=*}" "${1#*=}" "${@:2}" ;;
      *) misused "unknown option $1" ;;
    esac
  done
  for word in $needed; do [ -n "${!word}" ] || misused "$command needs --$word"; done
  [[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || misused "--name $name: expected lowercase letters, digits and -"
  [[ ${nfs:-x:/} =~ ^[^-:/][^:/]*:/ ]] || misused "--nfs $nfs: expected SERVER:/EXPORT"
  [[ $workdir != *://* || $workdir = gs://* ]] ||
    misused "--workdir $workdir: expected a folder, such as $mount/run, or gs://…"
  [[ -z $nfs || ${workdir:-$mount/} = "$mount"/* || $workdir = gs://* ]] ||
    misused "--workdir $workdir: expected a folder below $mount, where --nfs is mounted"
  [ -n "$dry" ] || command -v gcloud >/dev/null || die 2 "no gcloud on PATH: https://cloud.google.com/sdk/docs/install"
  [[ -n $dry || ! $command =~ ^(install|run)$ ]] || # a preempted run restarts with the same commit
    commit=$(git -C "$root" rev-parse --verify HEAD 2>/dev/null) || die 2 "$root: expected a git checkout with a commit"
  exec 3>&1 # stdout of the script, for dry runs inside $(…)
  "$command"
}

main "$@"; exit # on one line, so that bash does not read an edited file when a run of days ends
