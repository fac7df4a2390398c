//! A slot's file as memory that is only looked at, and that anybody may shorten meanwhile.
//!
//! To read a file in memory through the system costs more than its bytes do, page for page; mapped once, they are
//! read as fast as memory is. The price: who touches a page that the file has no more gets a signal (SIGBUS).
//! A thread says what it looks at, and the handler of the signal notes that the view is torn and puts zeros in its
//! place: what is seen of it from then on does not count.
//!
//! Invariants: the handler does nothing that a handler may not do (signal-safety(7)), and takes no lock; a
//! signal about other memory goes to whoever had handled it before.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::mem::{MaybeUninit, transmute};
use std::ops::Range;
use std::ptr::{NonNull, null, null_mut};
use std::slice;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{c_int, c_void, siginfo_t};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A file as memory; it has what the file had when it was mapped, or is torn.
#[derive(Debug)]
pub(super) struct View {
    address: NonNull<c_void>,
    nbytes: usize,
    is_torn: AtomicBool,
}

// SAFETY: a mapping belongs to the process, not to a thread, and is only read.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

thread_local! {
    static VIEWED: Cell<*const View> = const { Cell::new(null()) };
}

type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

/// What was done at a signal before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

impl View {
    /// Maps the first `nbytes` bytes of a file, which are some.
    pub fn new(file: &File, nbytes: u64) -> io::Result<Self> {
        handle_signals()?;
        let nbytes = usize::try_from(nbytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        // SAFETY: a fresh mapping at an address that the kernel chooses.
        let mapped = unsafe { mmap(null_mut(), nbytes, ProtFlags::READ, MapFlags::SHARED, file, 0) }?;
        let address = NonNull::new(mapped).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { address, nbytes, is_torn: AtomicBool::new(false) })
    }

    /// Lets `look` see a range; None if the view does not have it, at the beginning or in the end.
    pub fn look<T>(&self, range: Range<u64>, look: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let (begin, end) = (usize::try_from(range.start).ok()?, usize::try_from(range.end).ok()?);
        if begin > end || end > self.nbytes {
            return None;
        }
        let watched = Watched::new(self);
        // SAFETY: the range is mapped as long as the view is there, also where the file ends: by the handler. What
        // somebody writes there meanwhile makes other checksums, which is what is looked for.
        let bytes =
            unsafe { slice::from_raw_parts(self.address.cast::<u8>().as_ptr().add(begin), end - begin) };
        let seen = look(bytes);
        drop(watched);
        if self.is_torn.load(Ordering::Acquire) { None } else { Some(seen) }
    }

    fn contains(&self, address: usize) -> bool {
        let begin = self.address.as_ptr() as usize;
        (begin..begin + self.nbytes).contains(&address)
    }

    /// Puts zeros in its place, so that looks can go on; false if that cannot be.
    fn tear(&self) -> bool {
        self.is_torn.store(true, Ordering::Release);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: the range is the mapping of the view, which is only read.
        let zeros = unsafe { libc::mmap(self.address.as_ptr(), self.nbytes, libc::PROT_READ, flags, -1, 0) };
        zeros != libc::MAP_FAILED
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody has what was borrowed of it any more.
        let unmapped = unsafe { munmap(self.address.as_ptr(), self.nbytes) };
        debug_assert!(unmapped.is_ok());
    }
}

/// As long as it is there, the handler knows what this thread looks at.
struct Watched<'view> {
    outer: *const View,
    _view: &'view View,
}

impl<'view> Watched<'view> {
    fn new(view: &'view View) -> Self {
        Self { outer: VIEWED.replace(view), _view: view }
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        VIEWED.set(self.outer);
    }
}

/// Has the process handle the signal, from the first call on.
fn handle_signals() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), c_int>> = OnceLock::new();
    let install = || install().map_err(|error| error.raw_os_error().unwrap_or(libc::EINVAL));
    INSTALLED.get_or_init(install).map_err(io::Error::from_raw_os_error)
}

fn install() -> io::Result<()> {
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: it only says what is done now.
    if unsafe { libc::sigaction(libc::SIGBUS, null(), before.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above has filled it; all of its fields may be zero besides.
    BEFORE.get_or_init(|| unsafe { before.assume_init() });
    let handler: Handler = on_bus_error;
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the handler is a function of the kind that the flags say.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

extern "C" fn on_bus_error(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let viewed = VIEWED.try_with(Cell::get).unwrap_or(null());
    // SAFETY: what this thread looks at lives until it has said that it does not any more.
    if let Some(view) = unsafe { viewed.as_ref() } {
        // SAFETY: the kernel gives the information of the signal, which has an address.
        let at = unsafe { (*info).si_addr() } as usize;
        if view.contains(at) && view.tear() {
            return;
        }
    }
    pass_on(signal, info, context);
}

/// Does what was done at the signal before.
fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    match BEFORE.get() {
        Some(before) if ![libc::SIG_DFL, libc::SIG_IGN].contains(&before.sa_sigaction) => {
            // SAFETY: a handler that was installed takes at least what it is called with; what it takes more is
            // there.
            let handler = unsafe { transmute::<usize, Handler>(before.sa_sigaction) };
            handler(signal, info, context);
        }
        _ => {
            // SAFETY: what is touched again is a signal again, which ends the process then.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;
    use std::sync::Barrier;

    use waystation_format::page::PAGE_BYTES;

    use super::*;

    const NBYTES: u64 = 8 * PAGE_BYTES as u64;

    fn file() -> File {
        let mut file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.write_all(&[7; NBYTES as usize]).unwrap();
        file
    }

    fn sum(bytes: &[u8]) -> u64 {
        bytes.iter().map(|&byte| u64::from(byte)).sum()
    }

    #[test]
    fn a_range_is_seen_as_it_is() {
        let view = View::new(&file(), NBYTES).unwrap();
        assert_eq!(view.look(0..NBYTES, sum), Some(7 * NBYTES));
        assert_eq!(view.look(5..15, sum), Some(70));
        assert_eq!(view.look(NBYTES..NBYTES, sum), Some(0));
        assert_eq!(view.look(0..NBYTES + 1, sum), None);
        assert_eq!(view.look(u64::MAX..u64::MAX, sum), None);
    }

    #[test]
    fn a_file_that_is_too_short_or_gets_so_is_noticed() {
        let file = file();
        let view = View::new(&file, NBYTES).unwrap();
        let shortened = view.look(0..NBYTES, |bytes| {
            let before = sum(&bytes[..PAGE_BYTES]);
            file.set_len(PAGE_BYTES as u64).unwrap();
            before + sum(bytes)
        });
        assert_eq!(shortened, None);
        // It stays so, whatever becomes of the file; another view has what that has.
        file.set_len(NBYTES).unwrap();
        assert_eq!(view.look(0..10, sum), None);
        assert_eq!(View::new(&file, NBYTES).unwrap().look(0..NBYTES, sum), Some(7 * PAGE_BYTES as u64));
    }

    #[test]
    fn a_look_within_a_look_does_not_end_the_outer_one() {
        let files = [file(), file()];
        let [outer, inner] = files.each_ref().map(|file| View::new(file, NBYTES).unwrap());
        files[1].set_len(0).unwrap();
        let seen = outer.look(0..NBYTES, |bytes| {
            assert_eq!(inner.look(0..NBYTES, sum), None);
            files[0].set_len(0).unwrap();
            sum(bytes)
        });
        assert_eq!(seen, None);
    }

    #[test]
    fn threads_look_at_a_file_that_one_of_them_shortens() {
        for _ in 0..100 {
            let file = file();
            let view = View::new(&file, NBYTES).unwrap();
            let barrier = Barrier::new(4);
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let (view, file, barrier) = (&view, &file, &barrier);
                    scope.spawn(move || {
                        barrier.wait();
                        if thread == 0 {
                            file.set_len(0).unwrap();
                        }
                        let seen = view.look(0..NBYTES, sum);
                        assert!(seen.is_none_or(|sum| thread > 0 && sum == 7 * NBYTES), "{seen:?}");
                    });
                }
            });
        }
    }

    #[test]
    fn a_signal_about_other_memory_ends_the_process_as_before() {
        let name = "store::viewed::tests::looks_at_one_file_and_touches_another_that_is_gone";
        let program = std::env::current_exe().unwrap();
        let ended = Command::new(program).args(["--exact", name, "--ignored"]).output().unwrap();
        assert_eq!(ended.status.signal(), Some(libc::SIGBUS), "{ended:?}");
    }

    #[test]
    #[ignore = "it ends its process; the test above runs it in one of its own"]
    fn looks_at_one_file_and_touches_another_that_is_gone() {
        let other = file();
        // SAFETY: a fresh mapping at an address that the kernel chooses.
        let mapped = unsafe { mmap(null_mut(), PAGE_BYTES, ProtFlags::READ, MapFlags::SHARED, &other, 0) };
        let mapped: *const u8 = mapped.unwrap().cast();
        other.set_len(0).unwrap();
        // SAFETY: it is mapped, though not there any more.
        View::new(&file(), NBYTES).unwrap().look(0..NBYTES, |_| unsafe { mapped.read_volatile() });
    }
}
