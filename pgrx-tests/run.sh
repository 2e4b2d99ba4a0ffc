#!/usr/bin/env bash
# Runs all tests of pg_outbox: those of the extension's own crate, and those on real clusters.
#
#   pgrx-tests/run.sh [--all | --pg MAJOR]… [--lint] [ARGUMENT OF cargo test]…
#
#   --pg MAJOR   on PostgreSQL 15 (the default), 16 or 18; may be repeated
#   --all        on all three
#   --lint       rustfmt and clippy first
#
# What else is given goes to `cargo test` for the tests on clusters: `run.sh --pg 16 --test delivery -- poison`.
#
# A test on clusters that fails is run once more, by itself. If it passes then, the run goes on, and names it at the end: on a machine
# that others use, too, a server may answer too late for one test; a fault answers twice.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

majors=() lint='' rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --all) majors=(15 16 18) ;;
    --pg) [ $# -ge 2 ] || die "--pg needs a version"; majors+=("$2"); shift ;;
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

# The tests on clusters, given the arguments of `cargo test`.
unsteady=()
most_unsteady=3
cluster_tests() {
  local log failed failure tee
  log=$(mktemp)
  exec 3> >(exec tee "$log")
  tee=$!
  if run cargo test --package outbox-tests --no-fail-fast "$@" >&3 2>&3; then
    exec 3>&-
    rm -f "$log"
    return
  fi
  exec 3>&-
  wait "$tee" || true
  # Lines of `file test`.
  mapfile -t failed < <(awk '$1 == "Running" { file = $2; gsub(".*tests/|/main|[.]rs", "", file) }
                             $1 == "test" && $NF == "FAILED" { print file, $2 }' "$log")
  rm -f "$log"
  [ ${#failed[@]} -gt 0 ] && [ ${#failed[@]} -le "$most_unsteady" ] || die "tests on clusters failed"
  for failure in "${failed[@]}"; do
    say "once more: $failure"
    run cargo test --package outbox-tests --test "${failure% *}" -- --exact "${failure#* }" ||
      die "failed twice: $failure"
    unsteady+=("$failure, on PostgreSQL $OUTBOX_PG")
  done
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
for major in "${majors[@]}"; do
  features=(--no-default-features --features "pg$major")
  say "the extension's own tests, for PostgreSQL $major"
  run cargo test --package pg_outbox --lib "${features[@]}"
  run outbox_install "$major"
  say "the tests on clusters, on PostgreSQL $major"
  export OUTBOX_PG=$major
  cluster_tests "${rest[@]}"
done
for failure in "${unsteady[@]}"; do
  say "passed only when run again: $failure"
done
say "all passed on PostgreSQL ${majors[*]}, in $((SECONDS / 60)) min $((SECONDS % 60)) s"
