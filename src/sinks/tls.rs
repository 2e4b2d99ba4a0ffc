//! Whom a TLS connection trusts: the system's authorities, and those of `ca_file`; and in words why it trusts somebody not.

use std::error::Error;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{CertificateError, ClientConfig, RootCertStore};

/// Enough for every authority that there is.
const LARGEST_FILE: u64 = 4 * 1024 * 1024;

/// What a client needs that checks whom it speaks to. Reads the system's certificates and `ca_file` now; a change of them counts
/// for clients opened later.
///
/// # Errors
/// When `ca_file` cannot be used, or nobody is trusted at all.
pub(super) fn config(ca_file: Option<&Path>) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if let Some(file) = ca_file {
        let failed = |why: String| format!("cannot use ca_file {}: {why}", file.display());
        for certificate in certificates(file).map_err(failed)? {
            roots
                .add(certificate)
                .map_err(|error| failed(format!("a certificate in it is invalid: {error}")))?;
        }
    }
    if roots.is_empty() {
        return Err(
            "the system has no trusted certificates: install the package ca-certificates, or name a \"ca_file\""
                .to_owned(),
        );
    }
    build(roots)
}

/// What a client of a URL without TLS gets, so that the system's certificates need not be read for it.
pub(super) fn unused() -> Result<ClientConfig, String> {
    build(RootCertStore::empty())
}

fn build(roots: RootCertStore) -> Result<ClientConfig, String> {
    // Named here and not installed as the process's default: the process is Postgres, and others may load Rust into it.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("cannot set up TLS: {error}"))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(config)
}

/// Why TLS with `origin` failed.
pub(super) fn describe(error: &rustls::Error, origin: &str) -> String {
    let rustls::Error::InvalidCertificate(reason) = error else {
        return format!("TLS with {origin} failed: {error}");
    };
    let reason = match reason {
        CertificateError::UnknownIssuer => {
            "it is signed by no authority that is trusted here; \"ca_file\" can name one".to_owned()
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "it has expired".to_owned()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "it is not valid yet".to_owned()
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "it is for another name".to_owned()
        }
        CertificateError::Revoked => "it has been revoked".to_owned(),
        CertificateError::BadSignature => "its signature is wrong".to_owned(),
        CertificateError::BadEncoding => "it cannot be read".to_owned(),
        other => other.to_string(),
    };
    format!("certificate of {origin} refused: {reason}")
}

/// The error and everything behind it. An `io::Error` hides the error that it was made of from `source`.
pub(super) fn causes<'e>(
    error: &'e (dyn Error + 'static),
) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| {
        match error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref)
        {
            Some(inner) => Some(inner as &(dyn Error + 'static)),
            None => error.source(),
        }
    })
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let metadata = std::fs::metadata(file).map_err(|error| error.to_string())?;
    // To open a pipe or a device might block for ever.
    if !metadata.is_file() {
        return Err("it is no file".to_owned());
    }
    let mut pem = Vec::new();
    File::open(file)
        .and_then(|file| file.take(LARGEST_FILE + 1).read_to_end(&mut pem))
        .map_err(|error| error.to_string())?;
    if pem.len() as u64 > LARGEST_FILE {
        return Err("it is too large".to_owned());
    }
    let certificates = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| format!("it is not PEM: {error}"))?;
    match certificates.is_empty() {
        true => Err("there is no certificate in it".to_owned()),
        false => Ok(certificates),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(name: &str, content: &[u8]) -> String {
        let file = std::env::temp_dir().join(format!("pg_outbox-{}-{name}", std::process::id()));
        std::fs::write(&file, content).unwrap();
        let error = config(Some(&file)).expect_err("an error");
        std::fs::remove_file(&file).unwrap();
        error
    }

    #[test]
    fn files_that_hold_no_certificate() {
        assert!(error("empty.pem", b"").ends_with("there is no certificate in it"));
        assert!(
            error("text.pem", b"\xff\0 some text\n").ends_with("there is no certificate in it")
        );
        let broken = "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n";
        assert!(error("broken.pem", broken.as_bytes()).contains("it is not PEM"));
        let nonsense = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        assert!(error("nonsense.pem", nonsense.as_bytes()).contains("is invalid"));
        let large = vec![b'\n'; LARGEST_FILE as usize + 1];
        assert!(error("large.pem", &large).ends_with("it is too large"));
    }

    #[test]
    fn files_that_are_none() {
        for (file, why) in [
            ("/nowhere/ca.pem", "No such file or directory (os error 2)"),
            ("/dev/zero", "it is no file"),
            ("/", "it is no file"),
        ] {
            let error = config(Some(Path::new(file))).expect_err("an error");
            assert_eq!(error, format!("cannot use ca_file {file}: {why}"));
        }
    }
}
