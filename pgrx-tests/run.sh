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
  # All of them, whatever fails: one run then tells everything.
  OUTBOX_PG=$major run cargo test --package outbox-tests --no-fail-fast "${rest[@]}"
done
say "all passed on PostgreSQL ${majors[*]}, in $((SECONDS / 60)) min $((SECONDS % 60)) s"
