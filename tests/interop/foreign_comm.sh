#!/usr/bin/env bash
# A second, independent client of the sot-comm v1 folder, so that tests can let it and sotbus share one.
# It is written from the protocol's pages alone, with flock(1), link(1), cksum(1), jq 1.6 and coreutils.
# "S" cites the spec page's sections, "facts n" the facts page, "D n" the decisions (sot-comm part).
#
#   foreign_comm.sh ensure | join HANDLE ROOT | leave HANDLE | touch HANDLE | send FROM TO TEXT | poll HANDLE
#                   unread HANDLE | lock-hold SECS | lock-take BOUND | record LINE1 | hash
#   for vectors:    offset HANDLE | judge RECORD | mount PATH | handle TEXT
#
# Environment: SOT_COMM_HOME, SOT_SELF_HOST, SOT_LOCK_WAIT_SECS, SOT_INBOX_LOCK_WAIT_SECS, SOT_INBOX_READ_WAIT_SECS.
#   FOREIGN_MACHINE_ID    this machine's id (default: first line of /etc/machine-id; set but empty: none)
#   FOREIGN_HALF_SECS     a send writes half of its line, waits so long under the lock, then writes the rest
#   FOREIGN_HALF_STOP=1   a send writes half of its line and stops itself under the lock (SIGSTOP); the rest at a SIGCONT
#   FOREIGN_DIE_HALF=1    a send writes half of its line and kills itself
#   FOREIGN_CHECK_RECORD=1  a send appends only when inbox-lock-manager names this box's own lock manager
#   FOREIGN_MOUNTINFO, FOREIGN_PROC, FOREIGN_ME   stand-ins for /proc/self/mountinfo, /proc, this process's record
# shellcheck disable=SC2016  # jq programs have their own $
set -uo pipefail
shopt -u posix 2>/dev/null
export LC_ALL=C # byte semantics everywhere
umask 077       # S Layout: 0700 folders, 0600 files

ROOT=${SOT_COMM_HOME:-$HOME/.sot-comm}
[[ $ROOT == /* ]] || ROOT=$PWD/$ROOT
REG=$ROOT/registry.json LOCK=$ROOT/.registry.lock MANAGER=$ROOT/inbox-lock-manager
PROC=${FOREIGN_PROC:-/proc} MOUNTINFO=${FOREIGN_MOUNTINFO:-/proc/self/mountinfo}
HELD=0

say() { printf '%s\n' "$*" >&2; }
die() { say "$1"; exit "${2:-1}"; }
stamp() { date -u -d "$1" +%Y-%m-%dT%H:%M:%SZ; }
# Waits without a child process, so that a SIGKILL here leaves no orphan that holds our output or a lock.
nap() { read -rt "$1" <> <(:) || :; }
now_ms() { read -r NOW _ <"/proc/uptime"; NOW=$((10#${NOW/./} * 10)); }
# Sets MS from a number of seconds, fractions allowed.
to_ms() { local w=${1%%.*} f=${1#"${1%%.*}"}; f=${f#.}000; MS=$((10#${w:-0} * 1000 + 10#${f:0:3})); }
# A bound from the environment: the value of variable $1 when it is a number, else $2 (facts 14).
bound() { local v=${!1-}; [[ $v =~ ^[0-9]+(\.[0-9]+)?$ ]] && BOUND=$v || BOUND=$2; }

# --- names (S Handles; facts 3.1, 9) ---------------------------------------------------------------------------------

valid_handle() { [[ $1 =~ ^[A-Za-z0-9._-]{1,64}$ && $1 != *..* && $1 != -* ]]; }

HOST=${SOT_SELF_HOST:-}
if [[ -z $HOST ]]; then HOST=$(uname -n); HOST=${HOST%%.*}; HOST=${HOST//[[:space:]]/}; HOST=${HOST,,}; fi
MACHINE=${FOREIGN_MACHINE_ID-}
[[ -n ${FOREIGN_MACHINE_ID+set} ]] || { read -r MACHINE </etc/machine-id; } 2>/dev/null

# --- the folder and an empty registry (S Layout; facts 1, 2.5) -------------------------------------------------------

ensure() {
  local new=$REG.new.$$.$RANDOM
  mkdir -p -- "$ROOT" "$ROOT/inbox" "$ROOT/self" "$ROOT/read" || die "FAILED: $ROOT cannot be created"
  [[ -f $REG ]] && return 0
  if (set -C; printf '{"protocol_version": 1, "agents": {}}\n' >"$new") 2>/dev/null && sync -- "$new"; then
    link "$new" "$REG" 2>/dev/null # never replaces anything; a failure here is silent
  fi
  rm -f -- "$new"
}

# --- the mount under a folder (facts 3.5, 4) -------------------------------------------------------------------------

unoctal() { # decodes \ooo of $1 into OUT
  local s=$1 c
  OUT=
  while [[ $s == *\\* ]]; do
    OUT+=${s%%\\*} s=${s#*\\}
    if [[ $s =~ ^[0-7]{3} ]]; then printf -v c '%b' "\\0${s:0:3}"; OUT+=$c s=${s:3}; else OUT+=\\; fi
  done
  OUT+=$s
}

# The mount on top of $1: M_FS, M_SRC, M_VFS (its options), M_SUPER (the file system's). Longest whole-component
# match; on a tie the later line.
mount_of() {
  local line l r best=0
  M_FS='' M_SRC='' M_VFS='' M_SUPER=''
  while IFS= read -r line; do
    [[ $line == *' - '* ]] || continue
    read -ra l <<<"${line%%' - '*}"
    read -ra r <<<"${line#*' - '}"
    ((${#l[@]} >= 6 && ${#r[@]} >= 3)) || continue
    unoctal "${l[4]}"
    [[ $OUT == / || $1 == "$OUT" || $1 == "$OUT"/* ]] && ((${#OUT} >= best)) || continue
    best=${#OUT} M_VFS=${l[5]} M_SUPER=${r[2]}
    unoctal "${r[0]}"; M_FS=$OUT
    unoctal "${r[1]}"; M_SRC=$OUT
  done <"$MOUNTINFO"
}

# Does the mount found last prove a fresh read? 1 with MOUNT_WHY when not (facts 3.5).
proves_fresh_read() {
  MOUNT_WHY="the comm home's filesystem (${M_FS:-unknown}) does not prove a fresh read"
  case $M_FS in ext2 | ext3 | ext4 | xfs | btrfs | zfs | f2fs | tmpfs | nfs | nfs4) ;; *) return 1 ;; esac
  MOUNT_WHY='the comm home is mounted nocto, so no read of it is proved fresh'
  [[ ,$M_VFS,$M_SUPER, != *,nocto,* ]]
}

# The lock manager of the mount found last (facts 4), into OWN.
lock_manager() {
  OWN=none${MACHINE:+@$MACHINE}
  case $M_FS in
    nfs4) [[ -n $M_SRC && ,$M_SUPER, == *,vers=4.* && ,$M_SUPER, == *,local_lock=none,* ]] && OWN="nfs4 $M_SRC" ;;
    ext2 | ext3 | ext4 | xfs | btrfs | zfs | f2fs) [[ -n $MACHINE ]] && OWN="local $MACHINE" ;;
  esac
}

# --- the registry lock: records and judgement (S The registry lock; facts 3.1, 3.3, 3.4; D 4) ------------------------

# Start tick of pid $1 into START: field 22, the 20th after the last ")". 1: no such pid. 2: it cannot be read.
start_of() {
  local text f
  [[ -e $PROC/$1 ]] || return 1
  if ! text=$(cat "$PROC/$1/stat" 2>/dev/null); then [[ -e $PROC/$1 ]] && return 2; return 1; fi
  read -ra f <<<"${text##*) }"
  START=${f[19]-}
  [[ $START =~ ^[0-9]+$ ]] || return 2
}

# This process's own record. The holder is this shell, so its pid is $$.
own_record() {
  local name self ns boot='' r
  LC_ALL=C.UTF-8 name=${HOST//[^A-Za-z0-9._-]/_} # characters, not bytes
  LC_ALL=C
  ME_MACHINE=- ME_BOOT=- ME_NS=- ME_START=-
  mount_of "$(realpath -m -- "$ROOT")" 2>/dev/null
  # Proof fields only where /proc is this process's own and the mount proves a fresh read.
  if { read -r self _ </proc/self/stat; } 2>/dev/null && [[ $self == "$$" ]] && proves_fresh_read; then
    ME_MACHINE=${MACHINE:--}
    { read -r boot </proc/sys/kernel/random/boot_id; } 2>/dev/null
    ME_BOOT=${boot:--}
    ns=$(readlink "/proc/$$/ns/pid") && [[ $ns =~ ^pid:\[([0-9]+)\]$ ]] && ME_NS=${BASH_REMATCH[1]}
    start_of "$$" && ME_START=$START
  fi
  ME=${name:--}:$ME_MACHINE:$ME_BOOT:$ME_NS:$$:$ME_START
  if [[ -n ${FOREIGN_ME-} ]]; then ME=$FOREIGN_ME; IFS=: read -r r ME_MACHINE ME_BOOT ME_NS r ME_START <<<"$ME"; fi
  ME_NAME=${ME%%:*}
}

# Six fields, the pid all digits. (A "/" could lead a marker's name out of the folder.)
is_record() { [[ $1 =~ ^[^:/]*:[^:/]*:[^:/]*:[^:/]*:[0-9]+:[^:/]*$ ]]; }
valid_pid() { [[ $1 =~ ^[1-9][0-9]{0,9}$ ]] && (($1 <= 4294967295)); }
has_proof() { [[ $ME_MACHINE$ME_BOOT$ME_NS$ME_START != ---- ]]; }
known() { [[ -n $1 && $1 != - ]]; }
same() { known "$1" && [[ $1 == "$2" ]]; }

# Reads a record fresh: opens the folder first, then the file. 0: REC is a record. 2: REC is some other text.
# 3: gone or not read. 4: a directory.
fresh_read() {
  REC=
  { : <"$ROOT"; } 2>/dev/null || return 3
  [[ -d $1 ]] && return 4
  { exec 6<"$1"; } 2>/dev/null || return 3
  IFS= read -r REC <&6
  exec 6<&-
  is_record "$REC" || return 2
}

# Is the holder named by record $1 dead? Sets VERDICT (dead, alive, unprovable) and WHY; the first row that fits wins.
judge() {
  local name machine boot ns pid start rc
  VERDICT=unprovable
  if ! is_record "$1"; then WHY='it is not a record'; return; fi
  IFS=: read -r name machine boot ns pid start <<<"$1"
  if ! has_proof; then
    WHY='this box cannot prove a death'
  elif ! valid_pid "$pid"; then
    WHY='its pid is no pid that can be looked up'
  elif same "$boot" "$ME_BOOT" && same "$ns" "$ME_NS"; then
    start_of "$pid"; rc=$?
    if ((rc == 1)); then VERDICT=dead WHY='it has exited'
    elif ((rc == 2)); then WHY='its /proc entry cannot be read'
    elif known "$start" && [[ $start != "$START" ]]; then VERDICT=dead WHY='its pid now names another process'
    else VERDICT=alive WHY='it is running'; fi
  elif same "$machine" "$ME_MACHINE" && same "$name" "$ME_NAME" && known "$boot" && known "$ME_BOOT" &&
    [[ $boot != "$ME_BOOT" ]]; then
    VERDICT=dead WHY='its machine has rebooted since'
  elif ! same "$machine" "$ME_MACHINE" || ! same "$name" "$ME_NAME"; then
    WHY='it is on another machine'
  else
    WHY='it is in another pid namespace'
  fi
}

# --- the registry lock: take, reclaim, release (facts 3.2, 3.6, 3.7, 3.8) --------------------------------------------

# Puts our record at $1 by link(2), which never replaces anything. 0: ours. 1: it exists. 2: error in LINK_ERR.
link_record() {
  local tmp=$ROOT/.registry.lock.tmp.${ME//:/.} err a b rc
  LINK_ERR="cannot write $tmp"
  rm -f -- "$tmp" 2>/dev/null || return 2
  (set -C; printf '%s\n' "$ME" >"$tmp") 2>/dev/null || return 2
  if err=$(link "$tmp" "$1" 2>&1); then rc=0
  elif { a=$(stat -c %d:%i - <"$tmp") && b=$(stat -c %d:%i - <"$1") && [[ $a == "$b" ]]; } 2>/dev/null; then
    rc=0 # a LINK sent twice says "exists" of our own link
  elif [[ $err == *': File exists' ]]; then rc=1
  else LINK_ERR="cannot hard-link in $ROOT: ${err##*: }" rc=2; fi
  rm -f -- "$tmp"
  return "$rc"
}

in_chain() { local c; for c in "${CHAIN[@]}"; do [[ $c == "$1" ]] && return 0; done; return 1; }

# One look at a lock that is taken; $1 is the deadline in ms. 0: it was seen gone (or removed): retake at once.
# 1: still held: HOLDER, BLOCKER, WHY and BYHAND say how.
step() {
  local x marker rc name pid
  BYHAND=0
  fresh_read "$LOCK"; rc=$?
  case $rc in
    2) BYHAND=1 WHY="its record names no holder (${REC:-empty})"; return 1 ;;
    3) return 0 ;;
    4) BYHAND=1 WHY='held by an older version that records no holder'; return 1 ;;
  esac
  HOLDER=$REC CHAIN=("$REC")
  while :; do
    x=${CHAIN[-1]} BLOCKER=$x
    if ((${#CHAIN[@]} > 1)); then
      [[ $x == "$ME" ]] && has_proof && break # our own marker from earlier
      now_ms
      if ((NOW >= $1)); then
        WHY='its reclaim chain was still being walked at the deadline'
        [[ $LOOP == "$HOLDER "* ]] && BYHAND=1 WHY=${LOOP#* } # an earlier walk came to a loop
        return 1
      fi
    fi
    judge "$x"
    if [[ $VERDICT != dead ]]; then
      IFS=: read -r name _ _ _ pid _ <<<"$x"
      [[ $x != "$HOLDER" ]] && WHY="it is dead, but its reclaim by $name pid $pid did not finish: $WHY"
      return 1
    fi
    if ((${#CHAIN[@]} == 1)); then
      mount_of "$(realpath -- "$ROOT")"
      if ! proves_fresh_read; then WHY=$MOUNT_WHY; return 1; fi
    fi
    marker=$ROOT/.registry.lock.reclaim.${x//:/.}
    link_record "$marker"; rc=$?
    ((rc == 0)) && break
    if ((rc == 2)); then WHY=$LINK_ERR; return 1; fi
    if ! fresh_read "$marker"; then WHY="its reclaim marker $marker cannot be read"; return 1; fi
    if in_chain "$REC" && [[ $REC != "$ME" ]]; then
      BYHAND=1
      WHY="its reclaim marker $marker names $REC, which its reclaim chain already holds, so no reclaim can pass it"
      LOOP="$HOLDER $WHY"
      return 1
    fi
    CHAIN+=("$REC")
  done
  nap 1 # settle: a take that was under way before the marker is visible after it
  fresh_read "$LOCK"; rc=$?
  ((rc == 3)) && return 0
  if ((rc != 0)); then WHY='its record changed during the reclaim'; return 1; fi
  if ! in_chain "$REC"; then HOLDER=$REC BLOCKER=$REC WHY='it was taken again during the reclaim'; return 1; fi
  rm -f -- "$LOCK"
}

# The one FAILED line of a take that ended at its deadline (facts 3.8).
lock_failed() {
  local rc age=unknown mtime name machine boot ns pid start
  local hand="If its holder is dead, remove $LOCK by hand and retry."
  mtime=$(stat -c %Y "$LOCK" 2>/dev/null) && age=$(($(date +%s) - mtime))s
  if ((BYHAND)); then say "FAILED: registry lock $LOCK still held ($age old): $WHY. $hand"; return; fi
  fresh_read "$LOCK"; rc=$?
  if ((rc == 0)) && [[ $REC != "$HOLDER" ]]; then HOLDER=$REC BLOCKER=$REC; judge "$REC"; fi
  IFS=: read -r name machine boot ns pid start <<<"$HOLDER"
  if [[ -z $HOLDER ]]; then
    say "FAILED: registry lock $LOCK was not taken by the deadline: ${WHY:-no holder was read}. Retry."
  elif ((rc)); then
    say "FAILED: registry lock $LOCK was held by $name pid $pid start $start when last read ($WHY);" \
      'it may have been released since. Retry.'
  else
    # By hand where no box can prove the death: neither boot and namespace, nor machine, name and boot.
    known "$boot" && { known "$ns" || { known "$machine" && known "$name"; }; } && hand=
    say "FAILED: registry lock $LOCK is held by $name pid $pid start $start ($age old): $WHY." \
      "If it is dead, run any comm command on ${BLOCKER%%:*}.${hand:+ $hand}"
  fi
}

# Takes the lock within $1 seconds, or returns 1 with the FAILED line. One try and one step even with bound 0.
lock_take() {
  local deadline='' left rc
  HOLDER='' BLOCKER='' WHY='' LOOP='' BYHAND=0
  own_record
  while :; do
    link_record "$LOCK"; rc=$?
    ((rc == 0)) && { HELD=1; return 0; }
    ((rc == 2)) && { say "FAILED: registry lock $LOCK cannot be taken: $LINK_ERR"; return 1; }
    now_ms
    if [[ -z $deadline ]]; then to_ms "$1"; deadline=$((NOW + MS)); elif ((NOW >= deadline)); then break; fi
    step "$deadline" && continue
    now_ms
    left=$((deadline - NOW))
    ((left > 0)) || break
    printf -v left '0.%03d' $((left < 50 ? left : 50))
    nap "$left"
  done
  lock_failed
  return 1
}

lock_release() {
  ((HELD)) || return 0
  HELD=0
  rm -f -- "$LOCK"
}
trap lock_release EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# --- the registry (S registry.json; facts 2) -------------------------------------------------------------------------

# One good read into REGISTRY: up to three more tries in 200 ms on an error or zero bytes. 1 is unreadable.
registry_read() {
  local pause
  for pause in first 0 0.1 0.1; do
    if [[ $pause != first ]]; then nap "$pause"; { : <"$ROOT"; } 2>/dev/null; fi
    if REGISTRY=$(cat -- "$REG" 2>/dev/null) && [[ -n $REGISTRY ]]; then
      one_document <<<"$REGISTRY"; return
    fi
    [[ $pause == first && ! -e $REG && ! -L $REG ]] && return 1
  done
  return 1
}
one_document() { jq -es 'length == 1 and (.[0] | objects | .agents | type) == "object"' >/dev/null 2>&1; }

# Read, transform by the jq program (the last argument), synced temp file, rename: all under the registry lock.
# $1 is the lock's bound.
registry_update() {
  local tmp=$REG.tmp err ok=1
  lock_take "$1" || return 1
  shift
  if ! registry_read || ! jq "$@" <<<"$REGISTRY" >"$tmp" 2>/dev/null || ! one_document <"$tmp"; then
    say 'FAILED: the registry could not be read or updated, so nothing was written'
  elif ! err=$(sync -- "$tmp" 2>&1); then
    say "FAILED: the registry update could not be flushed (${err##*: }), so nothing was written"
  elif ! err=$(mv -fT -- "$tmp" "$REG" 2>&1); then
    say "FAILED: the registry update could not be renamed into place (${err##*: }), so nothing was written"
  else
    ok=0
  fi
  ((ok)) && rm -f -- "$tmp"
  lock_release
  return "$ok"
}

cmd_join() { # HANDLE ROOT: the whole entry is replaced (facts 2.2)
  local root repo
  root=$(realpath -e -- "$2") || die "FAILED: $2 is not a folder"
  repo=$(basename -- "$2")
  ensure
  bound SOT_LOCK_WAIT_SECS 10
  registry_update "$BOUND" --arg h "$1" --arg host "$HOST" --arg repo "$repo" --arg root "$root" \
    --arg now "$(stamp now)" '.agents[$h] = {host: $host, workspace_id: "", repo: $repo, root: $root, expertise: [],
      status: "idle", joined: $now, last_seen: $now}' || exit 1
  : >>"$ROOT/inbox/$1.jsonl" || exit 1 # an append-open: never truncates
  printf 'Joined sot-comm as @%s  (%s on %s).\n  inbox: %s\n' "$1" "$repo" "$HOST" "$ROOT/inbox/$1.jsonl"
}

cmd_leave() { # the row only: inbox and cursor stay (facts 8.6)
  ensure
  registry_read || die 'FAILED: the registry could not be read; nothing was removed'
  jq -e --arg h "$1" '.agents | has($h)' <<<"$REGISTRY" >/dev/null ||
    { echo "@$1 not in registry — nothing to do."; return; }
  bound SOT_LOCK_WAIT_SECS 10
  registry_update "$BOUND" --arg h "$1" 'del(.agents[$h])' || exit 1
  echo "Removed @$1 from the registry."
}

cmd_touch() { # only last_seen, only of an entry that exists; the lock's bound is 1 s (facts 2.2, 3.7)
  registry_update 1 --arg h "$1" --arg now "$(stamp now)" \
    'if .agents | has($h) then .agents[$h].last_seen = $now else . end'
}
touch_quietly() { cmd_touch "$1" >/dev/null 2>&1 || :; } # best effort, after a send or a poll

# --- the inbox (S The inbox; facts 4.1, 5) ---------------------------------------------------------------------------

first_line() { LINE1=; { IFS= read -r LINE1 <"$1"; } 2>/dev/null; }

# flock on descriptor 9, mode $1 (-x, -s), within $2 seconds: tries every 15 to 25 ms under an nfs4 manager, else a
# blocking wait. 0: got it. 1: the bound passed. Above: a fault.
flock_wait() {
  local end
  first_line "$MANAGER"
  if [[ $LINE1 != nfs4\ * ]]; then flock "$1" -w "$2" 9; return; fi
  to_ms "$2"; now_ms; end=$((NOW + MS))
  until flock "$1" -n 9; do
    (($? == 1)) || return 2
    now_ms; ((NOW < end)) || return 1
    nap "0.0$((15 + RANDOM % 11))"
  done
}

# Appends line $2 (without its newline) to @$1's inbox. 1 with REASON when nothing was filed.
append() {
  local inbox=$ROOT/inbox/$1.jsonl fd=/proc/$$/fd/8 len cut rc half err
  bound SOT_INBOX_LOCK_WAIT_SECS 2
  REASON='the append failed: cannot open its lock file'
  { exec 9<>"$ROOT/inbox/$1.lock"; } 2>/dev/null || return 1 # read-write, never write-only
  flock_wait -x "$BOUND"; rc=$?
  if ((rc)); then
    REASON="the append failed: flock $rc"
    ((rc == 1)) && REASON="the inbox lock for @$1 was held for ${BOUND}s — nothing was appended"
    exec 9>&-; return 1
  fi
  REASON='the append failed: cannot open the inbox'
  { exec 8>>"$inbox"; } 2>/dev/null || { exec 9>&-; return 1; } # opened under the lock
  # From here every look and every cut goes through descriptor 8 ($fd reopens its very file), never the path.
  len=$(stat -c %s - <&8)
  if ((len > 0)) && [[ $(tail -c 1 <"$fd" | od -An -tx1) != *0a* ]]; then
    cut=$(tail -n 1 <"$fd" | wc -c) # the bytes after the last newline, or all of them
    len=$((len - cut))
    err=$(truncate -s "$len" "$fd" 2>&1) || { REASON="the append failed: ${err##*: }"; exec 8>&- 9>&-; return 1; }
    say "note: cut $cut bytes of an unterminated line a dead writer left in @$1's inbox"
  fi
  half=$((${#2} / 2)) rc=0
  if [[ -n ${FOREIGN_DIE_HALF-} ]]; then printf '%s' "${2:0:half}" >&8; kill -KILL $$; fi
  if [[ -n ${FOREIGN_HALF_SECS-}${FOREIGN_HALF_STOP-} ]]; then
    err=$({ printf '%s' "${2:0:half}" >&8; } 2>&1) || rc=1
    if [[ -n ${FOREIGN_HALF_STOP-} ]]; then kill -STOP $$; else nap "$FOREIGN_HALF_SECS"; fi
    ((rc == 0)) && { err=$({ printf '%s\n' "${2:half}" >&8; } 2>&1) || rc=1; }
  else
    err=$({ printf '%s\n' "$2" >&8; } 2>&1) || rc=1
  fi
  ((rc == 0)) && { err=$(sync -- "$fd" 2>&1) || rc=1; }
  if ((rc)); then truncate -s "$len" "$fd"; REASON="the append failed: ${err##*: }"; fi
  exec 8>&-
  exec 9>&- # the lock goes last
  return "$rc"
}

cmd_send() { # FROM TO TEXT (facts 8.2): liveness first, then the line, then the append
  local state line
  not_sent() { die "FAILED -> @$TO: $1"; }
  TO=$2
  [[ -n $3 ]] || die 'usage: send FROM TO TEXT'
  valid_handle "$2" || not_sent "not a handle: \"$2\""
  ensure
  registry_read || not_sent "the registry could not be read, so @$2 could not be routed; nothing was sent"
  # Listed: a non-empty host. Live: a stamp sorting after the one 600 s ago (S registry.json; facts 2.3, 2.7).
  state=$(jq -r --arg t "$2" --arg old "$(stamp '600 seconds ago')" '.agents[$t]
    | if type != "object" or (.host | type) != "string" or .host == "" then "unlisted"
      elif (.last_seen | type) == "string" and .last_seen > $old and
        (.last_seen | test("\\A[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z\\z")) then "live"
      else "stale" end' <<<"$REGISTRY")
  [[ $state == unlisted ]] && not_sent "no box knows that handle: $2" # this client has no wire to ask on
  [[ $state == live ]] || not_sent "no live session holds @$2"
  if [[ -n ${FOREIGN_CHECK_RECORD-} ]]; then # S: appends only when line 1 is its own manager, never on bare none
    mount_of "$(realpath -- "$ROOT/inbox")"; lock_manager; first_line "$MANAGER"
    [[ $LINE1 == "$OWN" && $OWN != none ]] ||
      not_sent 'this box cannot take the inbox lock itself, and no daemon is reachable to file it'
  fi
  line=$(jq -c --arg f "$1" --arg t "$2" --arg m "$3" --arg ts "$(stamp now)" \
    '{from: $f, to: $t, repo: ((.agents[$f] | objects | .repo | strings) // ""), msg: $m, ts: $ts}' <<<"$REGISTRY") ||
    not_sent 'the line could not be built'
  append "$2" "$line" || not_sent "$REASON"
  echo "  filed -> @$2"
  touch_quietly "$1"
}

# --- lines: strict JSON, one object a line (facts 6; D 17) -----------------------------------------------------------

# stdin: lines; stdout: each as one JSON string for jq's fromjson, or "" when it is not strict JSON. jq 1.6 alone takes
# NaN, 01, .5, lone surrogates, raw control bytes and broken UTF-8, and its -R breaks characters at 4 KiB.
documents() {
  sed -E '
    h
    s/\\\\/_/g
    s/\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}/_/g
    /\\u[dD][89a-fA-F]/ b bad
    s#\\(["/bfnrt]|u[0-9A-Fa-f]{4})#_#g
    s/[\xc2-\xdf][\x80-\xbf]/_/g
    s/(\xe0[\xa0-\xbf]|\xed[\x80-\x9f]|[\xe1-\xec\xee\xef][\x80-\xbf])[\x80-\xbf]/_/g
    s/(\xf0[\x90-\xbf]|\xf4[\x80-\x8f]|[\xf1-\xf3][\x80-\xbf])[\x80-\xbf]{2}/_/g
    /[\\\x80-\xff]/ b bad
    s/"[^"\x01-\x1f]*"/$/g
    :token
    s/(^|[^A-Za-z0-9.+-])(true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?)([^A-Za-z0-9.+-]|$)/\1\6/
    t token
    /[^][{}:,$ \t\r]/ b bad
    g; s/[\\"]/\\&/g; s/\t/\\t/g; s/\r/\\r/g; s/.*/"&"/; b
    :bad
    s/.*/""/'
}
PARSED='inputs | (try fromjson catch null)' # jq: each line's value

# --- the cursor (S The inbox; facts 7; D 3) --------------------------------------------------------------------------

hash_of() { local h; h=$(tr -d '\n\000' | cksum); printf '%s-%s' "${h% *}" "${h#* }"; }
hash_line() { head -n "$1" "$SNAP" | tail -n 1 | hash_of; }

# Inbox and cursor of @$1 read once under a shared lock: SNAP (a private copy), TOTAL, OFFSET. 75: the lock is busy.
# FAULT is set when the lock failed for another reason and the read was made without it.
snapshot() {
  local tmp rc
  FAULT=
  tmp=$(mktemp) && exec 7<>"$tmp" && rm -f -- "$tmp" || return 1 # a file without a name: nothing to clean up
  SNAP=/proc/$$/fd/7
  bound SOT_INBOX_READ_WAIT_SECS 3
  if { exec 9<>"$ROOT/inbox/$1.lock"; } 2>/dev/null; then
    flock_wait -s "$BOUND"; rc=$?
    ((rc == 1)) && { exec 9>&-; return 75; }
    ((rc == 0)) || FAULT="code $rc"
  else FAULT='cannot open its lock file'; fi
  cat -- "$ROOT/inbox/$1.jsonl" >"$SNAP" || return 1
  CURSOR=$({ tr '\000' '?' <"$ROOT/read/$1.cursor"; } 2>/dev/null) # $() drops trailing newlines
  { exec 9>&-; } 2>/dev/null
  TOTAL=$(wc -l <"$SNAP")
  find_offset "$1"
}

find_offset() {
  local n=${CURSOR%% *} hash='' back=0
  [[ $CURSOR == *' '* ]] && hash=${CURSOR#* }
  OFFSET=0
  if [[ $n =~ ^[0-9]+$ ]]; then # a count: leading zeros allowed, too many digits are past the end
    n=${n#"${n%%[!0]*}"} n=${n:-0}
    ((${#n} > 15)) && n=$((TOTAL + 2))
    if ((n == TOTAL + 1)) && [[ -n $hash ]]; then OFFSET=$TOTAL back=1
    elif ((n > TOTAL)); then OFFSET=0
    elif ((n > 0)) && [[ -n $hash && $(hash_line "$n") != "$hash" ]]; then OFFSET=$((n - 1)) back=1
    else OFFSET=$n; fi
    ((back)) && say "note: the last line read from @$1's inbox was cut back; reading from the line before it"
  elif [[ $CURSOR =~ ^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$ ]]; then
    OFFSET=$(head -n "$TOTAL" "$SNAP" | tr -d '\000' | documents | jq -n --arg c "$CURSOR" --argjson total "$TOTAL" \
      "[$PARSED"' | if type == "object" then (.ts | strings) // "" else "" end]
       | map(. > $c) | index(true) // $total')
  fi
  return 0
}

batch() { head -n "$TOTAL" "$SNAP" | tail -n "+$((OFFSET + 1))"; } # this way round nobody gets a SIGPIPE

# Directed, unread mail (facts 6): an object, to is the handle, from is not. A NUL becomes a control byte, which no
# strict document holds, so its line never counts.
cmd_unread() {
  local rc
  if [[ ! -e $ROOT/inbox/$1.jsonl ]]; then echo '0 0'; return; fi
  snapshot "$1"; rc=$?
  ((rc == 75)) && die "the inbox for @$1 is being written — nothing was read" 75
  ((rc == 0)) || die "FAILED: the inbox of @$1 could not be read"
  printf '%s %s\n' "$TOTAL" "$(batch | tr '\000' '\001' | documents |
    jq -n --arg h "$1" "[$PARSED"' | select(type == "object" and .to == $h and .from != $h)] | length')"
}

cmd_poll() { # facts 8.1
  local rc tmp=$ROOT/read/$1.cursor.tmp.$$ shown
  ensure
  if [[ ! -e $ROOT/inbox/$1.jsonl ]]; then echo 'No messages.'; touch_quietly "$1"; return; fi
  snapshot "$1"; rc=$?
  if ((rc == 75)); then
    echo "the inbox for @$1 is being written — nothing was read; run comm-poll.sh again"; exit 75
  fi
  ((rc == 0)) || die "FAILED: the inbox of @$1 could not be read"
  [[ -n $FAULT ]] && echo "WARNING: the inbox lock for @$1 failed ($FAULT) — reading without it;" \
    "a line may show twice, none is lost"
  shown=$(batch | tr -d '\000' | documents | jq -n "[$PARSED | objects] | length") || exit 1
  batch | tr -d '\000' | documents | jq -jn "$PARSED"' | objects
    | "[\(.ts // "")] [\(.from // ""):\(.repo // "")] ", (.msg // .message // .text // ""), "\n"' || exit 1
  # The cursor only after the showing, with the hash of the bytes that were read; nothing for an empty batch.
  if ((TOTAL > OFFSET)); then
    printf '%s %s' "$TOTAL" "$(hash_line "$TOTAL")" >"$tmp" && mv -fT -- "$tmp" "$ROOT/read/$1.cursor" || exit 1
  fi
  ((shown)) || echo 'No new messages.'
  touch_quietly "$1"
}

cmd_record() { # LINE1: inbox-lock-manager by an exclusive create, only if absent (facts 4.1)
  local tmp=$ROOT/.inbox-lock-manager.${MACHINE:-none}.$$.$RANDOM
  ensure
  if (set -C; printf '%s\n%s' "$1" "${MACHINE:+$MACHINE$'\n'}" >"$tmp") 2>/dev/null && sync -- "$tmp" &&
    link "$tmp" "$MANAGER" 2>/dev/null; then echo recorded; else first_line "$MANAGER"; echo "kept $LINE1"; fi
  rm -f -- "$tmp"
}

main() {
  local cmd=${1-} need=2 left
  case $cmd in ensure | hash) need=1 ;; join) need=3 ;; send) need=4 ;; esac
  (($# == need)) || die "usage: see the head of ${0##*/}" 2
  case $cmd in
    join | leave | touch | poll | unread | offset) valid_handle "$2" || die "FAILED: not a handle: \"$2\"" ;;
  esac
  case $cmd in
    ensure) ensure ;;
    join | leave | touch | send | poll | unread | record) "cmd_$cmd" "${@:2}" ;;
    hash) hash_of; echo ;;
    lock-hold)
      ensure; bound SOT_LOCK_WAIT_SECS 10; lock_take "$BOUND" || exit 1; echo held
      # A signal that comes just before a read is seen after it, so no read is a long one.
      for ((left = $2; left > 0; left--)); do nap 1; done
      lock_release ;;
    lock-take) ensure; lock_take "$2" || exit 1; echo taken; lock_release ;;
    offset) snapshot "$2" || exit; echo "$OFFSET" ;;
    judge) own_record; judge "$2"; echo "$VERDICT: $WHY" ;;
    mount) mount_of "$2"; lock_manager; proves_fresh_read && echo "$OWN" fresh || echo "$OWN" "not fresh" ;;
    handle) valid_handle "$2" ;;
    *) die "usage: see the head of ${0##*/}" 2 ;;
  esac
}
main "$@"
