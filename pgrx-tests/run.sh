#!/usr/bin/env bash
# Runs all tests of pg_outbox: those of the extension's own crate, and those on real clusters.
#
#   pgrx-tests/run.sh [--all | --pg MAJOR | --brief MAJOR]… [--lint] [--jobs N] [ARGUMENT OF cargo test]…
#
#   --pg MAJOR     on PostgreSQL 15 (the default), 16 or 18; may be repeated
#   --brief MAJOR  the same, without the tests of destinations: what a sink's client does hangs little on the server's version
#   --all          on all three
#   --lint         rustfmt and clippy first
#   --jobs N       so many test programs at once; most of them wait most of the time (default: twice the processors)
#
# What else is given goes to `cargo test` for the tests on clusters: `run.sh --pg 16 --test delivery -- poison`.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# The tests of destinations, which --brief leaves out.
destinations=(answers connecting consumers conformance credentials endpoints harness_cluster harness_receiver http2 independent kafka
  kafka_errors nats secret_sources subscriptions)

majors=() brief='' lint='' jobs=$((2 * $(nproc))) rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --all) majors=(15 16 18) ;;
    --pg) [ $# -ge 2 ] || die "--pg needs a version"; majors+=("$2"); shift ;;
    --brief) [ $# -ge 2 ] || die "--brief needs a version"; majors+=("$2"); brief+=" $2 "; shift ;;
    --jobs) [ $# -ge 2 ] || die "--jobs needs a number"; jobs=$2; shift ;;
    --lint) lint=yes ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit ;;
    *) rest=("$@"); break ;;
  esac
  shift
done
[ ${#majors[@]} -gt 0 ] || majors=(15)

# Each step is a process group of its own, so that it ends with this script, however this script ends.
step=
finish() {
  [ -z "$step" ] || kill -TERM -- "-$step" 2>/dev/null || true
  outbox_sweep
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
run() {
  local status=0
  set -m
  "$@" </dev/null &
  step=$!
  set +m
  wait "$step" || status=$?
  step=
  return "$status"
}


# The test programs that `cargo test` with these arguments would run, a name and a path a line.
test_programs() {
  cargo test --package outbox-tests --no-run --message-format json-render-diagnostics "$@" |
    grep -E '"profile":\{[^}]*"test":true' |
    sed -n 's/.*"target":{[^}]*"name":"\([^"]*\)".*"executable":"\([^"]*\)".*/\1 \2/p'
}

# run_program FOLDER NAME PATH [ARGUMENT]…: runs one test program, as cargo would; what it prints appears when it has ended.
run_program() {
  local folder=$1 name=$2 path=$3 begin=$SECONDS status=0
  shift 3
  (cd pgrx-tests && exec "$path" "$@") >"$folder/$name" 2>&1 </dev/null || status=$?
  echo "$((SECONDS - begin)) $name" >>"$folder/.times"
  [ $status -eq 0 ] || echo "$name" >>"$folder/.failed"
  { printf '     Running %s\n' "$name"; cat "$folder/$name"; } | flock "$folder" cat
}

# run_programs BRIEF: runs all test programs, several at once; all of them, whatever fails: one run then tells everything.
run_programs() {
  local folder name path build=() arguments=("${rest[@]}") programs
  while [ ${#arguments[@]} -gt 0 ] && [ "${arguments[0]}" != -- ]; do
    build+=("${arguments[0]}")
    arguments=("${arguments[@]:1}")
  done
  programs=$(test_programs "${build[@]}") || die "the tests could not be built"
  folder=$(mktemp -d)
  while read -r name path; do
    [[ -n $1 && " ${destinations[*]} " = *" $name "* ]] && continue
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || true; done
    run_program "$folder" "$name" "$path" "${arguments[@]:1}" &
  done <<<"$programs"
  wait
  say "the slowest, in seconds: $(sort -rn "$folder/.times" | head -10 | awk '{printf "%s%s %s", (NR > 1 ? ", " : ""), $2, $1}')"
  local failed=
  [ ! -s "$folder/.failed" ] || failed=$(sort "$folder/.failed" | paste -sd' ')
  rm -r "$folder"
  [ -z "$failed" ] || { printf '\033[1merror:\033[0m these failed: %s\n' "$failed" >&2; return 1; }
}

cd "$checkout"
outbox_setup "${majors[@]}" tests
if [ -n "$lint" ]; then
  cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 ||
    run rustup component add rustfmt clippy
  say "rustfmt and clippy"
  run cargo fmt --all --check
  run cargo clippy --workspace --all-targets --no-default-features --features "pg${majors[0]}" -- -D warnings
fi
failed=
# All of them first: a test upgrades from the oldest.
for major in "${majors[@]}"; do
  run outbox_install "$major"
done
for major in "${majors[@]}"; do
  short=
  [[ $brief != *" $major "* ]] || short=yes
  if [ -z "$short" ]; then
    say "the extension's own tests, for PostgreSQL $major"
    run cargo test --package pg_outbox --lib --no-default-features --features "pg$major"
  fi
  say "the tests on clusters, on PostgreSQL $major"
  OUTBOX_PG=$major run run_programs "$short" || failed+=" $major"
done
[ -z "$failed" ] || die "tests failed on PostgreSQL$failed"
say "all passed on PostgreSQL ${majors[*]}, in $((SECONDS / 60)) min $((SECONDS % 60)) s"
