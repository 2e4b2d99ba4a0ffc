//! Certificates, good and bad, for a receiver that speaks TLS.

use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

/// The certificate that a receiver shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tls {
    /// For 127.0.0.1 and localhost, signed by the authority in [`ca_file`](super::Receiver::ca_file).
    Good,
    /// The same, but it ended years ago.
    Expired,
    /// The same authority's, for another host.
    WrongHost,
    /// For 127.0.0.1, signed by nobody but itself.
    SelfSigned,
}

/// A certificate with its key and the authority that signed it, all in PEM.
#[derive(Debug, Clone)]
pub struct Certificate {
    pub authority: String,
    pub certificate: String,
    pub key: String,
}

impl Certificate {
    /// A new one, of an authority of its own.
    #[track_caller]
    pub fn make(tls: Tls) -> Self {
        let (certificate, key, authority) = make(tls);
        Self {
            authority,
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        }
    }
}

/// The server's side of TLS, and the authority's certificate in PEM.
pub(crate) fn server_config(tls: Tls) -> (Arc<ServerConfig>, String) {
    let (certificate, key, authority) = make(tls);
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring knows them")
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .expect("the key fits the certificate");
    (Arc::new(config), authority)
}

fn make(tls: Tls) -> (rcgen::Certificate, KeyPair, String) {
    let ca_key = KeyPair::generate().expect("ring makes keys");
    let mut ca_params = CertificateParams::default();
    ca_params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca_params
        .distinguished_name
        .push(DnType::CommonName, "pg_outbox tests");
    let ca = ca_params.self_signed(&ca_key).expect("ring signs");
    let authority = Issuer::new(ca_params, ca_key);

    let names = match tls {
        Tls::WrongHost => vec!["elsewhere.example".to_owned()],
        Tls::Good | Tls::Expired | Tls::SelfSigned => {
            vec!["127.0.0.1".to_owned(), "localhost".to_owned()]
        }
    };
    let mut params = CertificateParams::new(names).expect("valid names");
    if tls == Tls::Expired {
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(2021, 1, 1);
    }
    let key = KeyPair::generate().expect("ring makes keys");
    let certificate = match tls {
        Tls::SelfSigned => params.self_signed(&key),
        Tls::Good | Tls::Expired | Tls::WrongHost => params.signed_by(&key, &authority),
    }
    .expect("ring signs");

    (certificate, key, ca.pem())
}
