//! Which process a writer is, and whether it still runs.
//!
//! Invariants: a process is called dead only on proof: same boot, same namespace of process ids, and no
//! process of that id and start time, or one that has left but for its entry in the process table. Where
//! there is no proof, the answer is [`Life::Unknown`], and nothing of that writer may be taken from it.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use waystation_format::slot::{Id, Writer};
use waystation_format::{Error, Kind, Result};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const NAMESPACE: &str = "/proc/self/ns/pid";
/// Positions among the fields after the name of a process in `/proc/<id>/stat`.
const STATE_FIELD: usize = 0;
const START_FIELD: usize = 19;

/// What is known of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It runs.
    Runs,
    /// It does not run any more, beyond doubt.
    Dead,
    /// It cannot be seen from here.
    Unknown,
}

/// This process.
pub fn current() -> Result<Writer> {
    identify(std::process::id())
}

/// The running process of that id, as this process sees ids.
pub fn identify(process: u32) -> Result<Writer> {
    let (boot, namespace) = scope()?;
    let path = format!("/proc/{process}/stat");
    let text = fs::read_to_string(&path)
        .map_err(|error| Error::from_io(error, "identify a process", Path::new(&path)))?;
    let start_ticks = fields_of(&text).nth(START_FIELD).and_then(|field| field.parse().ok());
    let start_ticks = start_ticks.ok_or_else(|| unreadable(&path))?;
    Ok(Writer { boot, namespace, process, start_ticks })
}

/// Whether a writer still runs.
pub fn life_of(writer: &Writer) -> Result<Life> {
    let (boot, namespace) = scope()?;
    if writer.boot != boot {
        return Ok(Life::Dead); // with the kernel that it ran on, whose memory held the slot
    }
    if writer.namespace != namespace {
        return Ok(Life::Unknown);
    }
    match fs::read_to_string(format!("/proc/{}/stat", writer.process)) {
        Ok(text) => Ok(judge(&text, writer)),
        // ESRCH: it left between being opened and being read.
        Err(error)
            if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH) =>
        {
            Ok(Life::Dead)
        }
        Err(_) => Ok(Life::Unknown),
    }
}

fn judge(text: &str, writer: &Writer) -> Life {
    let mut fields = fields_of(text);
    let state = fields.nth(STATE_FIELD);
    let start = fields.nth(START_FIELD - STATE_FIELD - 1).and_then(|field| field.parse::<u64>().ok());
    match (state, start) {
        (_, None) | (None, _) => Life::Unknown,
        (_, Some(start)) if start != writer.start_ticks => Life::Dead,
        // A zombie's threads may still write; a zombie without other threads cannot.
        (Some("Z" | "X"), _) if thread_count(writer.process) <= 1 => Life::Dead,
        _ => Life::Runs,
    }
}

/// How many threads a process has; none if it is gone.
fn thread_count(process: u32) -> usize {
    fs::read_dir(format!("/proc/{process}/task")).map_or(0, Iterator::count)
}

/// The fields after the name, which may itself hold blanks and brackets.
fn fields_of(text: &str) -> impl Iterator<Item = &str> {
    text.rsplit_once(')').map_or("", |(_, fields)| fields).split_ascii_whitespace()
}

/// The boot and the namespace in which process ids have their meaning here.
fn scope() -> Result<(Id, u64)> {
    let text = fs::read_to_string(BOOT_ID)
        .map_err(|error| Error::from_io(error, "read the id of the boot", Path::new(BOOT_ID)))?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let boot = u128::from_str_radix(&digits, 16).map_err(|_| unreadable(BOOT_ID))?;
    let namespace = fs::metadata(NAMESPACE)
        .map_err(|error| Error::from_io(error, "examine the namespace of processes", Path::new(NAMESPACE)))?;
    Ok((Id(boot.to_be_bytes()), namespace.ino()))
}

fn unreadable(path: &str) -> Error {
    Error::new(Kind::Unsupported, "the system describes its processes in an unknown way").with("path", path)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn this_process_runs_and_one_with_its_id_that_began_at_another_time_does_not() {
        let own = current().unwrap();
        assert_eq!(own.process, std::process::id());
        assert_eq!(life_of(&own).unwrap(), Life::Runs);
        assert_eq!(life_of(&Writer { start_ticks: own.start_ticks + 1, ..own }).unwrap(), Life::Dead);
        assert_eq!(life_of(&Writer { boot: Id([0; 16]), ..own }).unwrap(), Life::Dead);
        assert_eq!(life_of(&Writer { namespace: 0, ..own }).unwrap(), Life::Unknown);
    }

    #[test]
    fn a_killed_process_is_dead_before_and_after_its_parent_has_noticed() {
        let mut child = Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap();
        let writer = identify(child.id()).unwrap();
        assert_eq!(life_of(&writer).unwrap(), Life::Runs);
        child.kill().unwrap();
        while life_of(&writer).unwrap() == Life::Runs {
            std::thread::yield_now(); // SIGKILL takes effect when the process is scheduled
        }
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        assert_eq!(fields_of(&stat).nth(STATE_FIELD), Some("Z"));
        assert_eq!(life_of(&writer).unwrap(), Life::Dead);
        child.wait().unwrap();
        assert_eq!(life_of(&writer).unwrap(), Life::Dead);
        assert_eq!(identify(child.id()).unwrap_err().kind(), Kind::NotFound);
    }

    #[test]
    fn names_of_processes_may_hold_anything() {
        let text = format!("77 (a ) R 1 (b) S {} 4242 0", vec!["0"; START_FIELD - 1].join(" "));
        let writer = Writer { process: 77, start_ticks: 4242, ..Writer::default() };
        assert_eq!(judge(&text, &writer), Life::Runs);
        assert_eq!(judge("77 (x) S 1 2", &writer), Life::Unknown);
        assert_eq!(judge("", &writer), Life::Unknown);
    }
}
