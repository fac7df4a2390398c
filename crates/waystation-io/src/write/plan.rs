//! What a write job is to put where: parsed from words, checked whole before anything is touched.
//!
//! Invariants of a [`Plan`]: in every file the header and the segments cover each byte exactly once, in
//! file order, unless a feed has its bytes; the blocks of a segment partition its array; no sum or product overflows. Parsing reads
//! no source memory and trusts no number.

use std::ops::Range;
use std::path::{Path, PathBuf};

use waystation_format::checksum::Crc64;
use waystation_format::plan::{self, each};
use waystation_format::{Error, Kind, Result};

use crate::copy::{BoxCopy, array_bytes};
use crate::segment::{Segment, is_partition};

/// One file as the caller describes it; `words` are records of [`plan::Segment`].
#[derive(Clone, Debug)]
pub struct FileInput {
    /// Where the file is to be; nothing may be there yet.
    pub path: PathBuf,
    /// Its first bytes.
    pub header: Vec<u8>,
    /// Its size.
    pub file_bytes: u64,
    /// What comes after the header.
    pub words: Vec<i64>,
}

/// An array in a file: its blocks in host memory, and those in each device's.
pub struct PlannedSegment {
    file_offset: u64,
    pub host: Segment,
    pub devices: Vec<(u32, Segment)>,
}

/// One file, checked.
pub struct FilePlan {
    /// Where it is to be.
    pub path: PathBuf,
    /// Its size.
    pub file_bytes: u64,
    header: Vec<u8>,
    segments: Vec<PlannedSegment>,
    /// Segment bytes of all files before this one.
    position: u64,
}

/// All files of a job.
pub struct Plan {
    /// The files.
    pub files: Vec<FilePlan>,
    /// Their sizes together.
    pub total_bytes: u64,
    /// Whether some of it comes from devices.
    pub has_device_blocks: bool,
}

impl Plan {
    /// Decodes and checks what the caller gives.
    pub fn parse(inputs: Vec<FileInput>) -> Result<Self> {
        let mut plan =
            Self { files: Vec::with_capacity(inputs.len()), total_bytes: 0, has_device_blocks: false };
        let mut position = 0u64;
        for input in inputs {
            let path = input.path.clone();
            let file = FilePlan::parse(input, position).map_err(|error| named(error, &path))?;
            let total = plan.total_bytes.checked_add(file.file_bytes);
            plan.total_bytes =
                total.ok_or_else(|| named(invalid("the sizes of the files overflow"), &path))?;
            position += file.file_bytes - file.header.len() as u64;
            plan.has_device_blocks |= file.segments.iter().any(|segment| !segment.devices.is_empty());
            plan.files.push(file);
        }
        Ok(plan)
    }

    /// Files whose bytes a feed has: without headers and segments.
    pub(super) fn fed(inputs: Vec<FileInput>) -> Result<Self> {
        let mut plan = Self { files: Vec::new(), total_bytes: 0, has_device_blocks: false };
        for FileInput { path, file_bytes, .. } in inputs {
            let position = plan.total_bytes;
            let total = position.checked_add(file_bytes).filter(|&total| i64::try_from(total).is_ok());
            plan.total_bytes =
                total.ok_or_else(|| named(invalid("the sizes of the files overflow"), &path))?;
            plan.files.push(FilePlan {
                path,
                file_bytes,
                header: Vec::new(),
                segments: Vec::new(),
                position,
            });
        }
        Ok(plan)
    }

    /// The pieces (blocks of files, counted over all files) that hold bytes of ranges of plan positions.
    pub fn pieces_of(
        &self,
        ranges: &[Range<u64>],
        block_bytes: u64,
        first_pieces: &[u64],
    ) -> Vec<Range<u64>> {
        let mut found = Vec::new();
        for range in ranges {
            for (file, &first) in self.files.iter().zip(first_pieces) {
                let end = file.position + (file.file_bytes - file.header.len() as u64);
                let (begin, end) = (range.start.max(file.position), range.end.min(end));
                if begin < end {
                    let offset = |position: u64| position - file.position + file.header.len() as u64;
                    let last = offset(end).div_ceil(block_bytes);
                    found.push(first + offset(begin) / block_bytes..first + last);
                }
            }
        }
        found
    }
}

impl FilePlan {
    fn parse(input: FileInput, position: u64) -> Result<Self> {
        let FileInput { path, header, file_bytes, words } = input;
        if i64::try_from(file_bytes).is_err() {
            return Err(invalid("the size of the file is beyond what a file can have"));
        }
        let mut end = header.len() as u64;
        let segments = each(&words, |_, record| {
            let segment = PlannedSegment::new(record)?;
            if segment.file_offset != end {
                let message = format!("a segment begins at {} instead of {end}", segment.file_offset);
                return Err(Error::new(Kind::InvalidInput, message));
            }
            end = end
                .checked_add(segment.host.nbytes())
                .filter(|&end| end <= file_bytes)
                .ok_or_else(|| invalid("a segment reaches beyond the end of its file"))?;
            Ok(segment)
        })?;
        if end != file_bytes {
            let message = format!("header and segments end at {end}, the file at {file_bytes}");
            return Err(Error::new(Kind::InvalidInput, message));
        }
        Ok(Self { path, file_bytes, header, segments, position })
    }

    /// The plan position (see `Job.wait_gathered`) that byte `offset` of this file stands for.
    pub fn position_at(&self, offset: u64) -> u64 {
        self.position + offset.saturating_sub(self.header.len() as u64)
    }

    /// Fills `bytes` with what the file has from `offset` on and host memory holds. Returns the checksum of
    /// them, and so of what was copied there from devices before.
    ///
    /// # Safety
    /// The host blocks of the plan must be readable and not overlap `bytes`.
    pub unsafe fn gather(&self, offset: u64, bytes: &mut [u8], past_caches: bool) -> u64 {
        let mut sum = Crc64::new();
        if let Some(header) = self.header.get(offset as usize..) {
            let shared = &header[..header.len().min(bytes.len())];
            bytes[..shared.len()].copy_from_slice(shared);
            sum.update(shared);
        }
        // One after another, without gaps: `parse` has seen to that.
        for (segment, part) in self.segments_in(offset..offset + bytes.len() as u64) {
            let target = &mut bytes[(part.start - offset) as usize..(part.end - offset) as usize];
            let start = part.start - segment.file_offset;
            if past_caches {
                // SAFETY: the caller vouches for the sources.
                unsafe { segment.host.gather_summed(start, target, &mut sum) };
            } else {
                // SAFETY: as above.
                unsafe { segment.host.gather(start, target) };
                sum.update(target);
            }
        }
        sum.finish()
    }

    /// Visits the device blocks that have bytes in a range of the file: device, block, and the part of
    /// the range in question as file offsets, with where the array begins in the file.
    pub fn for_each_device_block(
        &self,
        range: Range<u64>,
        mut visit: impl FnMut(u32, &BoxCopy, Range<u64>, u64),
    ) {
        for (segment, part) in self.segments_in(range) {
            for (device, blocks) in &segment.devices {
                let linear = part.start - segment.file_offset..part.end - segment.file_offset;
                for block in blocks.blocks_in(linear.clone()) {
                    visit(*device, block, linear.clone(), segment.file_offset);
                }
            }
        }
    }

    fn segments_in(&self, range: Range<u64>) -> impl Iterator<Item = (&PlannedSegment, Range<u64>)> {
        let end_of = |segment: &PlannedSegment| segment.file_offset + segment.host.nbytes();
        let first = self.segments.partition_point(|segment| end_of(segment) <= range.start);
        self.segments[first..].iter().take_while(move |segment| segment.file_offset < range.end).filter_map(
            move |segment| {
                let part = segment.file_offset.max(range.start)..end_of(segment).min(range.end);
                (!part.is_empty()).then_some((segment, part))
            },
        )
    }
}

/// The segments of words that belong to no file: their offsets say nothing.
pub(super) fn parse_segments(words: &[i64]) -> Result<Vec<PlannedSegment>> {
    each(words, |_, record| PlannedSegment::new(record))
}

/// The segments of words and where each begins, for a target that is no file and has room between them.
///
/// InvalidInput if they break a rule of segments, Unsupported if memory of a device is among their sources.
pub fn host_segments(words: &[i64]) -> Result<Vec<(u64, Segment)>> {
    each(words, |_, record| {
        let segment = PlannedSegment::new(record)?;
        if segment.devices.is_empty() {
            return Ok((segment.file_offset, segment.host));
        }
        let message = "memory of a device is among the sources; copy it to host memory first";
        Err(Error::new(Kind::Unsupported, message))
    })
}

impl PlannedSegment {
    fn new(record: plan::Segment<'_>) -> Result<Self> {
        let plan::Segment { file_offset, item_bytes, shape, blocks } = record;
        let nbytes = array_bytes(&shape, item_bytes)?;
        let mut host = Vec::new();
        let mut devices: Vec<(u32, Vec<BoxCopy>)> = Vec::new();
        for plan::Block { device, source, offset, shape: extent, strides } in &blocks {
            let block = BoxCopy::new(&shape, item_bytes, offset, extent, *source, strides)?;
            match device {
                None => host.push(block),
                Some(device) => match devices.iter_mut().find(|(known, _)| known == device) {
                    Some((_, blocks)) => blocks.push(block),
                    None => devices.push((*device, vec![block])),
                },
            }
        }
        let views: Vec<(&[u64], &[u64])> =
            blocks.iter().map(|block| (&block.offset[..], &block.shape[..])).collect();
        if nbytes > 0 && !is_partition(&shape, &views) {
            return Err(invalid("the blocks of an array overlap or leave a hole"));
        }
        let devices =
            devices.into_iter().map(|(device, blocks)| (device, Segment::new(nbytes, blocks))).collect();
        Ok(Self { file_offset, host: Segment::new(nbytes, host), devices })
    }
}

fn named(error: Error, path: &Path) -> Error {
    error.with("path", path.display().to_string())
}

fn invalid(message: &'static str) -> Error {
    Error::new(Kind::InvalidInput, message)
}
