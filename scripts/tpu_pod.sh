#!/usr/bin/env bash
# Trains on a Cloud TPU slice of any number of hosts ("workers"), with gcloud. docs/pods.md says more.
#   scripts/tpu_pod.sh COMMAND --name NAME --zone ZONE --project PROJECT [OPTIONS] [-- MORE WORDS FOR dcvit.train]
#
# create    make the slice, or take the one of this name; one that was preempted is deleted before
# install   bring the commit that is checked out here to every worker, and install it there
# start     start dcvit.train on every worker, in the background; where a run is under way, none is added
# follow    show the log of worker 0 until the run has ended; the exit status is the run's
# run       create, install, start, follow; after a preemption all of it again, from the newest checkpoint
# delete    delete the slice, and the queued resource of its name
#
# --type TYPE --version VERSION    create, run: accelerator type and runtime version, as v5p-256 v2-alpha-tpuv5
# --queued, --spot                 create, run: ask by a queued resource and wait in line; Spot capacity
# --nfs SERVER:/EXPORT             install, run: mounted at /mnt/dcvit on every worker
# --config CONFIG --workdir DIR    start, run: a config of the checkout; a folder that all workers share
# --dry-run                        print the commands, run none
# DCVIT_POLL=30                    environment: seconds between two looks at a state

# shellcheck disable=SC2329  # functions are called by the command's name
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
poll=${DCVIT_POLL:-30} mount=/mnt/dcvit script=scripts/tpu_pod.sh
name='' zone='' project='' type='' version='' queued='' spot='' nfs='' config='' workdir='' words=()
dry='' lost='' commit=HEAD

say() { printf 'tpu_pod: %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$2" >&2; exit "$1"; }
misused() { die 2 "$* (see $script --help)"; }

quoted() { # the words as a line for a shell
  local word line=''
  for word; do [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] && line+=" $word" || line+=" ${word@Q}"; done
  printf '%s\n' "${line# }"
}
perform() { if [ -n "$dry" ]; then quoted "$@" >&3; else "$@"; fi; }
cloud() { perform gcloud compute tpus "$@" --zone="$zone" --project="$project" --quiet </dev/null; }
on_worker() { cloud tpu-vm ssh "$name" --worker="$1" --command="$2"; }

look_up() { cloud "$1" list --filter="name~/$name\$" --format="value($2)"; } # empty where none has this name
slice_state() { # the slice's, or else that of the request for it; empty where there is neither
  local asked state
  asked=$(look_up queued-resources state.state) || return # the first look: what is ACTIVE now has its slice by the next
  state=$(look_up tpu-vm state) || return
  printf '%s\n' "${state:-$asked}"
}

create() {
  local state before=- requested='' kind=tpu-vm words=(--version="$version")
  [ -z "$queued" ] || kind=queued-resources words=(--runtime-version="$version" --node-id="$name")
  [ -z "$spot" ] || words+=(--spot)
  while :; do
    state=$(slice_state) || return
    [[ $state = "$before" || -n $dry ]] || say "$name: ${state:-not there}"
    before=$state
    case $state$requested in
      READY*) return ;;
      "" | yes)
        cloud "$kind" create "$name" --accelerator-type="$type" "${words[@]}" || return
        requested=yes
        [ -z "$dry" ] || return 0
        ;;
      FAILEDyes) die 1 "the request failed; gcloud compute tpus queued-resources describe $name says why" ;;
      PREEMPTED* | TERMINATED* | UNKNOWN* | ACTIVE* | SUSPENDED* | FAILED) delete || return ;; # ACTIVE without slice
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
  [ -n "$dry" ] || git -C "$root" diff --quiet HEAD || say "what is not committed stays here: workers get ${commit::9}"
  [ -n "$dry" ] || folder=$(mktemp -d) || return
  perform git -C "$root" archive --format=tar.gz --output="$folder/dcvit.tar.gz" "$commit" || return
  cloud tpu-vm scp "$folder/dcvit.tar.gz" "$name:dcvit.tar.gz" --worker=all || return
  [ -n "$dry" ] || rm -r "$folder"
  on_worker all "$new && $(quoted bash "dcvit.new/$script" worker install "$nfs")"
}

start() {
  on_worker all "$(quoted bash "dcvit/$script" worker start --config "$config" --workdir "$workdir" "${words[@]}")"
}

follow() { # sets `lost` where the run is gone without an end
  local answer='' state
  while [[ $answer != *lost ]]; do
    on_worker 0 "bash dcvit/$script worker follow" || true # a broken connection too ends it: `status` knows better
    answer=$(on_worker 0 "bash dcvit/$script worker status") || answer=none
    [ -z "$dry" ] || return 0
    [[ ! $answer =~ ended\ ([0-9]+)$ ]] || return "${BASH_REMATCH[1]}"
    if [ "$answer" = none ]; then # nor one about the slice, where it is the connection from here that fails
      state=$(slice_state) || state=READY
      say "worker 0 does not answer; the slice: ${state:-gone}"
      [ "$state" = READY ] || break
    fi
    sleep "$poll"
  done
  lost=yes
  say "no run is under way on $name, and none has ended"
  return 75
}

run() {
  local status state
  create || return
  while :; do
    lost='' status=0
    { install && start && follow; } || status=$?
    [ "$status" != 0 ] || break
    sleep "$poll" # hosts go away before the slice's state says so
    until state=$(slice_state); do sleep "$poll"; done
    [[ -n $lost || $state != READY ]] || return "$status"
    say "interrupted: beginning again, from the newest checkpoint"
    until create; do sleep "$poll"; done # the same request was good before: it is capacity that lacks
  done
  [ -n "$dry" ] || say "done; $name is still there, and costs: delete it where it is not needed"
}

worker() { # what the functions above ask of this script on a worker
  local task=$1 state=$HOME/dcvit-run busy=''
  export DCVIT_VENV=$HOME/dcvit-venv
  mkdir -p "$state"
  exec 9>>"$state/lock" # every process of a run inherits it: it is locked while one of them lives
  flock -w 0.2 9 || busy=busy- # waits, for a look from here holds it for a moment
  case $busy$task in
    busy-install | busy-start) say "a run is under way on $(hostname): no $task" ;;
    busy-follow) tail -n 100 -F --pid="$(<"$state/pid")" "$state/log" ;;
    follow) tail -n 100 "$state/log" ;;
    *status) if [ -e "$state/status" ]; then echo "ended $(<"$state/status")"; else echo "${busy:-lost}"; fi ;;
    install) worker_install "$2" ;;
    start)
      cd "$HOME/dcvit"
      rm -f "$state/status"
      # shellcheck disable=SC2016  # variables of that shell
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
    [ -w "$mount" ] || sudo chmod a+rwxt "$mount" # a new export is root's
  fi
  if [ ! -x "$DCVIT_VENV/bin/python" ] && ! python3 -c 'import ensurepip, tomllib' 2>/dev/null; then
    python3 -m pip install --quiet --user uv # images of TPU VMs come with Python 3.10, which has no tomllib
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
  [[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || misused "--name $name: expected small letters, digits and -"
  [[ ${nfs:-x:/} =~ ^[^:/]+:/ ]] || misused "--nfs $nfs: expected SERVER:/EXPORT"
  [[ $workdir != *://* || $workdir = gs://* ]] || misused "--workdir $workdir: a folder, such as $mount/run, or gs://…"
  [[ -z $nfs || ${workdir:-$mount/} = "$mount"/* || $workdir = gs://* ]] || misused "--workdir $workdir: not below $mount, where --nfs is"
  [ -n "$dry" ] || command -v gcloud >/dev/null || die 2 "no gcloud on PATH: https://cloud.google.com/sdk/docs/install"
  [[ -n $dry || ! $command =~ ^(install|run)$ ]] || # the same one again after a preemption
    commit=$(git -C "$root" rev-parse --verify HEAD 2>/dev/null) || die 2 "$root is no git checkout with a commit"
  exec 3>&1 # for dry runs: stdout of the whole script, also from within $(…)
  "$command"
}

main "$@"; exit # in one line: an edit of this file does not change a run that goes on for days
