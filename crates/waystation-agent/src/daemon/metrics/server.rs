//! The numbers over HTTP, for Prometheus: one address, one answer for each connection.
//!
//! Anybody who reaches the address may read the numbers; they say nothing of what is in arrays, and there is nothing else
//! to be had. Invariants: so many connections at a time, each for so long and with a request of so many
//! bytes; whoever is one too many waits in the system's queue; nothing listens once this has been dropped.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{sleep, timeout};
use waystation_format::{Error, Kind, Result};

use super::exposition::CONTENT_TYPE;

/// How many connections there may be at a time.
const MOST_CONNECTIONS: usize = 8;
/// How long each may take.
const CONNECTION_TIME: Duration = Duration::from_secs(3);
/// How many bytes the head of a request may have.
const HEAD_BYTES: u64 = 16 << 10;
/// How long to wait when the system cannot accept.
const PAUSE: Duration = Duration::from_millis(50);
/// Where the numbers are.
const PATH: &str = "/metrics";

/// Makes the text of an answer.
type Render = dyn Fn() -> String + Send + Sync;

/// An address where the numbers can be had.
#[derive(Debug)]
pub(in crate::daemon) struct Server {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on an address; port 0 has the system choose one.
    pub fn start(address: SocketAddr, render: Arc<Render>) -> Result<Self> {
        let failed = |error: std::io::Error| {
            let kind = match error.kind() {
                std::io::ErrorKind::AddrInUse => Kind::Conflict,
                _ => Kind::InvalidInput,
            };
            Error::new(kind, format!("cannot serve metrics: {error}")).with("address", address.to_string())
        };
        let runtime = runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let listener = runtime.block_on(TcpListener::bind(address)).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let (stop, stopped) = oneshot::channel();
        let run = move || {
            runtime.block_on(async move {
                tokio::select! {
                    () = serve(&listener, &render) => {}
                    _ = stopped => {}
                }
            });
            runtime.shutdown_background();
        };
        let thread = Builder::new().name("waystation-metrics".to_owned()).spawn(run).map_err(failed)?;
        Ok(Self { address, stop: Some(stop), thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A thread that has panicked has printed why.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

async fn serve(listener: &TcpListener, render: &Arc<Render>) {
    let seats = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let Ok(seat) = Arc::clone(&seats).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let render = Arc::clone(render);
                tokio::spawn(async move {
                    // Whoever is too slow is disconnected, and may ask again.
                    drop(timeout(CONNECTION_TIME, converse(stream, render)).await);
                    drop(seat);
                });
            }
            Err(_) => sleep(PAUSE).await,
        }
    }
}

/// Answers one request; a connection that ends early is its client's loss.
async fn converse(mut stream: TcpStream, render: Arc<Render>) -> io::Result<()> {
    let (mut head, mut request) = (Vec::new(), (&mut stream).take(HEAD_BYTES));
    while !head.windows(4).any(|four| four == b"\r\n\r\n") {
        if request.read_buf(&mut head).await? == 0 {
            return Ok(()); // it has ended, or is longer than any needs to be
        }
    }
    stream.write_all(answer(&head, &*render).as_bytes()).await?;
    stream.shutdown().await
}

/// The answer to the head of a request, in HTTP/1.1. Each connection carries one.
fn answer(head: &[u8], render: &Render) -> String {
    let line =
        String::from_utf8_lossy(head.split(|&byte| byte == b'\r').next().unwrap_or_default()).into_owned();
    let (status, of, body) = match *line.split(' ').collect::<Vec<_>>() {
        ["GET" | "HEAD", PATH, "HTTP/1.0" | "HTTP/1.1"] => ("200 OK", CONTENT_TYPE, render()),
        [_, PATH, "HTTP/1.0" | "HTTP/1.1"] => {
            ("405 Method Not Allowed", "text/plain", "only GET is answered\n".to_owned())
        }
        [_, _, "HTTP/1.0" | "HTTP/1.1"] => {
            ("404 Not Found", "text/plain", format!("the metrics are at {PATH}\n"))
        }
        _ => ("400 Bad Request", "text/plain", "this is no request of HTTP/1.1\n".to_owned()),
    };
    let length = body.len();
    let body = if line.starts_with("HEAD ") { "" } else { &body };
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {of}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_answered_or_refused() {
        let answered = |head: &[u8]| answer(head, &|| "epoch 7\n".to_owned());
        let whole = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
                     Content-Length: 8\r\nConnection: close\r\n\r\n";
        assert_eq!(answered(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), format!("{whole}epoch 7\n"));
        assert_eq!(answered(b"HEAD /metrics HTTP/1.0\r\n\r\n"), whole);
        let refused: [(&[u8], &str); 7] = [
            (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
            (b"GET / HTTP/1.1\r\n\r\n", "404"),
            (b"GET /metrics?a HTTP/1.1\r\n\r\n", "404"),
            (b"GET /metrics HTTP/2.0\r\n\r\n", "400"),
            (b"GET  /metrics HTTP/1.1\r\n\r\n", "400"),
            (b"\xff\xfe\r\n\r\n", "400"),
            (b"\r\n\r\n", "400"),
        ];
        for (head, status) in refused {
            assert_eq!(answered(head)[9..12], *status, "{}", String::from_utf8_lossy(head));
        }
    }
}
