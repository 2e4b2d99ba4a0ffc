//! What went wrong on the way, in words: no answer came, so the status says nothing.
//!
//! Texts name the origin of the URL at most. The libraries' own texts may quote the whole of it, and are taken apart.

use std::error::Error;
use std::io;

use crate::sinks::plain_text::{LONGEST, one_line};
use crate::sinks::tls::{self, causes};

/// Why no answer came from `origin`.
pub(super) fn describe(error: &reqwest::Error, origin: &str) -> String {
    let chain: Vec<&(dyn Error + 'static)> = causes(error).collect();
    let text = if let Some(error) = chain.iter().find_map(|cause| cause.downcast_ref()) {
        tls::describe(error, origin)
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
