//! Where a new sink begins to read.

use crate::dispatch::{Floors, Grouping, Place, Snapshot, Window};
use crate::envelope::Position;
use crate::pg::error::Complaint;
use crate::pg::spi::Spi;
use crate::store::histories;
use crate::store::streams::Stream;
use crate::store::transactions;

/// Where a new sink begins.
pub(super) fn starting_place(
    spi: &Spi,
    stream: &Stream,
    grouping: Grouping,
    start: &str,
) -> Result<(Place, Position), Complaint> {
    match start {
        "origin" => {
            let window = Window::empty(Snapshot::empty(), stream.pruned_seq);
            Ok((
                Place::at_start_of(window).at_end(),
                Position { txid: 0, seq: 0 },
            ))
        }
        "tail" => Ok(tail(spi, stream)),
        position => {
            let position = position.parse::<Position>().map_err(|error| {
                Complaint::bad_argument(format!(
                    "start {:?} is not known",
                    start.chars().take(60).collect::<String>()
                ))
                .detail(error.to_string())
                .hint("It is origin, tail, or a position such as outbox.read gives.")
            })?;
            let place = behind(spi, stream, grouping, position);
            let oldest = place.window.done.oldest_unseen();
            let pair = if oldest < position.txid {
                Position {
                    txid: oldest,
                    seq: 0,
                }
            } else {
                position
            };
            Ok((place, pair))
        }
    }
}

/// Behind all that is committed now.
pub(in crate::api) fn tail(spi: &Spi, stream: &Stream) -> (Place, Position) {
    let mut floors = Floors::default();
    let horizon = stream.look(spi, &mut floors);
    let floor = floors
        .below(horizon.snapshot.xmax())
        .unwrap_or(stream.pruned_seq);
    let pair = Position {
        txid: horizon.snapshot.oldest_unseen(),
        seq: 0,
    };
    // Nothing is in the window; that it ends here tells how far behind the reader will be.
    let window = Window {
        ceiling: horizon.last_seq,
        ..Window::empty(horizon.snapshot, floor)
    };
    (Place::at_start_of(window).at_end(), pair)
}

/// Behind a position: all that is committed of earlier transactions is done, and of the position's own everything up to its seq. What
/// is still open will come, whatever its id.
fn behind(spi: &Spi, stream: &Stream, grouping: Grouping, position: Position) -> Place {
    let horizon = stream.look(spi, &mut Floors::default());
    let snapshot = horizon.snapshot;
    histories::check(spi, &stream.name, position);
    let done = snapshot.below(position.txid.max(Snapshot::empty().xmax()));
    let window = Window::empty(done, stream.pruned_seq);
    if !snapshot.sees(position.txid) {
        // It is not finished yet: better some of its events again than one never.
        return Place::at_start_of(window).at_end();
    }
    Place {
        mark: transactions::mark_of(spi, stream, grouping, position),
        ..Place::at_start_of(window.next(
            grouping,
            snapshot.below(position.txid + 1),
            horizon.last_seq,
            None,
        ))
    }
}
