//! Agents of several hosts, each a process with a store and an address of its own, and trainers that save with them.
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::fs::{self, File, OpenOptions, Permissions};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use tempfile::TempDir;
use waystation_agent::Kind;
use waystation_agent::client::Client;
use waystation_agent::local::message::{Beginning, HexNumber, Standing};
use waystation_format::slot::Version;

use super::agent_support::{PATIENCE, never, save, wait_until};
use super::support::{config, memory_directory};

pub const SEQUENCE: u64 = 0xfeed;
/// So many slots each: there is room for two versions of two shards, and for what a recovery brings.
const SLOTS: u32 = 8;

pub struct Fleet {
    /// What all know, and what they say.
    pub common: TempDir,
    pub hosts: Vec<Host>,
}

pub struct Host {
    pub name: String,
    pub directory: PathBuf,
    pub address: SocketAddr,
    /// Arguments beyond those of all.
    pub arguments: Vec<String>,
    child: Option<Child>,
}

/// A program with one process on each host, as those see it.
pub struct Program {
    pub token: u64,
    pub clients: Vec<Arc<Client>>,
}

fn free_address(number: u8) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::new(127, 0, 0, number), 0)).unwrap();
    listener.local_addr().unwrap()
}

impl Fleet {
    /// As many hosts as are wanted, whose agents do not run yet.
    pub fn of(count: u8) -> Self {
        let common = memory_directory();
        let host = |number: u8| Host {
            name: format!("host-{number}"),
            directory: common.path().join(format!("store-{number}")),
            address: free_address(number + 1),
            arguments: Vec::new(),
            child: None,
        };
        let fleet = Self { hosts: (0..count).map(host).collect(), common };
        fleet.write_secret("secret", "the secret of these tests");
        fleet.write_hosts();
        fleet
    }

    /// All hosts, whose agents run.
    pub fn started(count: u8) -> Self {
        let mut fleet = Self::of(count);
        (0..fleet.hosts.len()).for_each(|host| fleet.start(host));
        fleet
    }

    pub fn write_secret(&self, name: &str, secret: &str) {
        let path = self.common.path().join(name);
        fs::write(&path, secret).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    }

    pub fn write_hosts(&self) {
        let entry = |host: &Host| serde_json::json!({"name": host.name, "address": host.address.to_string()});
        let entries: Vec<_> = self.hosts.iter().map(entry).collect();
        let (aside, path) = (self.common.path().join("hosts.new"), self.common.path().join("hosts.json"));
        fs::write(&aside, serde_json::to_vec(&entries).unwrap()).unwrap();
        fs::rename(aside, path).unwrap();
    }

    /// What the agents of a host have said on stderr.
    pub fn said(&self, host: usize) -> String {
        fs::read_to_string(self.log(host)).unwrap_or_default()
    }

    fn log(&self, host: usize) -> PathBuf {
        self.common.path().join(format!("log-{host}"))
    }

    pub fn start(&mut self, host: usize) {
        let log: File = OpenOptions::new().create(true).append(true).open(self.log(host)).unwrap();
        let common = self.common.path().to_owned();
        let found = &mut self.hosts[host];
        let wanted = config(&found.directory);
        let mut command = Command::new(env!("CARGO_BIN_EXE_waystation-agent"));
        command.arg("run").arg("--directory").arg(&found.directory);
        command.arg(format!("--run-id={}", wanted.run)).arg(format!("--slots={SLOTS}"));
        command.arg(format!("--slot-bytes={}", wanted.slot_bytes)).arg("--memory-cap-bytes=1GiB");
        command.arg(format!("--listen={}", found.address)).arg(format!("--host={}", found.name));
        command.arg("--hosts").arg(common.join("hosts.json")).args(["--dead-after-s=2", "--give-up-s=10"]);
        if !found.arguments.iter().any(|argument| argument.starts_with("--secret-file")) {
            command.arg("--secret-file").arg(common.join("secret"));
        }
        command.args(&found.arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        found.child = Some(command.spawn().unwrap());
    }

    /// SIGKILL.
    pub fn kill(&mut self, host: usize) {
        let mut child = self.hosts[host].child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// The exit code of an agent that ends by itself.
    pub fn end_of(&mut self, host: usize) -> Option<i32> {
        self.hosts[host].child.take().unwrap().wait().unwrap().code()
    }

    /// The host is lost with all that its memory held; another stands for it, at another address.
    pub fn replace(&mut self, host: usize) {
        self.kill(host);
        let found = &mut self.hosts[host];
        fs::remove_dir_all(&found.directory).unwrap();
        found.address = free_address(100 + host as u8);
        self.write_hosts();
        self.start(host);
    }

    pub fn client(&self, host: usize) -> Arc<Client> {
        Arc::new(Client::connect(&self.hosts[host].directory, None, PATIENCE, &never()).unwrap())
    }

    /// Begins a program on all hosts, and waits until it may go on.
    pub fn begin(&self) -> Program {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let token = since.as_nanos() as u64;
        let clients: Vec<Arc<Client>> = (0..self.hosts.len()).map(|host| self.client(host)).collect();
        let program = Program { token, clients };
        program.clients[0].begin(self.beginning(token), &never()).unwrap();
        program.await_training();
        program
    }

    pub fn beginning(&self, token: u64) -> Beginning {
        let owners = self.hosts.iter().map(|host| host.name.clone()).collect();
        Beginning { program: token, sequence: HexNumber(SEQUENCE), owners }
    }

    /// Which host's agent has the controller of an epoch.
    pub fn controller_of(&self, epoch: u64) -> usize {
        let event = format!("event=controller_started controller={:08x}", epoch as u32);
        (0..self.hosts.len()).find(|&host| self.said(host).contains(&event)).unwrap()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for host in 0..self.hosts.len() {
            if let Some(child) = &mut self.hosts[host].child {
                drop(child.kill());
                drop(child.wait());
            }
            if std::thread::panicking() {
                println!("--- host {host}\n{}", self.said(host));
            }
        }
    }
}

impl Program {
    pub fn shard(&self, process: usize) -> String {
        format!("{SEQUENCE:016x}/{process}-of-{}", self.clients.len())
    }

    pub fn standing(&self, host: usize) -> Standing {
        self.clients[host].standing(&never()).unwrap()
    }

    /// Waits until all hosts have the same orders for this program; returns the epoch.
    pub fn await_training(&self) -> u64 {
        let epoch = Cell::new(0);
        wait_until("all have the orders", || {
            let standings: Vec<Standing> = (0..self.clients.len()).map(|host| self.standing(host)).collect();
            epoch.set(standings[0].epoch);
            let is_ready = |found: &Standing| {
                found.is_training
                    && found.is_open
                    && (found.program, found.epoch) == (self.token, epoch.get())
            };
            standings.iter().all(is_ready)
        });
        epoch.get()
    }

    /// Has all processes save a step, again in a newer epoch if one takes over, until it is committed; returns the version.
    pub fn commit(&self, step: u64) -> Version {
        let committed = Cell::new(None);
        wait_until("the step is committed", || {
            let at = Version { epoch: self.await_training(), step };
            let saved: Vec<_> = (0..self.clients.len())
                .map(|host| save(&self.clients[host], &self.shard(host), at))
                .collect();
            // What was sealed the last time is there.
            let is_there = |saved: &waystation_agent::Result<_>| {
                saved.as_ref().map_or_else(|error| error.kind() == Kind::Conflict, |_| true)
            };
            if !saved.iter().all(is_there) {
                return false;
            }
            let is_over = || self.standing(0).epoch != at.epoch;
            wait_until("it is committed, or its epoch is over", || self.has_commit(at) || is_over());
            committed.set(Some(at));
            self.has_commit(at)
        });
        committed.get().unwrap()
    }

    /// Whether all hosts know that a version is committed.
    pub fn has_commit(&self, at: Version) -> bool {
        (0..self.clients.len()).all(|host| self.standing(host).commits.contains(&at.into()))
    }

    /// On which hosts a version of a shard is, and in which state.
    pub fn copies(&self, process: usize, at: Version) -> Vec<(usize, String)> {
        let mut found = Vec::new();
        for (host, client) in self.clients.iter().enumerate() {
            for slot in client.inventory(&never()).unwrap() {
                let is_it = slot.tenant.is_some_and(|tenant| {
                    (tenant.shard, tenant.epoch, tenant.step) == (self.shard(process), at.epoch, at.step)
                });
                found.extend(is_it.then_some((host, slot.state)));
            }
        }
        found
    }
}
