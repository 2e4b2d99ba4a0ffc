//! What went wrong on the way, in words: no answer came, so the status says nothing.
//!
//! Texts name the origin of the URL at most. The libraries' own texts may quote the whole of it, and are taken apart.

use std::error::Error;
use std::io;

use rustls::CertificateError;

use crate::sinks::plain_text::{LONGEST, one_line};

/// Why no answer came from `origin`.
pub(super) fn describe(error: &reqwest::Error, origin: &str) -> String {
    let chain: Vec<&(dyn Error + 'static)> = causes(error).collect();
    let text = if let Some(tls) = chain.iter().find_map(|cause| cause.downcast_ref()) {
        describe_tls(tls, origin)
    } else if error.is_connect() {
        let cause = match chain.iter().any(|cause| is_timeout(*cause)) {
            true => "timed out".to_owned(),
            false => innermost(&chain),
        };
        format!("cannot connect to {origin}: {cause}")
    } else {
        format!("no answer from {origin}: {}", innermost(&chain))
    };
    one_line(&text, LONGEST)
}

fn describe_tls(error: &rustls::Error, origin: &str) -> String {
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
fn causes<'e>(error: &'e (dyn Error + 'static)) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
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

fn is_timeout(cause: &(dyn Error + 'static)) -> bool {
    cause
        .downcast_ref::<reqwest::Error>()
        .is_some_and(reqwest::Error::is_timeout)
        || cause
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::TimedOut)
}

/// What it comes down to: the outer errors only say where it passed.
fn innermost(chain: &[&(dyn Error + 'static)]) -> String {
    match chain {
        // An error of reqwest itself quotes the URL.
        [_] | [] => "the request failed".to_owned(),
        [.., last] => last.to_string(),
    }
}
