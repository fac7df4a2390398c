//! The hook that memory passes through before it is unmapped. Alone in its process: hooks are for ever.

use std::ops::Range;
use std::sync::Mutex;

use waystation_io::aligned::{self, AlignedBlock, HUGE_PAGE_BYTES, Mapping};

static SEEN: Mutex<Vec<Range<usize>>> = Mutex::new(Vec::new());
static KEPT: Mutex<Option<Mapping>> = Mutex::new(None);

fn keep(mapping: Mapping) {
    SEEN.lock().unwrap().push(mapping.range());
    *KEPT.lock().unwrap() = Some(mapping);
}

fn is_mapped(address: usize) -> bool {
    let mut resident = 0u8;
    // SAFETY: asks about one page, and writes the one byte that describes it.
    unsafe { libc::mincore(address as *mut libc::c_void, 1, &raw mut resident) == 0 }
}

#[test]
fn memory_stays_mapped_until_the_hook_lets_go() {
    aligned::before_unmapping(keep);
    aligned::before_unmapping(drop); // comes too late
    for nbytes in [5000, HUGE_PAGE_BYTES + 1] {
        let block = AlignedBlock::map(nbytes).unwrap();
        let (address, mapped) = (block.address().as_ptr() as usize, block.nbytes());
        drop(block);
        assert_eq!(SEEN.lock().unwrap().pop(), Some(address..address + mapped));
        assert!(is_mapped(address));
        drop(KEPT.lock().unwrap().take());
        assert!(!is_mapped(address));
        assert!(SEEN.lock().unwrap().is_empty());
    }
}
