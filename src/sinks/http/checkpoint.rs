//! A receiver's own checkpoint: asked for when the sink is taken over, and told with each batch how far that one reaches.
//!
//! `Outbox-Checkpoint` is a line that the receiver stores with the events of the same request, in one transaction, and gives back as
//! `{"position": "…"}`; null when it has none. It fails closed: as long as there is no answer, nothing is sent. After a request whose
//! fate is unknown, the receiver is asked again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde_json::Value;
use url::Url;

use super::exchange::{Endpoint, Setback};
use crate::dispatch::Place;
use crate::envelope::Event;
use crate::sinks::batch::Origin;
use crate::sinks::checkpoint::{Reached, Standing, Witness};

const HEADER: HeaderName = HeaderName::from_static("outbox-checkpoint");

/// Receivers refuse longer headers. Thousands of transactions must be running at once to make one, and then the next request that
/// has a shorter one moves the receiver's checkpoint on.
const LONGEST: usize = 4096;

/// The checkpoint of one receiver.
pub(super) struct Checkpoint {
    url: Url,
    known: Mutex<Known>,
    /// Of all that the receiver was told of, as far as it is known here.
    witness: Mutex<Option<Witness>>,
}

#[derive(Clone)]
enum Known {
    ToBeAsked,
    Answered(Option<Reached>),
}

/// Where a receiver is.
pub(super) enum At {
    /// At the beginning, or where it says nothing to this sink.
    Nowhere,
    Place(Reached),
    /// That depends on whether this database holds this event.
    Unknown(Witness),
}

impl Checkpoint {
    pub(super) fn new(url: Url) -> Self {
        Self {
            url,
            known: Mutex::new(Known::ToBeAsked),
            witness: Mutex::default(),
        }
    }

    /// What the receiver has come to, if that means something to this sink.
    pub(super) async fn at(&self, endpoint: &Endpoint, origin: &Origin) -> Result<At, Setback> {
        let known = held(&self.known).clone();
        let answer = match known {
            Known::Answered(reached) => reached,
            Known::ToBeAsked => {
                let reached = self.ask(endpoint).await?;
                *held(&self.known) = Known::Answered(reached.clone());
                reached
            }
        };
        let Some(reached) = answer else {
            return Ok(At::Nowhere);
        };
        Ok(match reached.standing(origin) {
            Standing::Foreign => At::Nowhere,
            Standing::Depends(witness) => At::Unknown(witness),
            Standing::Counts => {
                self.witnessed(reached.witness().clone());
                At::Place(reached)
            }
        })
    }

    /// Tells the receiver how far a request with some of these events, or all, reaches.
    pub(super) fn tell(
        &self,
        origin: &Origin,
        reaches: &Place,
        events: &[Arc<Event>],
        headers: &mut HeaderMap,
    ) {
        let Some(witness) = Witness::among(events) else {
            return;
        };
        let witness = self.witnessed(witness);
        let text = Reached::new(origin, reaches, witness).to_string();
        if text.len() <= LONGEST
            && let Ok(value) = HeaderValue::from_str(&text)
        {
            headers.insert(HEADER, value);
        }
    }

    /// Takes note of one, and says which has the greatest number.
    fn witnessed(&self, witness: Witness) -> Witness {
        let mut greatest = held(&self.witness);
        match &*greatest {
            Some(known) if known.seq > witness.seq => known.clone(),
            _ => greatest.insert(witness).clone(),
        }
    }

    async fn ask(&self, endpoint: &Endpoint) -> Result<Option<Reached>, Setback> {
        let unreadable = |what: &str| {
            Setback::answered(format!("not sent: the answer of \"checkpoint_url\" {what}"))
        };
        let body = endpoint.get(&self.url).await.map_err(|mut setback| {
            let error = &mut setback.refusal.error;
            *error = format!("not sent: \"checkpoint_url\": {error}");
            setback
        })?;
        let answer: Value = serde_json::from_slice(&body).map_err(|_| unreadable("is not JSON"))?;
        match answer.get("position") {
            Some(Value::Null) => Ok(None),
            Some(Value::String(position)) => position
                .parse()
                .map(Some)
                .map_err(|_| unreadable("holds a \"position\" that no sink has given out")),
            _ => Err(unreadable("holds no \"position\"")),
        }
    }

    /// What became of a request is unknown: the receiver may have come further.
    pub(super) fn forget(&self) {
        *held(&self.known) = Known::ToBeAsked;
    }
}

/// After a panic, what was known before still stands.
fn held<T>(one: &Mutex<T>) -> MutexGuard<'_, T> {
    one.lock().unwrap_or_else(PoisonError::into_inner)
}
