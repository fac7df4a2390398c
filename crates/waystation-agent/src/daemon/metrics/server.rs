//! The numbers over HTTP, for Prometheus: one address, one answer for each connection.
//!
//! Anybody who reaches the address may read the numbers; they say nothing of what is in arrays, and there is nothing else
//! to be had. Invariants: so many connections at a time, each for so long and with a request of so many
//! bytes; whoever is one too many waits in the system's queue; nothing listens once this has been dropped.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use http::{Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
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
const HEAD_BYTES: usize = 16 << 10;
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
async fn converse(stream: TcpStream, render: Arc<Render>) {
    let answer = service_fn(move |request: Request<Incoming>| {
        let answered = answer(&request, &*render);
        async move { Ok::<_, Infallible>(answered) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(HEAD_BYTES)
        .timer(TokioTimer::new())
        .header_read_timeout(CONNECTION_TIME)
        .serve_connection(TokioIo::new(stream), answer)
        .await;
    drop(served);
}

fn answer(request: &Request<Incoming>, render: &Render) -> Response<String> {
    let (status, of, body) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, PATH) => (StatusCode::OK, CONTENT_TYPE, render()),
        (_, PATH) => (StatusCode::METHOD_NOT_ALLOWED, "text/plain", "only GET is answered\n".to_owned()),
        _ => (StatusCode::NOT_FOUND, "text/plain", format!("the metrics are at {PATH}\n")),
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(of));
    response
}
