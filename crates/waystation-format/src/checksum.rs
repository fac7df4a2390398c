//! CRC-64/NVME, the one checksum of the format, and the block size it is taken over. Beside it the CRC-32C of
//! other libraries' formats.
//!
//! Data files are divided into blocks of [`BLOCK_BYTES`] counted from the first byte of the file
//! (the header included; the last block may be short), each with its own checksum.

use crc_fast::{CrcAlgorithm, Digest};

/// File bytes that one stored checksum covers.
pub const BLOCK_BYTES: usize = 256 * 1024;

/// CRC-64/NVME of `data`.
pub fn crc64(data: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Nvme, data)
}

/// CRC-32C (Castagnoli) of `data`: what Zarr and OCDBT protect their indices with.
pub fn crc32c(data: &[u8]) -> u32 {
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, data) as u32
}

/// CRC-64/NVME of bytes that arrive in pieces.
pub struct Crc64(Digest);

impl Crc64 {
    /// The checksum of nothing yet.
    pub fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc64Nvme))
    }

    /// Appends `data`.
    pub fn update(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    /// The checksum of everything appended.
    pub fn finish(self) -> u64 {
        self.0.finalize()
    }
}

impl Default for Crc64 {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_catalogue() {
        assert_eq!(crc64(b"123456789"), 0xae8b_1486_0a79_9888);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }
}
