//! The `# peers` section of `_native.pyi`: connections whose sockets are Python's.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use waystation_format::slot::Id;
use waystation_format::{Error, Kind, Result};
use waystation_peers::{Channel, Identity, Name, Purpose, SEED_BYTES, Secret, Seed, Tls, issued, issuer};

use crate::error::guarded;
use crate::of_process::OfProcess;

/// Work on so many bytes takes a moment: to give the GIL away for it, and to wait for it again, takes longer.
const WITH_GIL_BYTES: usize = 16 << 10;

/// Adds the names of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PeerKeys>()?;
    module.add_class::<PeerChannel>()?;
    module.add_function(wrap_pyfunction!(issue_peer_key, module)?)?;
    module.add_function(wrap_pyfunction!(derive_peer_secret, module)?)
}

/// Both ends of a socket, as Python names them.
type Ends = (String, String);

#[pyclass(frozen, module = "waystation._native")]
struct PeerKeys(Arc<Tls>);

#[pymethods]
impl PeerKeys {
    #[staticmethod]
    #[pyo3(signature = (secret, /))]
    fn of_launches(secret: &[u8]) -> PyResult<Self> {
        guarded(|| Ok(Self(Arc::new(Tls::of_launches(&Secret::new(secret)?)?))))
    }

    #[staticmethod]
    #[pyo3(signature = (secret, /))]
    fn of_issuer(secret: &[u8]) -> PyResult<Self> {
        guarded(|| Ok(Self(Arc::new(Tls::of_issuer(Secret::new(secret)?)?))))
    }

    #[staticmethod]
    #[pyo3(signature = (key, issuer, /))]
    fn of_issued(key: &[u8], issuer: &[u8]) -> PyResult<Self> {
        guarded(|| {
            let seed = <[u8; SEED_BYTES]>::try_from(key).map(Seed::new);
            let seed = seed.map_err(|_| {
                Error::new(Kind::InvalidInput, format!("a key has {SEED_BYTES} bytes, not {}", key.len()))
            })?;
            Ok(Self(Arc::new(Tls::of_issued(&seed, issuer)?)))
        })
    }

    #[pyo3(signature = (purpose, client, server, run, ends, limit_bytes, /))]
    fn connect(
        &self,
        purpose: &str,
        client: &str,
        server: &str,
        run: [u8; 16],
        ends: Ends,
        limit_bytes: u64,
    ) -> PyResult<PeerChannel> {
        let connected = guarded(|| {
            let (own, server) = (identity(client, run)?, Name::new(server)?);
            Channel::connect(&self.0, own, server, purpose_of(purpose)?, addresses(&ends), limit_bytes)
        });
        connected.map(PeerChannel::new)
    }

    #[pyo3(signature = (server, run, ends, limit_bytes, /))]
    fn accept(&self, server: &str, run: [u8; 16], ends: Ends, limit_bytes: u64) -> PyResult<PeerChannel> {
        let accepted =
            guarded(|| Channel::accept(&self.0, identity(server, run)?, addresses(&ends), limit_bytes));
        accepted.map(PeerChannel::new)
    }
}

#[pyfunction]
#[pyo3(signature = (secret, purpose, name, /))]
fn issue_peer_key<'py>(
    py: Python<'py>,
    secret: &[u8],
    purpose: &str,
    name: &str,
) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
    let (seed, public) = guarded(|| {
        let secret = Secret::new(secret)?;
        Ok((issued(&secret, purpose_of(purpose)?, &Name::new(name)?)?, issuer(&secret)?))
    })?;
    Ok((PyBytes::new(py, &*seed), PyBytes::new(py, &public)))
}

#[pyfunction]
#[pyo3(signature = (secret, purpose, /))]
fn derive_peer_secret<'py>(py: Python<'py>, secret: &[u8], purpose: &str) -> PyResult<Bound<'py, PyBytes>> {
    let seed =
        guarded(|| waystation_peers::derive(&Secret::new(secret)?, &[b"secret ", purpose.as_bytes()]))?;
    Ok(PyBytes::new(py, &*seed))
}

#[pyclass(frozen, module = "waystation._native")]
struct PeerChannel(OfProcess<Mutex<Channel>>);

impl PeerChannel {
    fn new(channel: Channel) -> Self {
        Self(OfProcess::new(Mutex::new(channel)))
    }

    /// Does something with the channel. Whoever has its lock waits for nothing, so the GIL is kept where that is soon done.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        nbytes: usize,
        work: impl FnOnce(&mut Channel) -> Result<T> + Send,
    ) -> PyResult<T> {
        guarded(|| self.0.get().map(drop))?;
        if nbytes <= WITH_GIL_BYTES {
            match self.0.get().map(Mutex::try_lock) {
                Ok(Ok(mut channel)) => return guarded(|| work(&mut channel)),
                // A channel that was left in the middle of something fails by itself.
                Ok(Err(TryLockError::Poisoned(poisoned))) => {
                    return guarded(|| work(&mut poisoned.into_inner()));
                }
                Ok(Err(TryLockError::WouldBlock)) | Err(_) => {}
            }
        }
        py.detach(|| guarded(|| work(&mut self.0.get()?.lock().unwrap_or_else(PoisonError::into_inner))))
    }
}

#[pymethods]
impl PeerChannel {
    #[getter]
    fn is_open(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, 0, |channel| Ok(channel.is_open()))
    }

    #[getter]
    fn asked(&self, py: Python<'_>) -> PyResult<Option<(&'static str, String)>> {
        self.with(py, 0, |channel| {
            Ok(channel.asked().map(|(purpose, name)| (name_of(purpose), name.to_string())))
        })
    }

    #[pyo3(signature = (is_expected, /))]
    fn admit(&self, py: Python<'_>, is_expected: bool) -> PyResult<()> {
        self.with(py, 0, |channel| channel.admit(is_expected))
    }

    fn take<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.with(py, 0, |channel| Ok(channel.take_outgoing()))?;
        Ok(PyBytes::new(py, &bytes))
    }

    #[pyo3(signature = (received, /))]
    fn feed<'py>(&self, py: Python<'py>, received: &[u8]) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let (bytes, places) = self.with(py, received.len(), |channel| {
            channel.feed(received)?;
            channel.messages()
        })?;
        Ok(places.into_iter().map(|place| PyBytes::new(py, &bytes[place])).collect())
    }

    #[pyo3(signature = (message, /))]
    fn seal<'py>(&self, py: Python<'py>, message: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        let sealed = self.with(py, message.len(), |channel| channel.seal(message))?;
        Ok(PyBytes::new(py, &sealed))
    }
}

fn identity(name: &str, run: [u8; 16]) -> Result<Identity> {
    Ok(Identity { name: Name::new(name)?, run: Id(run) })
}

/// What is no address of the Internet is no loopback address either.
fn addresses(ends: &Ends) -> [Option<IpAddr>; 2] {
    [ends.0.parse().ok(), ends.1.parse().ok()]
}

const PURPOSES: [(&str, Purpose); 3] =
    [("host", Purpose::Host), ("program", Purpose::Program), ("launch", Purpose::Launch)];

fn purpose_of(name: &str) -> Result<Purpose> {
    let found = PURPOSES.into_iter().find(|&(known, _)| known == name);
    found.map(|(_, purpose)| purpose).ok_or_else(|| {
        Error::new(
            Kind::InvalidInput,
            format!("'{name}' is no purpose of a connection: host, program or launch"),
        )
    })
}

/// Its name; that of none for those of agents.
fn name_of(purpose: Purpose) -> &'static str {
    PURPOSES.into_iter().find(|&(_, known)| known == purpose).map_or("", |(name, _)| name)
}
