//! A network that loses, delays, reorders and repeats what it carries, and whose links fail one way.

use std::collections::BTreeSet;

use super::random::Random;

/// What the network does to messages, in chances of a thousand and in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    pub lost: u64,
    pub repeated: u64,
    pub slowest_ms: u64,
}

/// What it does while nothing is wrong.
pub const CALM: Weather = Weather { lost: 0, repeated: 0, slowest_ms: 20 };

pub struct Network {
    pub weather: Weather,
    cut: BTreeSet<(u16, u16)>,
    /// Where messages get through, and bytes of copies do not.
    blocked: BTreeSet<(u16, u16)>,
}

impl Network {
    pub fn new() -> Self {
        Self { weather: CALM, cut: BTreeSet::new(), blocked: BTreeSet::new() }
    }

    /// Lets nothing through from one host to another.
    pub fn cut(&mut self, from: u16, to: u16) {
        self.cut.insert((from, to));
    }

    /// Lets no copies through from one host to another, as if they were sent to where it was before.
    pub fn block_copies(&mut self, from: u16, to: u16) {
        self.blocked.insert((from, to));
    }

    pub fn carries_copies(&self, from: u16, to: u16) -> bool {
        !self.blocked.contains(&(from, to))
    }

    pub fn heal(&mut self) {
        self.cut.clear();
        self.blocked.clear();
    }

    /// After how long a message arrives; nothing if it is lost, twice if it is repeated. Within a host nothing goes wrong.
    pub fn delays(&self, random: &mut Random, from: u16, to: u16) -> Vec<u64> {
        if from == to {
            return vec![1];
        }
        if self.cut.contains(&(from, to)) || random.permille(self.weather.lost) {
            return Vec::new();
        }
        let count = 1 + u64::from(random.permille(self.weather.repeated));
        (0..count).map(|_| 1 + random.below(self.weather.slowest_ms)).collect()
    }
}
