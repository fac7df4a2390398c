//! How slots change and which of them is given to whom, without any file.
//!
//! [`next`] is the state machine of one slot, [`candidates`] the choice among all, [`Hold`] what keeps a slot
//! while somebody uses its bytes.

mod choice;
mod hold;
mod machine;

pub use choice::{Limits, candidates, newest_committed};
pub use hold::{Hold, Word};
pub use machine::{Event, next};
