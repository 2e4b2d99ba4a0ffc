//! Text from outside as it may appear in errors, dead letters and logs: one line, of bounded length, without secrets.

use std::fmt::Write;

/// The longest error text that is kept, in bytes.
pub(crate) const LONGEST: usize = 500;

/// `text` without control characters, and cut when it is longer than `longest` bytes.
pub(crate) fn one_line(text: &str, longest: usize) -> String {
    let mut line = String::new();
    let mut gap = false;
    for c in text.chars() {
        // U+2028 and U+2029 break lines in some viewers, and the directional marks reorder what a reader sees.
        let hidden = c.is_control()
            || matches!(c, '\u{2028}' | '\u{2029}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if hidden || c == ' ' {
            gap = !line.is_empty();
            continue;
        }
        if line.len() + usize::from(gap) + c.len_utf8() > longest {
            while line.len() + '…'.len_utf8() > longest && line.pop().is_some() {}
            line.push('…');
            return line;
        }
        if std::mem::take(&mut gap) {
            line.push(' ');
        }
        line.push(c);
    }
    line
}

/// `id` as a header can hold it: what is no visible ASCII is percent-encoded, and so is the percent sign.
pub(super) fn visible(id: &str) -> String {
    let mut text = String::with_capacity(id.len() + 32);
    for byte in id.bytes() {
        if byte.is_ascii_graphic() && byte != b'%' {
            text.push(byte.into());
        } else {
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

/// `text` with each of `values` struck out. Values of a few characters stay: they are found in any text.
pub(super) fn without<'v>(text: &str, values: impl IntoIterator<Item = &'v str>) -> String {
    const SHORTEST: usize = 5;
    let mut values: Vec<&str> = values
        .into_iter()
        .filter(|value| value.len() >= SHORTEST)
        .collect();
    // The longest first: one value may be part of another.
    values.sort_by_key(|value| std::cmp::Reverse(value.len()));
    values.iter().fold(text.to_owned(), |text, value| {
        text.replace(value, "[redacted]")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_control_characters_are_joined() {
        assert_eq!(
            one_line("\u{1b}[31m a\r\n\tb\0c \u{202e}d  ", 100),
            "[31m a b c d"
        );
        assert_eq!(one_line("", 100), "");
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        assert_eq!(one_line("abcdef", 6), "abcdef");
        assert_eq!(one_line("abcdefg", 6), "abc…");
        assert_eq!(one_line("ab cdefg", 7), "ab c…");
        for longest in 3..20 {
            let cut = one_line(&"ü👍 ".repeat(50), longest);
            assert!(cut.len() <= longest && cut.ends_with('…'), "{cut}");
        }
    }

    #[test]
    fn ids_are_made_visible() {
        assert_eq!(visible("evt_1"), "evt_1");
        assert_eq!(visible("a b%\r\nü"), "a%20b%25%0D%0A%C3%BC");
    }

    #[test]
    fn values_are_struck_out() {
        assert_eq!(
            without(
                "token abcdef-long, abcdef and on",
                ["abcdef", "abcdef-long", "on", ""]
            ),
            "token [redacted], [redacted] and on"
        );
    }
}
