//! What an agent is told of the others.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use waystation_format::{Error, Kind, Result};

use crate::peers::{Name, Secret, Tls};

/// How an agent takes part.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Where it listens for the others: `host:port`.
    pub listen: String,
    /// The name of its host.
    pub host: String,
    /// The file that names all hosts.
    pub hosts: PathBuf,
    /// The file of the secret that they share.
    pub secret_file: PathBuf,
    /// The certificates by which they prove which host each is; without, whoever knows the secret is believed.
    pub tls: Option<TlsFiles>,
    /// How many copies of each shard are kept, the owner's included.
    pub copies: u32,
    /// What the link to the others carries, and which share of it may be used; none for no limit.
    pub link: Option<(u64, f64)>,
    /// An agent that was silent for so long is taken for dead.
    pub dead_after: Duration,
    /// A version that has not got its copies after so long is given up.
    pub give_up: Duration,
}

/// Files in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate of this host.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// Those who have signed the certificates of all hosts.
    pub authorities: PathBuf,
}

impl Options {
    /// What this host shows to others. InvalidInput if they would not take it for what it is called.
    pub fn tls(&self) -> Result<Arc<Tls>> {
        let secret = Secret::from_file(&self.secret_file)?;
        let Some(TlsFiles { certificate, key, authorities }) = &self.tls else {
            return Tls::of_secret(&secret).map(Arc::new);
        };
        let tls = Tls::from_files(certificate, key, authorities, &secret)?;
        let checked = tls.check(&Name::new(&*self.host)?);
        checked.map_err(|error| error.with("path", certificate.display().to_string()))?;
        Ok(Arc::new(tls))
    }

    /// The address to listen on.
    pub fn address(&self) -> Result<SocketAddr> {
        let unknown = |why: String| {
            let message = format!("'{}' is no address to listen on: {why}", self.listen);
            Error::new(Kind::InvalidInput, message)
        };
        let mut found = self.listen.to_socket_addrs().map_err(|error| unknown(error.to_string()))?;
        found.next().ok_or_else(|| unknown("the name has no address".to_owned()))
    }
}
