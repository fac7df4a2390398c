//! The command line of `waystation-agent`.

mod help;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use waystation_format::slot::Id;
use waystation_format::{Error, Kind, Result};

use self::help::HELP;
use super::cluster;
use crate::store::{Config, slot_bytes};

const DEFAULT_CONTENTS_BYTES: u64 = 1 << 20;
/// Commits that are kept.
const DEFAULT_VERSIONS: u32 = 2;
const MOST_DEFAULT_THREADS: usize = 4;
/// Options of `run` that take a value, and those that take none.
const RUN_OPTIONS: [&str; 23] = [
    "--directory",
    "--run-id",
    "--topology",
    "--slots",
    "--data-bytes",
    "--contents-bytes",
    "--slot-bytes",
    "--versions",
    "--memory-cap-bytes",
    "--threads",
    "--listen",
    "--host",
    "--hosts",
    "--secret-file",
    "--tls-certificate",
    "--tls-key",
    "--tls-authorities",
    "--copies",
    "--link-bytes-per-s",
    "--link-share",
    "--dead-after-s",
    "--give-up-s",
    "--metrics",
];
/// Without them an agent is alone.
const CLUSTER_OPTIONS: [&str; 4] = ["--listen", "--host", "--hosts", "--secret-file"];
/// What only one of several agents takes.
const CLUSTER_ADDITIONS: [&str; 8] = [
    "--copies",
    "--link-bytes-per-s",
    "--link-share",
    "--dead-after-s",
    "--give-up-s",
    "--tls-certificate",
    "--tls-key",
    "--tls-authorities",
];
/// Of these there are all or none.
const TLS_OPTIONS: [&str; 3] = ["--tls-certificate", "--tls-key", "--tls-authorities"];
const DEFAULT_COPIES: u32 = 2;
const DEFAULT_DEAD_AFTER: Duration = Duration::from_secs(3);
const DEFAULT_GIVE_UP: Duration = Duration::from_secs(60);
const ALLOW_DISK: &str = "--allow-disk";

/// What the program is to do.
#[derive(Clone, Debug)]
pub enum Command {
    /// To print something.
    Say(String),
    /// To serve a store.
    Run {
        /// Which.
        config: Box<Config>,
        /// With whom, if the agent is one of several.
        cluster: Option<Box<cluster::Options>>,
        /// Where numbers of the agent are served as well.
        metrics: Option<SocketAddr>,
    },
    /// To remove a store.
    Discard {
        /// Where it is.
        directory: PathBuf,
        /// Whether that may be on a disk.
        allow_disk: bool,
    },
}

impl Command {
    /// Reads arguments. InvalidInput if they are not what `HELP` says.
    pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Self> {
        let mut arguments = arguments.into_iter().peekable();
        let command = arguments.next();
        if arguments.peek().is_some_and(|argument| argument == "--help" || argument == "-h") {
            return Ok(Command::Say(HELP.to_owned()));
        }
        match command.as_ref().and_then(|command| command.to_str()) {
            Some("run") => {
                let given = Given::parse(arguments, &RUN_OPTIONS)?;
                let (cluster, metrics) = (cluster_options(&given)?, given.address("--metrics")?);
                Ok(Command::Run { config: Box::new(run_config(&given)?), cluster, metrics })
            }
            Some("discard") => {
                let given = Given::parse(arguments, &["--directory"])?;
                let directory = given.directory()?;
                Ok(Command::Discard { directory, allow_disk: given.allow_disk })
            }
            Some("--help" | "-h" | "help") => Ok(Command::Say(HELP.to_owned())),
            Some("--version" | "-V") => {
                Ok(Command::Say(format!("waystation-agent {}\n", env!("CARGO_PKG_VERSION"))))
            }
            _ => Err(invalid("say what to do: 'run' or 'discard'; --help tells of both")),
        }
    }
}

fn run_config(given: &Given) -> Result<Config> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let slot_bytes = match given.bytes("--slot-bytes")? {
        Some(_) if given.has("--data-bytes") || given.has("--contents-bytes") => {
            return Err(invalid("give --slot-bytes, or --data-bytes and --contents-bytes, not both"));
        }
        Some(bytes) => bytes,
        None => {
            let data_bytes = given.required("--data-bytes", given.bytes("--data-bytes")?)?;
            let contents_bytes = given.bytes("--contents-bytes")?.unwrap_or(DEFAULT_CONTENTS_BYTES);
            slot_bytes(contents_bytes, data_bytes).ok_or_else(|| invalid("--data-bytes is too large"))?
        }
    };
    Ok(Config {
        directory: given.directory()?,
        run: given.required("--run-id", given.id("--run-id")?)?,
        topology: given.id("--topology")?.unwrap_or_default(),
        slot_count: given.required("--slots", given.number("--slots")?)?,
        slot_bytes,
        versions_per_shard: versions_per_shard(given)?,
        cap_bytes: given.required("--memory-cap-bytes", given.bytes("--memory-cap-bytes")?)?,
        allow_disk: given.allow_disk,
        threads: match given.number("--threads")? {
            Some(threads) => threads as usize,
            None => cores.min(MOST_DEFAULT_THREADS),
        },
    })
}

/// The versions of a shard that there may be at a time: those that are kept, and the next one.
fn versions_per_shard(given: &Given) -> Result<u32> {
    match given.number("--versions")?.unwrap_or(DEFAULT_VERSIONS).checked_add(1) {
        None | Some(1) => Err(invalid("--versions wants at least 1")),
        Some(versions) => Ok(versions),
    }
}

/// How the agent takes part with others, if it does.
fn cluster_options(given: &Given) -> Result<Option<Box<cluster::Options>>> {
    let known: Vec<&str> = CLUSTER_OPTIONS.into_iter().filter(|option| given.has(option)).collect();
    let additions: Vec<&str> = CLUSTER_ADDITIONS.into_iter().filter(|option| given.has(option)).collect();
    if let (true, Some(alone)) = (known.is_empty(), additions.first()) {
        return Err(invalid(format!(
            "{alone} is for one of several agents; give it {} too",
            CLUSTER_OPTIONS.join(", ")
        )));
    }
    if known.is_empty() {
        return Ok(None);
    }
    let share = given.value("--link-share", "a share, such as 0.5", |text| text.parse().ok())?;
    let link = match (given.bytes("--link-bytes-per-s")?, share) {
        (Some(bytes_per_s), share) => Some((bytes_per_s, share.unwrap_or(1.0))),
        (None, Some(_)) => return Err(invalid("--link-share is a share of --link-bytes-per-s; give both")),
        (None, None) => None,
    };
    let copies = given.number("--copies")?.unwrap_or(DEFAULT_COPIES);
    if copies == 0 {
        return Err(invalid("--copies wants at least 1"));
    }
    Ok(Some(Box::new(cluster::Options {
        listen: given.text("--listen")?,
        host: given.text("--host")?,
        hosts: given.text("--hosts")?.into(),
        secret_file: given.text("--secret-file")?.into(),
        tls: tls_files(given)?,
        copies,
        link,
        dead_after: given.duration("--dead-after-s")?.unwrap_or(DEFAULT_DEAD_AFTER),
        give_up: given.duration("--give-up-s")?.unwrap_or(DEFAULT_GIVE_UP),
    })))
}

fn tls_files(given: &Given) -> Result<Option<cluster::TlsFiles>> {
    if !TLS_OPTIONS.iter().any(|option| given.has(option)) {
        return Ok(None);
    }
    let [certificate, key, authorities] = TLS_OPTIONS.map(|option| given.text(option).map(PathBuf::from));
    Ok(Some(cluster::TlsFiles { certificate: certificate?, key: key?, authorities: authorities? }))
}

/// The options that were given, by name.
struct Given {
    values: BTreeMap<&'static str, OsString>,
    allow_disk: bool,
}

impl Given {
    fn parse(arguments: impl Iterator<Item = OsString>, known: &[&'static str]) -> Result<Self> {
        let mut given = Self { values: BTreeMap::new(), allow_disk: false };
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            let text = argument.to_string_lossy().into_owned();
            if text == ALLOW_DISK {
                given.allow_disk = true;
                continue;
            }
            let name = text.split_once('=').map_or(&*text, |(name, _)| name);
            let unknown = || invalid(format!("'{text}' is not an option here; --help tells which there are"));
            let name = known.iter().find(|option| **option == name).ok_or_else(unknown)?;
            let value = match text.split_once('=') {
                Some((_, value)) => OsString::from(value),
                None => arguments.next().ok_or_else(|| invalid(format!("{name} wants a value")))?,
            };
            if given.values.insert(name, value).is_some() {
                return Err(invalid(format!("{name} is given twice")));
            }
        }
        Ok(given)
    }

    fn has(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    fn required<T>(&self, name: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| invalid(format!("{name} is missing; --help tells what it is for")))
    }

    fn directory(&self) -> Result<PathBuf> {
        let given = self.required("--directory", self.values.get("--directory"))?;
        std::path::absolute(Path::new(given))
            .map_err(|error| Error::from_io(error, "find the directory of a store", Path::new(given)))
    }

    /// The value of an option, made of its text.
    fn value<T>(&self, name: &str, wanted: &str, read: impl Fn(&str) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.values.get(name) else { return Ok(None) };
        let found = value.to_str().and_then(read);
        found.map(Some).ok_or_else(|| {
            invalid(format!("{name} wants {wanted}, and '{}' is none", value.to_string_lossy()))
        })
    }

    fn text(&self, name: &str) -> Result<String> {
        self.required(name, self.value(name, "text", |text| Some(text.to_owned()))?)
    }

    fn duration(&self, name: &str) -> Result<Option<Duration>> {
        self.value(name, "a number of seconds, such as 0.5 or 60", |text| {
            text.parse()
                .ok()
                .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
                .filter(|time| !time.is_zero())
        })
    }

    fn number(&self, name: &str) -> Result<Option<u32>> {
        self.value(name, "a number", |text| text.parse().ok())
    }

    fn bytes(&self, name: &str) -> Result<Option<u64>> {
        self.value(name, "a number of bytes, such as 4096 or 4GiB", bytes_of)
    }

    fn address(&self, name: &str) -> Result<Option<SocketAddr>> {
        let first = |text: &str| text.to_socket_addrs().ok()?.next();
        self.value(name, "an address, such as 127.0.0.1:9464", first)
    }

    fn id(&self, name: &str) -> Result<Option<Id>> {
        self.value(name, "an id of 32 hex digits", |text| text.parse().ok())
    }
}

fn bytes_of(text: &str) -> Option<u64> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];
    let with_unit = |&(unit, shift): &(&str, u32)| Some((text.strip_suffix(unit)?, shift));
    let (digits, shift) = units.iter().find_map(with_unit).unwrap_or((text, 0));
    digits.trim_end().parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(Kind::InvalidInput, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "000102030405060708090a0b0c0d0e0f";

    fn parse(line: &str) -> Result<Command> {
        Command::parse(line.split_whitespace().map(OsString::from))
    }

    fn complete() -> String {
        format!("run --directory /d --run-id {ID} --slots 3 --data-bytes 4MiB --memory-cap-bytes=1GiB")
    }

    #[test]
    fn a_complete_line_is_a_config() {
        let Command::Run { config, cluster: None, metrics: None } = parse(&complete()).unwrap() else {
            unreachable!("it says run, and nothing of others")
        };
        assert_eq!(config.directory, Path::new("/d"));
        assert_eq!(config.run.to_string(), ID);
        assert_eq!(config.topology, Id::default());
        assert_eq!((config.slot_count, config.versions_per_shard), (3, 3));
        assert_eq!(config.slot_bytes, slot_bytes(1 << 20, 4 << 20).unwrap());
        assert_eq!((config.cap_bytes, config.allow_disk), (1 << 30, false));
        assert!((1..=4).contains(&config.threads));
        let more = " --allow-disk --threads 7 --metrics [::1]:9464";
        let Command::Run { config, metrics, .. } = parse(&(complete() + more)).unwrap() else {
            unreachable!("it says run")
        };
        assert_eq!((config.allow_disk, config.threads), (true, 7));
        assert_eq!(metrics.unwrap().to_string(), "[::1]:9464");
    }

    const CLUSTER: &str = " --listen a:7 --host a --hosts /h --secret-file /s";

    #[test]
    fn an_agent_may_be_one_of_several() {
        let Command::Run { cluster: Some(options), .. } = parse(&(complete() + CLUSTER)).unwrap() else {
            unreachable!("it says so")
        };
        assert_eq!((options.listen.as_str(), options.host.as_str()), ("a:7", "a"));
        assert_eq!(
            (options.hosts.as_path(), options.secret_file.as_path()),
            (Path::new("/h"), Path::new("/s"))
        );
        assert_eq!((options.copies, options.link, options.tls), (2, None, None));
        let more = " --copies=3 --link-bytes-per-s 1GiB --link-share 0.25 --dead-after-s 0.5 --give-up-s 7";
        let Command::Run { cluster: Some(options), .. } = parse(&(complete() + CLUSTER + more)).unwrap()
        else {
            unreachable!("it says so")
        };
        assert_eq!((options.copies, options.link), (3, Some((1 << 30, 0.25))));
        assert_eq!((options.dead_after.as_millis(), options.give_up.as_secs()), (500, 7));
        let more = " --tls-certificate /c --tls-key=/k --tls-authorities /a";
        let Command::Run { cluster: Some(options), .. } = parse(&(complete() + CLUSTER + more)).unwrap()
        else {
            unreachable!("it says so")
        };
        let tls = options.tls.unwrap();
        assert_eq!([tls.certificate, tls.key, tls.authorities], ["/c", "/k", "/a"].map(PathBuf::from));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (line, named) in [
            (String::new(), "say what to do"),
            ("fly".to_owned(), "say what to do"),
            (complete() + " --slots 4", "--slots is given twice"),
            (complete() + " --versions 0", "--versions wants at least 1"),
            (complete() + " --wings 2", "'--wings' is not an option here"),
            (complete() + " --threads", "--threads wants a value"),
            (complete() + " --threads many", "--threads wants a number, and 'many' is none"),
            (complete() + " --metrics 9464", "--metrics wants an address, such as 127.0.0.1:9464"),
            (complete() + " --topology 12", "--topology wants an id of 32 hex digits"),
            (complete() + " --slot-bytes 8192", "not both"),
            (complete().replace("4MiB", "99999999TiB"), "--data-bytes wants a number of bytes"),
            (complete().replace("--slots 3", ""), "--slots is missing"),
            (complete() + " --host a", "--listen is missing"),
            (complete() + " --copies 2", "--copies is for one of several agents"),
            (complete() + CLUSTER + " --copies 0", "--copies wants at least 1"),
            (complete() + CLUSTER + " --link-share 0.5", "give both"),
            (complete() + CLUSTER + " --tls-key /k", "--tls-certificate is missing"),
            (complete() + CLUSTER + " --dead-after-s -1", "--dead-after-s wants a number of seconds"),
            ("discard".to_owned(), "--directory is missing"),
            ("discard --directory /d --slots 3".to_owned(), "'--slots' is not an option here"),
        ] {
            let error = parse(&line).unwrap_err();
            assert_eq!(error.kind(), Kind::InvalidInput);
            assert!(error.message().contains(named), "{line}: {error}");
        }
    }

    #[test]
    fn help_names_every_option() {
        for line in ["--help", "run --help", "discard -h"] {
            let Command::Say(help) = parse(line).unwrap() else { unreachable!("it is asked for help") };
            assert!(RUN_OPTIONS.iter().all(|option| help.contains(option)) && help.contains(ALLOW_DISK));
        }
        assert!(matches!(parse("--version").unwrap(), Command::Say(version) if version.contains('.')));
    }
}
