//! What a server says, taken apart as it comes in.

use memchr::memmem;
use serde::Deserialize;

/// No line of a server's is longer; the longest tells of the servers of a cluster.
const LONGEST_LINE: usize = 1024 * 1024;
/// Far more than any acknowledgement.
const LARGEST_MESSAGE: usize = 1024 * 1024;

/// What a server tells of itself.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Info {
    /// The most bytes of a message, headers included.
    #[serde(default)]
    pub(super) max_payload: usize,
    #[serde(default)]
    pub(super) headers: bool,
    #[serde(default)]
    pub(super) tls_required: bool,
    /// To be signed by whoever logs in with a key.
    #[serde(default)]
    pub(super) nonce: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Said<'b> {
    Info(&'b [u8]),
    Message {
        subject: &'b [u8],
        /// Of a message of the server itself, such as 503: nobody is there to answer.
        status: Option<u16>,
        payload: &'b [u8],
    },
    Ping,
    Pong,
    Done,
    /// Without its quotes.
    Error(&'b [u8]),
}

/// The bytes that came in and have not been read yet.
#[derive(Default)]
pub(super) struct Incoming {
    bytes: Vec<u8>,
    start: usize,
}

impl Incoming {
    /// To put more bytes at the end of.
    pub(super) fn space(&mut self) -> &mut Vec<u8> {
        if self.start > 0 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        &mut self.bytes
    }

    /// The next thing that was said; none if it is not complete yet.
    ///
    /// # Errors
    /// When it is not the language of NATS.
    pub(super) fn next(&mut self) -> Result<Option<Said<'_>>, &'static str> {
        const NO_NATS: &str = "it does not speak the NATS protocol";
        let rest = &self.bytes[self.start..];
        let Some(end) = memmem::find(rest, b"\r\n") else {
            return match rest.len() > LONGEST_LINE {
                true => Err(NO_NATS),
                false => Ok(None),
            };
        };
        let (line, after) = (&rest[..end], &rest[end + 2..]);
        let (word, arguments) = match line.iter().position(|byte| matches!(byte, b' ' | b'\t')) {
            Some(at) => (&line[..at], line[at..].trim_ascii()),
            None => (line, &line[end..]),
        };
        let with_headers = match word.to_ascii_uppercase().as_slice() {
            b"MSG" => false,
            b"HMSG" => true,
            word => {
                self.start += end + 2;
                return Ok(Some(match word {
                    b"INFO" => Said::Info(arguments),
                    b"PING" => Said::Ping,
                    b"PONG" => Said::Pong,
                    b"+OK" => Said::Done,
                    b"-ERR" => Said::Error(unquoted(arguments)),
                    _ => return Err(NO_NATS),
                }));
            }
        };
        let mut arguments = arguments
            .split(|byte| matches!(byte, b' ' | b'\t'))
            .filter(|argument| !argument.is_empty());
        let subject = arguments.next().ok_or(NO_NATS)?;
        let total = arguments.next_back().and_then(number).ok_or(NO_NATS)?;
        let headers = match with_headers {
            true => arguments.next_back().and_then(number).ok_or(NO_NATS)?,
            false => 0,
        };
        if total > LARGEST_MESSAGE || headers > total {
            return Err(NO_NATS);
        }
        if after.len() < total + 2 {
            return Ok(None);
        }
        self.start += end + 2 + total + 2;
        let (headers, payload) = after[..total].split_at(headers);
        Ok(Some(Said::Message {
            subject,
            status: status(headers),
            payload,
        }))
    }
}

/// The number in `NATS/1.0 503 No Responders`.
fn status(headers: &[u8]) -> Option<u16> {
    let rest = headers.strip_prefix(b"NATS/1.0")?.strip_prefix(b" ")?;
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    number(&rest[..digits]).and_then(|status| status.try_into().ok())
}

fn number(text: &[u8]) -> Option<usize> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn unquoted(text: &[u8]) -> &[u8] {
    text.strip_prefix(b"'")
        .and_then(|text| text.strip_suffix(b"'"))
        .unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything that is said, in words.
    fn said(bytes: &[u8], pieces: usize) -> Vec<String> {
        let mut incoming = Incoming::default();
        let mut all = Vec::new();
        for piece in bytes.chunks(pieces) {
            incoming.space().extend_from_slice(piece);
            while let Some(said) = incoming.next().unwrap() {
                all.push(match said {
                    Said::Message {
                        subject,
                        status,
                        payload,
                    } => format!(
                        "{} {status:?} {}",
                        String::from_utf8_lossy(subject),
                        String::from_utf8_lossy(payload)
                    ),
                    Said::Info(json) => format!("info {}", String::from_utf8_lossy(json)),
                    Said::Error(text) => format!("error {}", String::from_utf8_lossy(text)),
                    other => format!("{other:?}"),
                });
            }
        }
        assert!(incoming.space().is_empty());
        all
    }

    #[test]
    fn whatever_the_pieces_it_comes_in() {
        let bytes = b"INFO {\"a\": 1} \r\nPING\r\nPONG\r\n+OK\r\n-ERR 'Authorization Violation'\r\n\
            MSG _INBOX.a.1 1 4\r\na\r\nb\r\nMSG _INBOX.a.2 1 reply 0\r\n\r\n\
            HMSG _INBOX.a.3 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\nHMSG  _INBOX.a.4\t1 reply 20 22\r\nNATS/1.0\r\nNa: me\r\n\r\nhi\r\nping\r\n";
        let expected = [
            "info {\"a\": 1}",
            "Ping",
            "Pong",
            "Done",
            "error Authorization Violation",
            "_INBOX.a.1 None a\r\nb",
            "_INBOX.a.2 None ",
            "_INBOX.a.3 Some(503) ",
            "_INBOX.a.4 None hi",
            "Ping",
        ];
        for pieces in [1, 2, 3, 7, 64, 10_000] {
            assert_eq!(said(bytes, pieces), expected, "{pieces}");
        }
    }

    #[test]
    fn what_is_another_language() {
        for bytes in [
            &b"HTTP/1.1 400 Bad Request\r\n"[..],
            b"\r\n",
            b"MSG a\r\n",
            b"MSG a 1 -1\r\n",
            b"MSG a 1 99999999999\r\n",
            b"HMSG a 1 9 8\r\n",
            b"SSH-2.0-OpenSSH\r\n",
        ] {
            let mut incoming = Incoming::default();
            incoming.space().extend_from_slice(bytes);
            assert!(
                incoming.next().is_err(),
                "{}",
                String::from_utf8_lossy(bytes)
            );
        }
        let mut endless = Incoming::default();
        endless.space().resize(LONGEST_LINE + 1, b'x');
        assert!(endless.next().is_err());
    }

    #[test]
    fn what_a_server_tells_of_itself() {
        let info: Info = serde_json::from_str(
            r#"{"server_id": "N", "version": "2.15.1", "max_payload": 1048576, "headers": true, "nonce": "abc", "connect_urls": []}"#,
        )
        .unwrap();
        assert_eq!((info.max_payload, info.headers), (1_048_576, true));
        assert_eq!(info.nonce.as_deref(), Some("abc"));
        assert!(!info.tls_required);
    }
}
