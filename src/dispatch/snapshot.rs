//! Snapshots as values: which transactions one sees.

use std::fmt;
use std::str::FromStr;

/// A `pg_snapshot`: everything below `xmin` is finished, nothing at or above `xmax` is seen, and of
/// what lies between all but the transactions in `running`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Snapshot {
    xmin: u64,
    xmax: u64,
    running: Vec<u64>,
}

/// The lowest transaction id that is ever given out.
const FIRST: u64 = 3;

impl Snapshot {
    /// The snapshot that sees nothing.
    pub fn empty() -> Self {
        Self::before(FIRST)
    }

    /// The snapshot that sees every transaction below `xid` and no other.
    pub fn before(xid: u64) -> Self {
        Self {
            xmin: xid,
            xmax: xid,
            running: Vec::new(),
        }
    }

    /// One more than the last finished transaction it knows of. Transactions above may have been
    /// running already.
    pub fn xmax(&self) -> u64 {
        self.xmax
    }

    /// No transaction below this one is unseen.
    pub fn oldest_unseen(&self) -> u64 {
        self.running.first().copied().unwrap_or(self.xmax)
    }

    pub fn running(&self) -> &[u64] {
        &self.running
    }

    pub fn sees(&self, xid: u64) -> bool {
        xid < self.xmin || (xid < self.xmax && self.running.binary_search(&xid).is_err())
    }

    /// Whether all of these are unfinished, or yet to come.
    pub fn sees_none_of(&self, xids: &[u64]) -> bool {
        !xids.iter().any(|&xid| self.sees(xid))
    }

    /// The same snapshot with a transaction taken for running: a session's own one, which its
    /// snapshots leave out.
    pub fn with_running(mut self, xid: u64) -> Self {
        if self.sees(xid) {
            self.xmin = self.xmin.min(xid);
            if let Err(place) = self.running.binary_search(&xid) {
                self.running.insert(place, xid);
            }
        }
        self
    }

    /// What this snapshot sees of the transactions below `xid`.
    pub fn below(&self, xid: u64) -> Self {
        if xid >= self.xmax {
            return self.clone();
        }
        Self {
            xmin: self.xmin.min(xid),
            xmax: xid,
            running: self
                .running
                .iter()
                .copied()
                .filter(|&running| running < xid)
                .collect(),
        }
    }

    /// The transactions that were running here and that `later` sees: they committed, or were
    /// rolled back, in between.
    pub fn finished_by(&self, later: &Snapshot) -> Vec<u64> {
        self.running
            .iter()
            .copied()
            .filter(|&xid| later.sees(xid))
            .collect()
    }
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:", self.xmin, self.xmax)?;
        for (index, xid) in self.running.iter().enumerate() {
            write!(f, "{}{xid}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// A text that is not a snapshot.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a snapshot: {0}")]
pub struct NotASnapshot(String);

impl FromStr for Snapshot {
    type Err = NotASnapshot;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let mut parts = text.splitn(3, ':');
            let xmin = parts.next()?.parse().ok()?;
            let xmax = parts.next()?.parse().ok()?;
            let list = parts.next()?;
            let running = list
                .split(',')
                .filter(|xid| !xid.is_empty())
                .map(|xid| xid.parse().ok())
                .collect::<Option<Vec<u64>>>()?;
            Some(Self {
                xmin,
                xmax,
                running,
            })
        };
        parse().ok_or_else(|| NotASnapshot(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(text: &str) -> Snapshot {
        text.parse().unwrap()
    }

    #[test]
    fn sees_what_postgres_says_is_visible() {
        let s = snapshot("10:20:10,14,15");
        for (xid, seen) in [
            (9, true),
            (10, false),
            (11, true),
            (14, false),
            (15, false),
            (16, true),
            (19, true),
            (20, false),
        ] {
            assert_eq!(s.sees(xid), seen, "{xid}");
        }
    }

    #[test]
    fn is_written_as_postgres_writes_it() {
        for text in ["3:3:", "10:20:10,14,15", "731:731:"] {
            assert_eq!(snapshot(text).to_string(), text);
        }
        assert!("10:20".parse::<Snapshot>().is_err());
        assert!("10:x:".parse::<Snapshot>().is_err());
    }

    #[test]
    fn can_be_cut_off() {
        let s = snapshot("10:20:10,14,15");
        assert_eq!(s.below(25), s);
        assert_eq!(s.below(20), s);
        assert_eq!(s.below(15), snapshot("10:15:10,14"));
        assert_eq!(s.below(12), snapshot("10:12:10"));
        assert_eq!(s.below(7), snapshot("7:7:"));
    }

    #[test]
    fn a_sessions_own_transaction_counts_as_running() {
        assert_eq!(snapshot("20:20:").with_running(20), snapshot("20:20:"));
        assert_eq!(
            snapshot("20:25:22").with_running(23),
            snapshot("20:25:22,23")
        );
        assert_eq!(snapshot("25:25:").with_running(21), snapshot("21:25:21"));
        assert!(!snapshot("25:25:").with_running(21).sees(21));
    }

    #[test]
    fn knows_what_finished_in_between() {
        assert_eq!(
            snapshot("10:20:10,14,15").finished_by(&snapshot("14:30:14,22")),
            vec![10, 15]
        );
    }
}
