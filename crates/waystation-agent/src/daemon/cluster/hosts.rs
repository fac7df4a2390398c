//! The hosts whose agents keep a program's state together, from a file that is the same for all of them.
//!
//! Names and order stay as they are for the run: an agent's number is its place in the list. Addresses may change, for
//! a host that is replaced by another; so the file is read again when it has changed, and what is then wrong with it
//! changes nothing.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Deserialize;
use waystation_format::checksum::crc64;
use waystation_format::{Error, Kind, Result};

use crate::peers::Name;
use crate::protocol::names::AgentId;

/// More hosts than any run has.
const MOST_HOSTS: usize = 4096;

/// The hosts, in the order of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hosts {
    /// What they are called.
    pub names: Vec<Name>,
    /// Where their agents listen: `host:port`.
    pub addresses: Vec<String>,
    /// The number of the failure domain of each.
    pub domains: Vec<u32>,
}

/// The file, and as of when it was read.
#[derive(Debug)]
pub struct HostsFile {
    path: PathBuf,
    modified: Option<SystemTime>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    address: String,
    domain: Option<String>,
}

impl Hosts {
    /// The hosts that a text names. InvalidInput if it does not name any, or two by one name.
    fn parse(text: &str) -> Result<Self> {
        let entries: Vec<Entry> = serde_json::from_str(text).map_err(|error| {
            invalid(format!("a list of name, address and (if need be) domain is wanted: {error}"))
        })?;
        if entries.is_empty() || entries.len() > MOST_HOSTS {
            return Err(invalid(format!("a run has 1 to {MOST_HOSTS} hosts, not {}", entries.len())));
        }
        let named: BTreeSet<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
        if named.len() != entries.len() {
            return Err(invalid("two hosts have the same name"));
        }
        if let Some(entry) = entries.iter().find(|entry| !is_address(&entry.address)) {
            return Err(invalid(format!("'{}' is no address: host and port are wanted", entry.address)));
        }
        let domain_of =
            |entry: &Entry| entry.domain.clone().unwrap_or_else(|| format!("host {}", entry.name));
        let domains: Vec<String> = entries.iter().map(domain_of).collect();
        let distinct: BTreeSet<&String> = domains.iter().collect();
        let number = |domain| distinct.iter().position(|&other| other == domain).unwrap_or_default() as u32;
        let domains = domains.iter().map(number).collect();
        let names = entries.iter().map(|entry| Name::new(&*entry.name)).collect::<Result<_>>()?;
        Ok(Self { names, addresses: entries.into_iter().map(|entry| entry.address).collect(), domains })
    }

    /// The agent of a host of that name.
    pub fn agent(&self, name: &str) -> Option<AgentId> {
        let place = self.names.iter().position(|known| known.as_str() == name)?;
        Some(AgentId(place as u16))
    }

    /// By which agents tell that they were given the same names in the same order.
    pub fn digest(&self) -> u64 {
        let names: Vec<&str> = self.names.iter().map(Name::as_str).collect();
        crc64(names.join("\n").as_bytes())
    }
}

impl HostsFile {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<(Self, Hosts)> {
        let mut file = Self { path: path.to_owned(), modified: None };
        file.modified = file.modified();
        let hosts = file.hosts()?;
        Ok((file, hosts))
    }

    /// The hosts, if the file has changed since it was read. Conflict if they are others than those that are known.
    pub fn changed(&mut self, known: &Hosts) -> Result<Option<Hosts>> {
        let modified = self.modified();
        if modified.is_none() || modified == self.modified {
            return Ok(None);
        }
        self.modified = modified;
        let hosts = self.hosts()?;
        if (&hosts.names, &hosts.domains) != (&known.names, &known.domains) {
            let message = "only addresses may change while a run goes on, not which hosts there are";
            return Err(self.named(Error::new(Kind::Conflict, message)));
        }
        Ok(Some(hosts))
    }

    fn modified(&self) -> Option<SystemTime> {
        fs::metadata(&self.path).and_then(|metadata| metadata.modified()).ok()
    }

    fn hosts(&self) -> Result<Hosts> {
        let text = fs::read_to_string(&self.path)
            .map_err(|error| Error::from_io(error, "read the file of the hosts", &self.path))?;
        Hosts::parse(&text).map_err(|error| self.named(error))
    }

    fn named(&self, error: Error) -> Error {
        error.with("path", self.path.display().to_string())
    }
}

fn is_address(address: &str) -> bool {
    address.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(Kind::InvalidInput, message.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"[{"name":"a","address":"10.0.0.1:7700","domain":"r1"},{"name":"b","address":"b:1"},
        {"name":"c","address":"[::1]:7","domain":"r1"}]"#;

    #[test]
    fn hosts_have_numbers_and_domains() {
        let hosts = Hosts::parse(TEXT).unwrap();
        assert_eq!((hosts.agent("b"), hosts.agent("d")), (Some(AgentId(1)), None));
        assert_eq!(hosts.domains[0], hosts.domains[2]);
        assert_ne!(hosts.domains[0], hosts.domains[1]);
        assert_ne!(hosts.digest(), Hosts::parse(&TEXT.replace("\"b\"", "\"x\"")).unwrap().digest());
    }

    #[test]
    fn what_is_no_list_of_hosts_is_refused() {
        for text in [
            "",
            "[]",
            "{}",
            &TEXT.replace("\"b\"", "\"a\""),
            &TEXT.replace("b:1", "b"),
            &TEXT.replace("b:1", ":1"),
            &TEXT.replace("b:1", "b:65536"),
            &TEXT.replace("domain", "rack"),
            &TEXT.replace("\"a\"", "\"\""),
        ] {
            assert_eq!(Hosts::parse(text).unwrap_err().kind(), Kind::InvalidInput, "{text}");
        }
    }

    #[test]
    fn only_addresses_may_change() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("hosts.json");
        let write = |text: &str, seconds: u64| {
            fs::write(&path, text).unwrap();
            let when = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
            fs::File::options().write(true).open(&path).unwrap().set_modified(when).unwrap();
        };
        write(TEXT, 1);
        let (mut file, hosts) = HostsFile::read(&path).unwrap();
        assert_eq!(file.changed(&hosts).unwrap(), None);
        write(&TEXT.replace("b:1", "b:2"), 2);
        assert_eq!(file.changed(&hosts).unwrap().unwrap().addresses[1], "b:2");
        assert_eq!(file.changed(&hosts).unwrap(), None);
        write(&TEXT.replace("\"b\"", "\"x\""), 3);
        assert_eq!(file.changed(&hosts).unwrap_err().kind(), Kind::Conflict);
        write("[", 4);
        assert_eq!(file.changed(&hosts).unwrap_err().kind(), Kind::InvalidInput);
        assert_eq!(file.changed(&hosts).unwrap(), None, "it is told once");
    }
}
