//! Proof that the bytes of slots are what they should be: every block of every slot, on several threads.
//!
//! Invariants: nothing is believed of a slot but its header; a slot that is cut off is Corrupt as one whose
//! bytes have changed. Blocks are looked at where they lie.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use waystation_format::checksum::{BLOCK_BYTES, crc64};
use waystation_format::slot::{Sums, Tenant, digest};
use waystation_format::{Error, Kind, Result};
use waystation_io::job::in_parallel;

use super::file::SlotFile;

/// Blocks that a thread takes at a time.
const STRETCH_BLOCKS: usize = 16;

/// Verifies what a writer has left: the table of contents keeps its rules, every block has its checksum.
/// Returns what vouches for all of it from then on.
pub(super) fn verify_written(file: &SlotFile, tenant: &Tenant, threads: usize) -> Result<Sums> {
    let (_, contents) = file.contents(tenant)?;
    let block_sums = file.block_sums(tenant)?;
    let digest = digest(contents, block_sums.iter().copied());
    let mut outcome = verify_blocks(&[(file, tenant, block_sums)], threads)?;
    outcome.pop().unwrap_or_else(not_verified).map(|()| Sums { contents, digest })
}

/// Verifies slots against what vouches for them. Returns what was found, slot by slot.
pub(super) fn verify_sealed(slots: &[(&SlotFile, &Tenant, Sums)], threads: usize) -> Result<Vec<Result<()>>> {
    let tables = slots.iter().map(|(file, tenant, sums)| file.tables(tenant, *sums));
    let mut outcomes: Vec<Result<()>> = Vec::with_capacity(slots.len());
    let mut whole = Vec::new();
    for (&(file, tenant, _), tables) in slots.iter().zip(tables) {
        outcomes.push(tables.map(|(_, block_sums)| whole.push((file, tenant, block_sums))));
    }
    let mut found = verify_blocks(&whole, threads)?.into_iter();
    for outcome in &mut outcomes {
        if outcome.is_ok() {
            *outcome = found.next().unwrap_or_else(not_verified);
        }
    }
    Ok(outcomes)
}

/// What has no outcome does not count as whole.
fn not_verified() -> Result<()> {
    Err(Error::new(Kind::Internal, "the blocks of a slot were not verified"))
}

/// One stretch of the blocks of one of the slots.
struct Stretch {
    slot: usize,
    first: usize,
    end: usize,
}

fn verify_blocks(slots: &[(&SlotFile, &Tenant, Vec<u64>)], threads: usize) -> Result<Vec<Result<()>>> {
    let mut stretches = Vec::new();
    for (slot, (_, _, sums)) in slots.iter().enumerate() {
        let begins = (0..sums.len()).step_by(STRETCH_BLOCKS);
        stretches.extend(begins.map(|first| Stretch {
            slot,
            first,
            end: sums.len().min(first + STRETCH_BLOCKS),
        }));
    }
    let outcomes: Vec<Mutex<Result<()>>> = slots.iter().map(|_| Mutex::new(Ok(()))).collect();
    let next = AtomicUsize::new(0);
    in_parallel(threads.clamp(1, stretches.len().max(1)), "waystation-verify", &|| {
        while let Some(stretch) = stretches.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (file, tenant, sums) = &slots[stretch.slot];
            let outcome = verify_stretch(file, tenant, stretch.first, &sums[stretch.first..stretch.end]);
            let mut known = outcomes[stretch.slot].lock().unwrap_or_else(PoisonError::into_inner);
            if known.is_ok() {
                *known = outcome;
            }
        }
        Ok(())
    })?;
    Ok(outcomes
        .into_iter()
        .map(|outcome| outcome.into_inner().unwrap_or_else(PoisonError::into_inner))
        .collect())
}

/// Verifies the blocks of a tenant from `first` on, which have these checksums.
fn verify_stretch(file: &SlotFile, tenant: &Tenant, first: usize, sums: &[u64]) -> Result<()> {
    let data = data_of(file, tenant)?;
    let begin = data.start + first as u64 * BLOCK_BYTES as u64;
    let end = data.end.min(begin + sums.len() as u64 * BLOCK_BYTES as u64);
    file.look(begin..end, |bytes| {
        let blocks = bytes.chunks(BLOCK_BYTES).zip(sums).zip((begin..).step_by(BLOCK_BYTES));
        for ((block, &expected), offset) in blocks {
            check(file, block, offset, expected)?;
        }
        Ok(())
    })?
}

/// Verifies a block of a tenant, which then is at the beginning of `buffer`.
pub(super) fn verify_block(
    file: &SlotFile,
    tenant: &Tenant,
    index: usize,
    expected: u64,
    buffer: &mut [u8],
) -> Result<()> {
    let data = data_of(file, tenant)?;
    let offset = data.start + index as u64 * BLOCK_BYTES as u64;
    let bytes = &mut buffer[..(data.end - offset).min(BLOCK_BYTES as u64) as usize];
    file.read_at(bytes, offset)?;
    check(file, bytes, offset, expected)
}

fn data_of(file: &SlotFile, tenant: &Tenant) -> Result<Range<u64>> {
    tenant.regions().map(|regions| regions.data).ok_or_else(|| file.corrupt("the sizes of a shard overflow"))
}

fn check(file: &SlotFile, block: &[u8], offset: u64, expected: u64) -> Result<()> {
    let actual = crc64(block);
    if actual == expected { Ok(()) } else { Err(damaged(file, offset, expected, actual)) }
}

fn damaged(file: &SlotFile, offset: u64, expected: u64, actual: u64) -> Error {
    file.corrupt("a block of a slot does not match its checksum")
        .with("offset", offset.to_string())
        .with("expected", format!("{expected:016x}"))
        .with("actual", format!("{actual:016x}"))
}
