//! How long the requests of one job take, and which take far longer than others: a second one is sent for those.
//!
//! Of a store with many servers some requests are slow for reasons of one server or one connection, and a load waits for
//! its slowest. A second request most likely meets another. So that a store that is slow as a whole does not get twice
//! the requests, few of a job's may be sent again, and what counts as slow follows from what the job itself has seen.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, timeout};

/// Nothing is slow that takes less: threads that verify keep others waiting for so long now and then.
const LEAST: Duration = Duration::from_millis(250);
/// What takes so many times as long as nine of ten others is slow.
const TIMES: u32 = 4;
/// So many others have to be known.
const FEWEST: usize = 4;
/// Of so many requests one may be sent again, and one more.
const SHARE: usize = 20;
/// As many are remembered.
const MOST: usize = 256;
/// How often it is looked whether a request is slow. It has to be so at two looks, between which it could go on.
const LOOK: Duration = Duration::from_millis(50);

/// The requests of one job.
#[derive(Default)]
pub struct Pace {
    begun: AtomicUsize,
    repeated: AtomicUsize,
    /// Their bytes, and how long they took; the latest.
    ended: Mutex<Vec<(u64, Duration)>>,
    count: AtomicUsize,
}

impl Pace {
    /// The outcome of a request for so many bytes; `None` once it is slow, and a second one may be sent.
    pub async fn in_usual_time<T>(
        &self,
        request: &mut (impl Future<Output = Result<T, waystation_format::Error>> + Unpin),
        nbytes: u64,
    ) -> Option<Result<T, waystation_format::Error>> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        let began = Instant::now();
        let mut looks = 0;
        loop {
            if let Ok(outcome) = timeout(LOOK, &mut *request).await {
                if outcome.is_ok() {
                    self.note(nbytes, began.elapsed());
                }
                return Some(outcome);
            }
            let is_slow = self.usual(nbytes).is_some_and(|usual| began.elapsed() > usual);
            looks = if is_slow { looks + 1 } else { 0 };
            if looks > 1 && self.may_repeat() {
                return None;
            }
        }
    }

    /// How many second requests there were.
    pub fn repeated(&self) -> usize {
        self.repeated.load(Ordering::Relaxed)
    }

    fn may_repeat(&self) -> bool {
        let most = 1 + self.begun.load(Ordering::Relaxed) / SHARE;
        let add = |repeated| (repeated < most).then_some(repeated + 1);
        self.repeated.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    fn note(&self, nbytes: u64, duration: Duration) {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        match ended.get_mut(number % MOST) {
            Some(oldest) => *oldest = (nbytes, duration),
            None => ended.push((nbytes, duration)),
        }
    }

    /// How long a request for so many bytes takes at most, if it is not slow: requests for fewer bytes say nothing of
    /// that. `None` while too little is known.
    fn usual(&self, nbytes: u64) -> Option<Duration> {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let as_large = ended.iter().filter(|(other, _)| *other >= nbytes / 2);
        let mut durations: Vec<Duration> = as_large.map(|(_, duration)| *duration).collect();
        if durations.len() < FEWEST {
            return None;
        }
        let most = durations.len() * 9 / 10;
        let (_, found, _) = durations.select_nth_unstable(most);
        Some((*found * TIMES).max(LEAST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_usual_is_known_once_enough_has_ended() {
        let pace = Pace::default();
        for number in 1..=10 {
            assert_eq!(pace.usual(100).is_some(), number > FEWEST as u64);
            pace.note(100, Duration::from_secs(number));
        }
        assert_eq!(pace.usual(100), Some(Duration::from_secs(40)));
        assert_eq!(pace.usual(10), Some(Duration::from_secs(40)));
        assert_eq!(pace.usual(1000), None, "nothing as large is known");
        for _ in 0..MOST {
            pace.note(100, Duration::from_millis(1));
        }
        assert_eq!(pace.usual(100), Some(LEAST));
    }

    #[test]
    fn few_requests_are_repeated() {
        let pace = Pace::default();
        pace.begun.store(100, Ordering::Relaxed);
        let allowed = (0..50).filter(|_| pace.may_repeat()).count();
        assert_eq!((allowed, pace.repeated()), (6, 6));
    }
}
