//! How fast bytes go to other agents, and in which pieces, so that they stay out of the program's way.
//!
//! Invariants: all transfers that share a [`Pacer`] together stay within its rate, but for a burst of
//! [`BURST`] after a pause; while anybody holds a [`Pause`], nothing begins to go. What has begun (a chunk)
//! ends, so the size of chunks is how long the program may have to share the link.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use waystation_format::checksum::BLOCK_BYTES;
use waystation_format::{Error, Kind, Result};

use super::traffic::Traffic;

/// What may go at once after a pause.
pub const BURST: Duration = Duration::from_millis(10);
/// The least that a chunk has: what is verified is a block.
pub const LEAST_CHUNK_BYTES: u64 = BLOCK_BYTES as u64;
/// The most that a chunk has.
pub const MOST_CHUNK_BYTES: u64 = 64 << 20;
/// How much of the time that the link is free a chunk takes.
const CHUNK_SHARE: f64 = 0.05;

/// How many bytes go at a time, by GEMINI's rule: a twentieth of what the link carries while a layer computes
/// and does not communicate. Whole blocks, from [`LEAST_CHUNK_BYTES`] to [`MOST_CHUNK_BYTES`].
pub fn chunk_bytes(compute: Duration, communicate: Duration, link_bytes_per_s: u64) -> u64 {
    let free = compute.saturating_sub(communicate);
    let bytes = free.as_secs_f64() * CHUNK_SHARE * link_bytes_per_s as f64;
    let bytes = (bytes as u64).clamp(LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES);
    bytes / LEAST_CHUNK_BYTES * LEAST_CHUNK_BYTES
}

/// The rate at which bytes may go, shared by all transfers of an agent.
#[derive(Debug, Default)]
pub struct Pacer {
    /// 0 is no limit.
    bytes_per_s: AtomicU64,
    until: Mutex<Option<Instant>>,
    pauses: AtomicUsize,
    traffic: Traffic,
}

/// As long as somebody has one, nothing begins to go.
#[derive(Debug)]
pub struct Pause(Arc<Pacer>);

impl Pacer {
    /// Without a limit.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// What has gone to other agents.
    pub fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    /// At most a share of what a link carries, from now on.
    ///
    /// InvalidInput if nothing would be left, or if it is no share.
    pub fn limit(&self, link_bytes_per_s: u64, share: f64) -> Result<()> {
        let bytes_per_s = (link_bytes_per_s as f64 * share) as u64;
        if !(share > 0.0 && share <= 1.0) || bytes_per_s == 0 {
            return Err(Error::new(Kind::InvalidInput, "a share of a link is more than 0 and at most 1")
                .with("share", share.to_string())
                .with("link_bytes_per_s", link_bytes_per_s.to_string()));
        }
        self.bytes_per_s.store(bytes_per_s, Ordering::Relaxed);
        Ok(())
    }

    /// The limit, if there is one.
    pub fn bytes_per_s(&self) -> Option<u64> {
        Some(self.bytes_per_s.load(Ordering::Relaxed)).filter(|&rate| rate > 0)
    }

    /// Has nothing begin until what is returned is dropped: while the program communicates, say.
    pub fn pause(self: &Arc<Self>) -> Pause {
        self.pauses.fetch_add(1, Ordering::Relaxed);
        Pause(Arc::clone(self))
    }

    /// Whether somebody has paused it.
    pub fn is_paused(&self) -> bool {
        self.pauses.load(Ordering::Relaxed) > 0
    }

    /// Books the time that so many bytes take, after what is booked already; they may go once it begins.
    pub fn book(&self, nbytes: u64, now: Instant) -> Instant {
        let Some(bytes_per_s) = self.bytes_per_s() else { return now };
        let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        let begin = until.map_or(earliest, |until| until.max(earliest));
        let nanoseconds = u128::from(nbytes) * 1_000_000_000 / u128::from(bytes_per_s);
        let duration = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
        *until = Some(begin.checked_add(duration).unwrap_or(begin));
        begin.max(now)
    }
}

impl Drop for Pause {
    fn drop(&mut self) {
        self.0.pauses.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn milliseconds(count: f64) -> Duration {
        Duration::from_secs_f64(count / 1000.0)
    }

    #[test]
    fn chunks_are_those_of_the_rule() {
        // 400 Gb/s, layers of 9.4 ms of which 1 ms communicates: 21 MB.
        let chunk = chunk_bytes(milliseconds(9.4), milliseconds(1.0), 50_000_000_000);
        assert!((20_500_000..21_500_000).contains(&chunk) && chunk.is_multiple_of(LEAST_CHUNK_BYTES));
        assert_eq!(chunk_bytes(milliseconds(9.4), milliseconds(9.5), u64::MAX), LEAST_CHUNK_BYTES);
        assert_eq!(chunk_bytes(milliseconds(1.0), milliseconds(0.0), 1_000_000), LEAST_CHUNK_BYTES);
        assert_eq!(chunk_bytes(milliseconds(1e6), milliseconds(0.0), u64::MAX), MOST_CHUNK_BYTES);
        // 10 Gb/s, 100 ms free: 6.25 MB, of which 23 blocks are whole.
        assert_eq!(chunk_bytes(milliseconds(110.0), milliseconds(10.0), 1_250_000_000), 23 * (256 << 10));
    }

    #[test]
    fn bookings_follow_one_another_at_the_rate() {
        let pacer = Pacer::new();
        let start = Instant::now() + Duration::from_secs(1);
        assert_eq!(pacer.book(u64::MAX, start), start, "there is no limit yet");
        pacer.limit(4_000_000, 0.25).unwrap();
        assert_eq!(pacer.bytes_per_s(), Some(1_000_000));
        // 10 ms may go at once; what comes after waits for what was booked.
        assert_eq!(pacer.book(10_000, start), start);
        assert_eq!(pacer.book(500_000, start), start);
        assert_eq!(pacer.book(500_000, start), start + milliseconds(500.0));
        assert_eq!(pacer.book(1, start), start + milliseconds(1000.0));
        // A pause leaves no more than the burst.
        let later = start + Duration::from_secs(60);
        assert_eq!(pacer.book(20_000, later), later);
        assert_eq!(pacer.book(1, later), later + milliseconds(10.0));
    }

    #[test]
    fn it_is_paused_as_long_as_anybody_wants_that() {
        let pacer = Pacer::new();
        let (first, second) = (pacer.pause(), pacer.pause());
        drop(first);
        assert!(pacer.is_paused());
        drop(second);
        assert!(!pacer.is_paused());
    }

    #[test]
    fn what_is_no_share_is_refused() {
        for share in [0.0, -0.5, 1.5, f64::NAN, f64::INFINITY, 1e-12] {
            assert_eq!(Pacer::new().limit(1_000_000, share).unwrap_err().kind(), Kind::InvalidInput);
        }
    }
}
