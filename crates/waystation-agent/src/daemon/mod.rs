//! The agent as a program: owns a store, and serves the processes of its host.
//!
//! `options` is its command line, `surroundings` how it is set apart from whoever started it, `server` who is
//! connected, `answer` what they get, `processes` who of them still lives, `metrics` what those see who watch, `log` what
//! it tells on stderr. `cluster` is what it does with the agents of other hosts, if there are any.
//! Failures, in order: wrong arguments, a store that cannot be had (it ends, and says why); killed at any time
//! (the next agent takes the store over, and processes go on with it); told to end (it finishes what it is
//! answering, and leaves every slot as it is). Invariants: it takes no memory beyond the store's that grows
//! with what it is asked; nothing that a process says makes it end.

mod answer;
pub mod cluster;
mod log;
mod metrics;
pub mod options;
mod processes;
mod server;
mod stop;
mod surroundings;

use std::ffi::OsString;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;

use waystation_format::{Error, Result};

pub use self::answer::report;
use self::cluster::Cluster;
use self::options::Command;
pub use self::server::Server;
use crate::store::{Config, Store, discard};

/// The exit code of a program that could not do its work.
const FAILED: u8 = 2;

/// Does what the arguments say.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    match Command::parse(arguments).and_then(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::error("failed", &error);
            ExitCode::from(FAILED)
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Say(text) => say(&text),
        Command::Discard { directory, allow_disk } => discard(&directory, allow_disk),
        Command::Run { config, cluster, metrics } => serve(&config, cluster.as_deref(), metrics),
    }
}

fn serve(config: &Config, others: Option<&cluster::Options>, metrics: Option<SocketAddr>) -> Result<()> {
    surroundings::set_apart();
    let (store, adoption) = Store::open(config)?;
    // Until here a signal ends the program at once, which a store survives; from here on they are waited for.
    let signals = surroundings::Signals::block();
    let adoption = report(&adoption);
    for damage in &adoption.damaged {
        log::line("damaged", &[("message", damage.clone())]);
    }
    let store = Arc::new(store);
    let cluster = others.map(|others| Cluster::start(others, Arc::clone(&store))).transpose()?;
    let server = Server::start(store, adoption, cluster)?;
    let metrics = metrics.map(|address| metrics::Server::start(address, server.metrics())).transpose()?;
    let ready = serde_json::json!({
        "event": "ready",
        "socket": server.socket(),
        "metrics": metrics.as_ref().map(|metrics| metrics.address().to_string()),
        "status": server.status(),
    });
    log::line("ready", &[("socket", server.socket().display().to_string())]);
    say(&format!("{ready}\n"))?;
    let signal = signals.wait();
    log::line("ending", &[("signal", signal.to_string())]);
    drop(metrics);
    server.stop();
    Ok(())
}

/// Writes to stdout. That nobody listens any more is no reason to end.
fn say(text: &str) -> Result<()> {
    let mut output = io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Error::from_io(error, "write", std::path::Path::new("stdout")))
        }
        _ => Ok(()),
    }
}
