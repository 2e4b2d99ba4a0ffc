#!/bin/sh
# Makes the certificates of the TLS tests: good for a hundred years, but for the one that has expired. The authority's own
# key is not kept.
set -eu
cd "$(dirname "$0")"
trap 'rm -rf ca.key ca.cnf ca.db* ca.srl* leaf.csr leaf.ext issued' EXIT

key() { # file
	openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1"
}
leaf() { # file, subject alternative name, end
	printf 'subjectAltName=%s\nbasicConstraints=CA:FALSE\n' "$2" >leaf.ext
	openssl ca -batch -config ca.cnf -in leaf.csr -extfile leaf.ext -startdate 20200101000000Z -enddate "$3" \
		-notext -out "$1"
}

mkdir -p issued
: >ca.db
echo 01 >ca.srl
cat >ca.cnf <<'CNF'
[ca]
default_ca = own
[own]
database = ca.db
serial = ca.srl
new_certs_dir = issued
certificate = ca.pem
private_key = ca.key
default_md = sha256
policy = any
unique_subject = no
[any]
commonName = supplied
CNF
key ca.key
key server.key
openssl req -x509 -new -key ca.key -subj "/CN=pg_outbox test authority" -days 36500 -out ca.pem
openssl req -new -key server.key -subj "/CN=pg_outbox test" -out leaf.csr
leaf server.pem IP:127.0.0.1 21200101000000Z
leaf expired.pem IP:127.0.0.1 20200102000000Z
leaf elsewhere.pem DNS:elsewhere.example 21200101000000Z
