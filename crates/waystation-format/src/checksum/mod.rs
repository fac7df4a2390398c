//! CRC-64/NVME, the one checksum of the format, and the block size it is taken over. Beside it the CRC-32C of
//! other libraries' formats.
//!
//! Data files are divided into blocks of [`BLOCK_BYTES`] counted from the first byte of the file
//! (the header included; the last block may be short), each with its own checksum.

#[cfg(target_arch = "x86_64")]
mod wide;

use crc_fast::{CrcAlgorithm, Digest};

/// File bytes that one stored checksum covers.
pub const BLOCK_BYTES: usize = 256 * 1024;

/// Below this, the library's way is as fast as any.
#[cfg(target_arch = "x86_64")]
const LEAST_WIDE_BYTES: usize = 4 * wide::STEP_BYTES;

/// CRC-64/NVME of `data`.
pub fn crc64(data: &[u8]) -> u64 {
    let mut sum = Crc64::new();
    sum.update(data);
    sum.finish()
}

/// CRC-64/NVME of a file of `nbytes` bytes, by the checksums of its blocks.
pub fn joined(blocks: impl IntoIterator<Item = u64>, nbytes: u64) -> u64 {
    let mut left = nbytes;
    blocks.into_iter().fold(crc64(&[]), |sum, block| {
        let block_bytes = left.min(BLOCK_BYTES as u64);
        left -= block_bytes;
        crc_fast::checksum_combine(CrcAlgorithm::Crc64Nvme, sum, block, block_bytes)
    })
}

/// CRC-32C (Castagnoli) of `data`: what Zarr and OCDBT protect their indices with.
pub fn crc32c(data: &[u8]) -> u32 {
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, data) as u32
}

/// CRC-32C of bytes that arrive in pieces.
#[derive(Clone, Debug)]
pub struct Crc32c {
    digest: Digest,
}

impl Crc32c {
    /// The checksum of nothing yet.
    pub fn new() -> Self {
        Self { digest: Digest::new(CrcAlgorithm::Crc32Iscsi) }
    }

    /// Appends `data`.
    pub fn update(&mut self, data: &[u8]) {
        self.digest.update(data);
    }

    /// The checksum of everything appended.
    pub fn finish(self) -> u32 {
        self.digest.finalize() as u32
    }
}

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

/// CRC-64/NVME of bytes that arrive in pieces.
#[derive(Clone, Debug)]
pub struct Crc64 {
    /// The remainder of everything appended, and of the ones before it.
    state: u64,
}

impl Crc64 {
    /// The checksum of nothing yet.
    pub fn new() -> Self {
        Self { state: u64::MAX }
    }

    /// Appends `data`.
    pub fn update(&mut self, data: &[u8]) {
        let rest = self.update_wide(data);
        self.update_narrow(rest);
    }

    /// Appends the bytes at `source`, and copies them to `target`: past the caches where there are many, so for
    /// what nobody looks at soon. What is appended is what `target` has then, even if somebody else writes to
    /// the source meanwhile.
    ///
    /// # Safety
    /// At `source` as many bytes as `target` has must be readable, none of them in `target`.
    pub unsafe fn copy(&mut self, source: *const u8, target: &mut [u8]) {
        // SAFETY: as the caller promises.
        let done = unsafe { self.copy_wide(source, target) };
        let rest = &mut target[done..];
        // SAFETY: as the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(source.add(done), rest.as_mut_ptr(), rest.len()) };
        self.update_narrow(rest);
    }

    /// The checksum of everything appended.
    pub fn finish(self) -> u64 {
        !self.state
    }

    fn update_narrow(&mut self, data: &[u8]) {
        let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc64Nvme, self.state);
        digest.update(data);
        self.state = digest.get_state();
    }

    /// Appends as much as can be in whole steps; returns the rest.
    #[cfg(target_arch = "x86_64")]
    fn update_wide<'a>(&mut self, data: &'a [u8]) -> &'a [u8] {
        // Where registers have 512 bits, the library uses them.
        let library_is_wider = is_x86_feature_detected!("avx512vl");
        if data.len() < LEAST_WIDE_BYTES || library_is_wider || !wide::is_supported() {
            return data;
        }
        let steps = data.len() / wide::STEP_BYTES;
        // SAFETY: the processor is supported, and the steps lie in the data.
        self.state = unsafe { wide::fold(self.state, data.as_ptr(), steps) };
        &data[steps * wide::STEP_BYTES..]
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn update_wide<'a>(&mut self, data: &'a [u8]) -> &'a [u8] {
        data
    }

    /// Appends and copies from the beginning as much as can be in whole steps; returns how much.
    ///
    /// # Safety
    /// As for [`Crc64::copy`].
    #[cfg(target_arch = "x86_64")]
    unsafe fn copy_wide(&mut self, source: *const u8, target: &mut [u8]) -> usize {
        let before = target.as_ptr().align_offset(wide::TARGET_ALIGNMENT);
        if target.len() < before.saturating_add(LEAST_WIDE_BYTES) || !wide::is_supported() {
            return 0;
        }
        let (unaligned, aligned) = target.split_at_mut(before);
        // SAFETY: as the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(source, unaligned.as_mut_ptr(), before) };
        self.update_narrow(unaligned);
        let steps = aligned.len() / wide::STEP_BYTES;
        // SAFETY: the processor is supported; the steps lie in the target, for whose length the caller vouches.
        self.state =
            unsafe { wide::fold_copying(self.state, source.add(before), aligned.as_mut_ptr(), steps) };
        before + steps * wide::STEP_BYTES
    }

    /// # Safety
    /// As for [`Crc64::copy`].
    #[cfg(not(target_arch = "x86_64"))]
    unsafe fn copy_wide(&mut self, _source: *const u8, _target: &mut [u8]) -> usize {
        0
    }
}

impl Default for Crc64 {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn checksums_are_those_of_the_catalogue() {
        assert_eq!(crc64(b""), 0);
        assert_eq!(crc64(b"123456789"), 0xae8b_1486_0a79_9888);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    fn data() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![0..100usize, 1000..1100usize, 0..20_000usize]
            .prop_flat_map(|nbytes| prop::collection::vec(any::<u8>(), nbytes))
    }

    #[test]
    fn a_file_has_the_checksum_that_its_blocks_make_up() {
        for nbytes in [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 77] {
            let content: Vec<u8> = (0..nbytes).map(|index| (index * 7 / 5) as u8).collect();
            let blocks = content.chunks(BLOCK_BYTES).map(crc64);
            assert_eq!(joined(blocks, nbytes as u64), crc64(&content));
        }
    }

    proptest! {
        #[test]
        fn bytes_in_pieces_have_the_library_s_checksum(data in data(), cuts: [prop::sample::Index; 2]) {
            let mut cuts = cuts.map(|cut| cut.index(data.len() + 1));
            cuts.sort_unstable();
            let mut sum = Crc64::new();
            for piece in [&data[..cuts[0]], &data[cuts[0]..cuts[1]], &data[cuts[1]..]] {
                sum.update(piece);
            }
            prop_assert_eq!(sum.finish(), crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &data));
        }

        #[test]
        fn a_copy_is_what_its_checksum_says(data in data(), before in 0..100usize, state: u64) {
            let mut target = vec![0xa5; before + data.len() + 100];
            let mut sum = Crc64 { state };
            // SAFETY: both are vectors of their own, and the data as long as the middle of the other.
            unsafe { sum.copy(data.as_ptr(), &mut target[before..before + data.len()]) };
            prop_assert_eq!(&target[before..before + data.len()], &data);
            prop_assert!(target[..before].iter().all(|&byte| byte == 0xa5));
            prop_assert!(target[before + data.len()..].iter().all(|&byte| byte == 0xa5));
            let mut expected = Digest::new_with_init_state(CrcAlgorithm::Crc64Nvme, state);
            expected.update(&data);
            prop_assert_eq!(!sum.finish(), expected.get_state());
        }
    }
}
