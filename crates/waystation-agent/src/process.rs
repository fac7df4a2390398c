//! Which process a writer is, and whether it still runs.
//!
//! Invariants: a process is called dead only on proof: same boot, same namespace of process ids, and no
//! process of that id and start time, or one that has left but for its entry in the process table. A process
//! that /proc does not show (`hidepid`) is not dead while the kernel has one of its id. Where there is no proof,
//! the answer is [`Life::Unknown`], and nothing of that writer may be taken from it. Python asks in the same way
//! (`waystation/_processes.py`); `tests/vectors/processes.json` holds both to it.

use std::fs;
use std::io;
use std::path::Path;

use waystation_format::slot::{Id, Writer};
use waystation_format::{Error, Kind, Result};

const PROC: &str = "/proc";
/// Beneath /proc.
const BOOT_ID: &str = "sys/kernel/random/boot_id";
const NAMESPACE: &str = "self/ns/pid";
const TIME_NAMESPACE: &str = "self/ns/time";
const OWN: &str = "self/stat";
/// The same number on every kernel that has namespaces of time.
const INITIAL_TIME: u64 = 4_026_531_834;
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
    let (boot, namespace) = scope(Path::new(PROC))?;
    let path = format!("{PROC}/{process}/stat");
    let text = fs::read_to_string(&path)
        .map_err(|error| Error::from_io(error, "identify a process", Path::new(&path)))?;
    let start_ticks = fields_of(&text).nth(START_FIELD).and_then(|field| field.parse().ok());
    let start_ticks = start_ticks.ok_or_else(|| unreadable(&path))?;
    Ok(Writer { boot, namespace, process, start_ticks })
}

/// Whether a writer still runs.
pub fn life_of(writer: &Writer) -> Result<Life> {
    life_in(Path::new(PROC), writer)
}

fn life_in(proc: &Path, writer: &Writer) -> Result<Life> {
    let (boot, namespace) = scope(proc)?;
    if writer.boot != boot {
        return Ok(Life::Dead); // with the kernel that it ran on, whose memory held the slot
    }
    if writer.namespace != namespace {
        return Ok(Life::Unknown);
    }
    let own = proc.join(writer.process.to_string());
    match fs::read_to_string(own.join("stat")) {
        Ok(text) => Ok(judge(&text, &own, writer)),
        Err(error) if is_absent(&error) => Ok(absent(writer.process)),
        Err(_) => Ok(Life::Unknown),
    }
}

fn judge(text: &str, own: &Path, writer: &Writer) -> Life {
    let mut fields = fields_of(text);
    let state = fields.nth(STATE_FIELD);
    let start = fields.nth(START_FIELD - STATE_FIELD - 1).and_then(|field| field.parse::<u64>().ok());
    match (state, start) {
        (_, None) | (None, _) => Life::Unknown,
        (_, Some(start)) if start != writer.start_ticks => Life::Dead,
        // A zombie's threads may still write; a zombie without other threads cannot.
        (Some("Z" | "X"), _) => match fs::read_dir(own.join("task")) {
            Ok(threads) => {
                if threads.count() > 1 {
                    Life::Runs
                } else {
                    Life::Dead
                }
            }
            Err(error) if is_absent(&error) => absent(writer.process),
            Err(_) => Life::Unknown,
        },
        _ => Life::Runs,
    }
}

/// ESRCH: it left between being opened and being read.
fn is_absent(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// What is known of a process that /proc does not show.
fn absent(process: u32) -> Life {
    let Ok(id) = libc::pid_t::try_from(process) else { return Life::Unknown };
    // SAFETY: no signal is sent; the call only looks.
    let answer = unsafe { libc::kill(id, 0) };
    let is_nobody = answer != 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
    if is_nobody { Life::Dead } else { Life::Unknown }
}

/// The fields after the name, which may itself hold blanks and brackets.
fn fields_of(text: &str) -> impl Iterator<Item = &str> {
    text.rsplit_once(')').map_or("", |(_, fields)| fields).split_ascii_whitespace()
}

/// The boot and the namespaces in which process ids and start times have their meaning here. Numbers of
/// namespaces have 32 bits: that of time is in the upper half, where it is not the initial one.
fn scope(proc: &Path) -> Result<(Id, u64)> {
    let own_path = proc.join(OWN);
    let own = fs::read_to_string(&own_path)
        .map_err(|error| Error::from_io(error, "examine this process", &own_path))?;
    if own.split(' ').next() != Some(std::process::id().to_string().as_str()) {
        let message = "/proc was mounted in another namespace of process ids, so it does not tell which \
                       processes run; mount it anew in this one";
        return Err(Error::new(Kind::Unsupported, message));
    }
    let (boot_path, namespace_path) = (proc.join(BOOT_ID), proc.join(NAMESPACE));
    let text = fs::read_to_string(&boot_path)
        .map_err(|error| Error::from_io(error, "read the id of the boot", &boot_path))?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let boot = u128::from_str_radix(&digits, 16).map_err(|_| unreadable(&boot_path.display().to_string()))?;
    let processes = namespace(&namespace_path)?;
    let time = match namespace(&proc.join(TIME_NAMESPACE)) {
        Err(error) if error.kind() == Kind::NotFound => INITIAL_TIME, // Linux before 5.6
        found => found?,
    };
    let upper = if time == INITIAL_TIME { 0 } else { time << 32 };
    Ok((Id(boot.to_be_bytes()), upper | processes))
}

/// The number in a link such as `pid:[4026531836]`.
fn namespace(path: &Path) -> Result<u64> {
    let link = fs::read_link(path)
        .map_err(|error| Error::from_io(error, "examine a namespace of processes", path))?;
    let number = link.to_str().and_then(|text| text.split_once(":[")?.1.strip_suffix(']')?.parse().ok());
    number.ok_or_else(|| unreadable(&path.display().to_string()))
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

    #[derive(serde::Deserialize)]
    struct Vectors {
        here: Scope,
        cases: Vec<Case>,
    }

    #[derive(serde::Deserialize)]
    struct Scope {
        boot: String,
        namespace: u64,
    }

    #[derive(serde::Deserialize)]
    struct Case {
        what: String,
        writer: Began,
        stat: Option<String>,
        tasks: Option<usize>,
        exists: bool,
        life: String,
    }

    #[derive(serde::Deserialize)]
    struct Began {
        boot: String,
        namespace: u64,
        start: u64,
    }

    fn boot(text: &str) -> Id {
        Id(u128::from_str_radix(&text.replace('-', ""), 16).unwrap().to_be_bytes())
    }

    #[test]
    fn processes_are_judged_as_python_judges_them() {
        let vectors: Vectors = serde_json::from_str(include_str!("../tests/vectors/processes.json")).unwrap();
        for case in vectors.cases {
            let proc = tempfile::tempdir().unwrap();
            // No process has an id beyond the highest that Linux gives.
            let process = if case.exists { std::process::id() } else { 1 << 23 };
            let own = proc.path().join(process.to_string());
            for directory in ["sys/kernel/random", "self/ns"] {
                fs::create_dir_all(proc.path().join(directory)).unwrap();
            }
            fs::write(proc.path().join(BOOT_ID), format!("{}\n", vectors.here.boot)).unwrap();
            fs::write(proc.path().join(OWN), format!("{} (tests)", std::process::id())).unwrap();
            let link = format!("pid:[{}]", vectors.here.namespace);
            std::os::unix::fs::symlink(link, proc.path().join(NAMESPACE)).unwrap();
            if let Some(stat) = &case.stat {
                fs::create_dir_all(&own).unwrap();
                fs::write(own.join("stat"), stat.replace("{process}", &process.to_string())).unwrap();
            }
            for task in 0..case.tasks.unwrap_or(0) {
                fs::create_dir_all(own.join("task").join(task.to_string())).unwrap();
            }
            let writer = Writer {
                boot: boot(&case.writer.boot),
                namespace: case.writer.namespace,
                process,
                start_ticks: case.writer.start,
            };
            let found = format!("{:?}", life_in(proc.path(), &writer).unwrap()).to_lowercase();
            assert_eq!(found, case.life, "{}", case.what);
        }
    }
}
