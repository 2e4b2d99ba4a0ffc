#!/usr/bin/env bash
# Measures pg_outbox, each figure on a fresh PostgreSQL that is thrown away, and prints one table. Installs what is missing first.
#
#   pgrx-tests/bench.sh [--quick] [--profile SECONDS] [--list] [FIGURE]…
#
#   --quick            fewer events and runs: whether all is well, not how fast it is
#   --profile SECONDS  repeats what the figure measures for that long, and shows where the time goes (with perf, as root)
#   --list             names the figures; without any, all of them are measured
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case ${1:-} in
  -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit ;;
esac

trap outbox_sweep EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
cd "$checkout"
outbox_setup 15 bench
outbox_install 15 --release
say "building the benches"
OUTBOX_PG=15 cargo run --quiet --release --package outbox-tests --bin bench -- "$@"
