#!/usr/bin/env bash
# Shows what pg_outbox does, on a PostgreSQL that is thrown away afterwards. Installs what is missing first.
#
#   pgrx-tests/demo.sh [--stay]
#
#   --stay   leaves it running until Ctrl-C, and says how to connect with psql
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case ${1:-} in
  '' | --stay) ;;
  *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit ;;
esac

trap outbox_sweep EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
cd "$checkout"
outbox_setup 15
outbox_install 15 --release
say "building the demo"
OUTBOX_PG=15 cargo run --quiet --package outbox-tests --bin demo -- "$@"
