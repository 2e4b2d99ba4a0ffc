//! What is remembered of a sink's troubles over a restart: the engine's checkpoint, and which events went through ahead of the
//! one that holds things up, so that a function's effects happen once.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::entry::Entry;
use crate::dispatch::{Checkpoint, Engine};

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Memory {
    #[serde(flatten)]
    pub(crate) engine: Checkpoint,
    /// The seqs of the first event of each entry that went through ahead.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) ahead: BTreeSet<i64>,
}

impl Memory {
    /// Of an engine as it stands, and of what it is still to be told of; none when all is well.
    pub(crate) fn of(engine: &Engine<Entry>, untold: &BTreeSet<i64>) -> Option<Self> {
        let mut ahead = untold.clone();
        ahead.extend(engine.through_ahead().map(Entry::first_seq));
        let checkpoint = engine.checkpoint();
        (checkpoint.is_some() || !ahead.is_empty()).then(|| Self {
            engine: checkpoint.unwrap_or_default(),
            ahead,
        })
    }

    pub(crate) fn from_json(text: Option<&str>) -> Self {
        text.and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default()
    }

    pub(crate) fn to_json(&self) -> Option<String> {
        serde_json::to_string(self).ok()
    }
}
