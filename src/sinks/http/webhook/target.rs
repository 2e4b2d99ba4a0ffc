//! Where a webhook may lead, as far as its URL tells.

use std::net::IpAddr;

use url::{Host, Url};

use super::address;

/// What an operator allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rules {
    pub(crate) private_networks: bool,
    /// http beside https.
    pub(crate) plain_http: bool,
    /// Empty: any.
    pub(crate) ports: Vec<u16>,
}

const LONGEST: usize = 2_000;

/// A URL that may be requested, as far as it tells. What its name resolves to is checked when it is connected to.
///
/// # Errors
/// One sentence, which holds nothing of the URL: it may contain a token.
pub(crate) fn parse(text: &str, rules: &Rules) -> Result<Url, String> {
    if text.len() > LONGEST {
        return Err(format!("It is longer than {LONGEST} characters."));
    }
    // The parser would leave them out, so that the URL would be another one than is written.
    if text.contains(char::is_control) {
        return Err("It holds control characters.".to_owned());
    }
    let url = Url::parse(text).map_err(|error| format!("It is no URL: {error}."))?;
    match url.scheme() {
        "https" => {}
        "http" if rules.plain_http => {}
        "http" => return Err("It must begin with https://.".to_owned()),
        _ => return Err("Its scheme must be https.".to_owned()),
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("It must hold no user and no password; requests are signed.".to_owned());
    }
    let port = url.port_or_known_default().unwrap_or(0);
    if !rules.ports.is_empty() && !rules.ports.contains(&port) {
        return Err(format!(
            "Port {port} is not among those allowed, outbox.webhook_ports."
        ));
    }
    match host_address(&url) {
        _ if url.host().is_none() => Err("It names no host.".to_owned()),
        Some(address) if !may_connect(address, rules) => Err(NOT_PUBLIC.to_owned()),
        _ => Ok(url),
    }
}

/// The address that a URL names itself, in whatever spelling.
pub(super) fn host_address(url: &Url) -> Option<IpAddr> {
    match url.host()? {
        Host::Ipv4(address) => Some(IpAddr::V4(address)),
        Host::Ipv6(address) => Some(IpAddr::V6(address)),
        Host::Domain(_) => None,
    }
}

pub(super) const NOT_PUBLIC: &str = "It leads to an address that is not of the public Internet.";

pub(super) fn may_connect(address: IpAddr, rules: &Rules) -> bool {
    rules.private_networks || address::is_public(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strict() -> Rules {
        Rules {
            private_networks: false,
            plain_http: false,
            ports: vec![443, 8443],
        }
    }

    #[test]
    fn what_is_allowed() {
        for url in [
            "https://example.com/hook?x=1",
            "https://example.com:8443/",
            "https://8.8.8.8/",
            "https://[2606:4700:4700::1111]/",
            "https://localhost/", // its address is checked at each attempt
        ] {
            assert!(parse(url, &strict()).is_ok(), "{url}");
        }
    }

    #[test]
    fn what_is_refused_and_why() {
        for (url, why) in [
            ("", "It is no URL"),
            ("https://example.com/a\r\nb", "control characters"),
            ("example.com", "It is no URL"),
            ("http://example.com/", "https://"),
            ("ftp://example.com/", "scheme"),
            ("file:///etc/passwd", "scheme"),
            ("https://example.com:22/", "Port 22"),
            ("https://u@example.com/", "no user"),
            ("https://:p@example.com/", "no user"),
            ("https://127.0.0.1/", "public Internet"),
            ("https://0x7f.1/", "public Internet"),
            ("https://2130706433/", "public Internet"),
            ("https://[::ffff:10.0.0.1]/", "public Internet"),
            ("https://[fe80::1]/", "public Internet"),
        ] {
            let error = parse(url, &strict()).unwrap_err();
            assert!(error.contains(why), "{url}: {error}");
        }
        let long = format!("https://example.com/{}", "x".repeat(LONGEST));
        assert!(parse(&long, &strict()).is_err());
    }

    #[test]
    fn an_intranet_is_allowed_by_rule() {
        let open = Rules {
            private_networks: true,
            plain_http: true,
            ports: Vec::new(),
        };
        assert!(parse("http://127.0.0.1:8080/", &open).is_ok());
        assert!(parse("http://[fd00::1]:1/", &open).is_ok());
    }
}
