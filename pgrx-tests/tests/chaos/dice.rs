//! Chance that can be had again.

use std::thread;
use std::time::Duration;

/// SplitMix64: small, and good enough to be unfair with.
#[derive(Clone)]
pub struct Dice(u64);

impl Dice {
    /// Another sequence for each `of` of the same seed.
    pub fn new(seed: u64, of: u64) -> Self {
        Self(seed ^ of.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// True in so many of a hundred cases.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub fn pause(&mut self, at_most: Duration) {
        thread::sleep(at_most * u32::try_from(self.below(101)).unwrap_or(0) / 100);
    }
}
