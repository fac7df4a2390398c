//! What the frames of a connection for bytes of slots are.

use crate::peers::Kinds;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// The client has a version to send.
    Offer = 1,
    /// The client wants a version.
    Fetch = 2,
    /// The receiver is ready; which blocks it has.
    Ready = 3,
    /// Blocks, with their checksums.
    Blocks = 4,
    /// A piece of the table of contents.
    Contents = 5,
    /// The sender wants to know which blocks were damaged.
    Ask = 6,
    /// Which blocks were damaged.
    Damaged = 7,
    /// All is sent; what it amounts to.
    Finish = 8,
    /// The version is whole and verified in its slot.
    Sealed = 9,
    /// The side that says so does not go on.
    Failed = 10,
    /// The side that says so is still there.
    Wait = 11,
    /// The sender has nothing more for this connection; the transfer ends on another.
    Leave = 12,
}

impl Kinds for FrameKind {
    const ALL: &'static [Self] = &[
        FrameKind::Offer,
        FrameKind::Fetch,
        FrameKind::Ready,
        FrameKind::Blocks,
        FrameKind::Contents,
        FrameKind::Ask,
        FrameKind::Damaged,
        FrameKind::Finish,
        FrameKind::Sealed,
        FrameKind::Failed,
        FrameKind::Wait,
        FrameKind::Leave,
    ];

    fn code(self) -> u8 {
        self as u8
    }
}

/// A frame without its bulk; it belongs to the version of whose key it has the digest.
pub type Frame = crate::peers::Frame<FrameKind>;
