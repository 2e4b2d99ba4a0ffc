//! Positions: the pair of the writing transaction and the number drawn at insert.

use std::fmt;
use std::str::FromStr;

/// Where an event stands in the pair order of its stream. Ordered by `txid`, then `seq`.
///
/// Written `<txid>:<seq>`; `<txid>.<seq>` is read as well, digit by digit, never as a float.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Position {
    /// The writing transaction, an `xid8`.
    pub(crate) txid: u64,
    /// Drawn at insert; never negative.
    pub(crate) seq: i64,
}

/// Why a text is no position.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PositionError {
    #[error("position {0} is not of the form <txid>:<seq> or <txid>.<seq>, both decimal digits")]
    Form(String),
    #[error("position {0} is out of range")]
    Range(String),
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.txid, self.seq)
    }
}

impl FromStr for Position {
    type Err = PositionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        let (txid, seq) = text
            .split_once([':', '.'])
            .filter(|(txid, seq)| digits(txid) && digits(seq))
            .ok_or_else(|| PositionError::Form(quoted(text)))?;
        let range = |_| PositionError::Range(quoted(text));
        Ok(Self {
            txid: txid.parse().map_err(range)?,
            seq: seq.parse().map_err(range)?,
        })
    }
}

/// The text as an error shows it: on one line, and short whatever was given.
fn quoted(text: &str) -> String {
    const SHOWN: usize = 48;
    let mut shown: String = text.chars().take(SHOWN).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    format!("{shown:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_are_read() {
        let position = Position { txid: 731, seq: 12 };
        assert_eq!("731:12".parse(), Ok(position));
        assert_eq!("731.12".parse(), Ok(position));
        assert_eq!(position.to_string(), "731:12");
    }

    #[test]
    fn a_trailing_zero_counts() {
        assert_eq!(
            "731.120".parse(),
            Ok(Position {
                txid: 731,
                seq: 120
            })
        );
    }

    #[test]
    fn the_greatest_of_both_halves_fit() {
        let text = "18446744073709551615:9223372036854775807";
        let position: Position = text.parse().unwrap();
        assert_eq!((position.txid, position.seq), (u64::MAX, i64::MAX));
        assert_eq!(position.to_string(), text);
    }

    #[test]
    fn what_is_no_position_is_named() {
        for text in [
            "", ":", "7", "7:", ":7", "7:1:1", "7.1.1", "7:+1", "-7:1", "7:-1", " 7:1", "7:1 ",
            "7,1", "0x7:1", "7:1e3", "٧:١", "7\n:1",
        ] {
            let error = text.parse::<Position>().unwrap_err();
            assert!(matches!(error, PositionError::Form(_)), "{text:?}: {error}");
        }
        for text in ["18446744073709551616:1", "1:9223372036854775808"] {
            let error = text.parse::<Position>().unwrap_err();
            assert!(
                matches!(error, PositionError::Range(_)),
                "{text:?}: {error}"
            );
        }
        let long = "9".repeat(10_000);
        assert!(long.parse::<Position>().unwrap_err().to_string().len() < 200);
    }

    #[test]
    fn the_pair_order_is_by_transaction_first() {
        let at = |txid, seq| Position { txid, seq };
        assert!(at(1, 9) < at(2, 1) && at(2, 1) < at(2, 2));
    }
}
