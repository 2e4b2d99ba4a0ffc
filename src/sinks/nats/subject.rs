//! What is a subject that events can be published to.

/// Together with its reply subject and its sizes it has to fit a line that servers read at once: 4,096 bytes by default.
const LONGEST: usize = 2_048;

/// Why nothing can be published to `subject`, to be read after its name.
pub(super) fn problem(subject: &str) -> Option<&'static str> {
    if subject.len() > LONGEST {
        return Some("is longer than 2048 bytes");
    }
    if subject
        .bytes()
        .any(|byte| byte.is_ascii_whitespace() || byte.is_ascii_control())
    {
        return Some("has white space or control characters in it");
    }
    for token in subject.split('.') {
        match token {
            "" => return Some("is empty or has an empty token"),
            "*" | ">" => return Some("has a wildcard in it"),
            _ => {}
        }
    }
    // What is published to one of these is a request to the server itself.
    if subject.starts_with('$') {
        return Some("begins with $, which is reserved for the server");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_that_are_legal() {
        for subject in ["a", "order.placed", "größe.👍", "a*.b>c", "a$.b", "A-1_2/3"] {
            assert_eq!(problem(subject), None, "{subject}");
        }
    }

    #[test]
    fn subjects_that_are_not() {
        for subject in [
            "",
            ".",
            "a.",
            ".a",
            "a..b",
            "*",
            "a.*",
            "a.>",
            ">",
            "a b",
            "a\tb",
            "a\r\nPUB x",
            "a\0",
            "\u{7f}",
            "$JS.API.STREAM.DELETE.X",
            "$SYS.x",
        ] {
            assert!(problem(subject).is_some(), "{subject:?}");
        }
        assert!(problem(&"x".repeat(2_049)).is_some());
        assert!(problem(&"x".repeat(2_048)).is_none());
    }
}
