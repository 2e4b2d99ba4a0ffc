//! The form that CloudEvents asks of `source`: a URI reference.
//!
//! Receivers' libraries refuse a whole batch over one source that is none (`public."Order Items"`), so what has no place in
//! a URI reference is percent-encoded. An ordinary qualified table name comes out as it went in.

/// Appends `source` as a JSON string holding a URI reference (RFC 3986).
pub(super) fn write(source: &str, out: &mut Vec<u8>) {
    let bytes = source.as_bytes();
    let colon = misplaced_colon(bytes);
    let mut fragment = false;
    out.push(b'"');
    for (at, &byte) in bytes.iter().enumerate() {
        let legal = match byte {
            b'%' => escape(&bytes[at..]),
            b':' => colon != Some(at),
            b'#' => !std::mem::replace(&mut fragment, true),
            _ => LEGAL[byte as usize],
        };
        if legal {
            // None of the legal characters needs an escape in JSON.
            out.push(byte);
        } else {
            const HEX: &[u8; 16] = b"0123456789ABCDEF";
            out.extend_from_slice(&[b'%', HEX[byte as usize >> 4], HEX[byte as usize & 15]]);
        }
    }
    out.push(b'"');
}

/// The characters that may stand anywhere in a URI reference. Brackets are left out: they belong to IPv6 hosts alone.
static LEGAL: [bool; 256] = {
    let mut table = [false; 256];
    let legal = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~/?@!$&'()*+,;=";
    let mut at = 0;
    while at < legal.len() {
        table[legal[at] as usize] = true;
        at += 1;
    }
    table
};

/// A percent sign that already starts an escape stays; any other is itself escaped.
fn escape(bytes: &[u8]) -> bool {
    matches!(bytes, [_, high, low, ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit())
}

/// The colon that would make a scheme of what is none, as in `1st:orders`.
fn misplaced_colon(bytes: &[u8]) -> Option<usize> {
    let at = bytes
        .iter()
        .position(|byte| matches!(byte, b':' | b'/' | b'?' | b'#'))
        .filter(|&at| bytes[at] == b':')?;
    let scheme = bytes[..at].split_first().is_some_and(|(first, rest)| {
        first.is_ascii_alphabetic()
            && rest
                .iter()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.'))
    });
    (!scheme).then_some(at)
}

#[cfg(test)]
mod tests {
    fn text(source: &str) -> String {
        let mut out = Vec::new();
        super::write(source, &mut out);
        let text = serde_json::from_slice(&out).unwrap();
        assert_eq!(out, format!("\"{text}\"").as_bytes());
        text
    }

    #[test]
    fn ordinary_sources_stay() {
        for source in [
            "public.orders",
            "/services/billing",
            "https://example.com/a?b=c#d",
            "urn:uuid:6e8bc430-9c3a-11d9-9669-0800200c9a66",
            "a%20b",
            "./1st:orders",
        ] {
            assert_eq!(text(source), source);
        }
    }

    #[test]
    fn the_rest_is_percent_encoded() {
        for (source, expected) in [
            (r#"public."Order Items""#, "public.%22Order%20Items%22"),
            ("größe", "gr%C3%B6%C3%9Fe"),
            ("100%", "100%25"),
            ("a\n\\b\u{7f}", "a%0A%5Cb%7F"),
            ("a#b#c", "a#b%23c"),
            ("1st:orders:x", "1st%3Aorders:x"),
            (":x", "%3Ax"),
            ("int4[]", "int4%5B%5D"),
        ] {
            assert_eq!(text(source), expected);
        }
    }
}
