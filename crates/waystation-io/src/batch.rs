//! Many contiguous copies within host memory, shared out evenly among threads.
//!
//! Invariants: each byte is copied once, by one thread; a destination that nobody has touched yet is faulted
//! in by the thread that fills it, so that the zeros the system puts there are still in that core's cache.

use std::sync::atomic::{AtomicUsize, Ordering};

use waystation_format::Result;
use waystation_format::plan::HostCopy;

use crate::first_touch::prepare;
use crate::job::in_parallel;

/// Bytes that one thread copies at a time: whole huge pages, and long enough that the C library copies past
/// the caches, which for half a megabyte takes half as long again.
const PIECE_BYTES: usize = 4 << 20;
/// Below this, starting threads takes longer than copying.
const ALONE_BYTES: usize = 1 << 20;

/// Makes all copies, on up to `threads` threads, by default as many as there are cores.
///
/// # Safety
/// All sources must be readable, and all destinations writable and used by nobody else; nothing may overlap
/// a destination.
pub unsafe fn copy_all(copies: &[HostCopy], threads: Option<usize>) -> Result<()> {
    let total: usize = copies.iter().map(|copy| copy.nbytes).sum();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.unwrap_or(cores).clamp(1, (total / ALONE_BYTES).max(1));
    let pieces: Vec<HostCopy> = copies.iter().flat_map(pieces).collect();
    let stretches = stretches(&pieces, total.div_ceil(threads).min(PIECE_BYTES));
    let next = AtomicUsize::new(0);
    in_parallel(threads, "waystation-copy", &|| {
        while let Some(stretch) = stretches.get(next.fetch_add(1, Ordering::Relaxed)) {
            for copy in *stretch {
                let (source, destination) = (copy.source as *const u8, copy.destination as *mut u8);
                prepare(copy.destination, copy.nbytes);
                // SAFETY: as the caller promises.
                unsafe { std::ptr::copy_nonoverlapping(source, destination, copy.nbytes) };
            }
        }
        Ok(())
    })
}

/// A copy in pieces of a bounded size.
fn pieces(copy: &HostCopy) -> impl Iterator<Item = HostCopy> {
    let HostCopy { destination, source, nbytes } = *copy;
    (0..nbytes).step_by(PIECE_BYTES).map(move |begin| HostCopy {
        destination: destination + begin,
        source: source + begin,
        nbytes: PIECE_BYTES.min(nbytes - begin),
    })
}

/// Divides copies into stretches of about `nbytes`: thousands of tiny ones must not contend for a counter,
/// and no thread may be left with much more than the others.
fn stretches(copies: &[HostCopy], nbytes: usize) -> Vec<&[HostCopy]> {
    let mut stretch_bytes = 0;
    let belong_together = |copy: &HostCopy, next: &HostCopy| {
        stretch_bytes += copy.nbytes;
        let fits = stretch_bytes + next.nbytes <= nbytes;
        stretch_bytes = if fits { stretch_bytes } else { 0 };
        fits
    };
    copies.chunk_by(belong_together).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn stretches_are_all_copies_in_portions() {
        let divided = |sizes: &[usize], nbytes| -> Vec<Vec<usize>> {
            let copies: Vec<HostCopy> =
                sizes.iter().map(|&nbytes| HostCopy { destination: 1, source: 1, nbytes }).collect();
            let stretches = stretches(&copies, nbytes);
            stretches.iter().map(|stretch| stretch.iter().map(|copy| copy.nbytes).collect()).collect()
        };
        assert_eq!(divided(&[3, 3, 3, 3, 3], 6), [vec![3, 3], vec![3, 3], vec![3]]);
        assert_eq!(divided(&[9, 1, 0, 8], 6), [vec![9], vec![1, 0], vec![8]]);
        assert!(divided(&[], 6).is_empty());
    }

    #[test]
    fn every_byte_arrives_whatever_the_sizes() {
        let sizes = [0, 1, 4095, PIECE_BYTES, 3 * PIECE_BYTES + 5, 17];
        for threads in [None, Some(1), Some(5)] {
            let sources: Vec<Vec<u8>> = sizes
                .iter()
                .map(|&nbytes| (0..nbytes).map(|index| (index % 251 + nbytes % 7) as u8).collect())
                .collect();
            let mut targets: Vec<Vec<u8>> = sizes.iter().map(|&nbytes| vec![0; nbytes]).collect();
            let copies: Vec<HostCopy> = sources
                .iter()
                .zip(&mut targets)
                .map(|(source, target)| HostCopy {
                    destination: target.as_mut_ptr() as usize,
                    source: source.as_ptr() as usize,
                    nbytes: source.len(),
                })
                .collect();
            // SAFETY: sources and targets are vectors that live until here.
            unsafe { copy_all(&copies, threads) }.unwrap();
            assert!(sources == targets);
        }
    }
}
