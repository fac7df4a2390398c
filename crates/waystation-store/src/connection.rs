//! Connections whose requests end in time, however large they are.
//!
//! The client's own bound is one for every request, of 30 s: too short for a part of 8 MiB on a slow line, too long for
//! nothing. Here a request has [`SILENCE`] for each MiB that it sends, and its answer may be silent for no longer than
//! that between two pieces. What takes longer is a lost connection, which the client's retries know how to treat.
//!
//! A server that no connection has ever reached is given up before the deadline: its address is more likely wrong than
//! that it is away for a while.
//!
//! A store that has no room is not asked again either: it gets none by waiting.
//!
//! A removal on condition is a `DELETE` with one header more ([`on_condition`]), which the crate has no option for.
//!
//! Where no credentials are given, clients ask the service for metadata that machines of clouds have. Other machines
//! have none, and a connection to it is refused at once or never answered: a few attempts tell, not the whole deadline.

use std::error::Error;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService, ReqwestConnector,
};
use tokio::time::{Instant, Sleep, sleep, timeout};

tokio::task_local! {
    /// Of the removals within: a header, and what it says.
    static CONDITION: (&'static str, String);
}

/// Requests, of which those that remove have a header more. Stores sign their own headers only, so this needs no
/// signature.
pub async fn on_condition<T>(header: &'static str, value: String, requests: impl Future<Output = T>) -> T {
    CONDITION.scope((header, value), requests).await
}

/// A request with what is demanded of removals.
fn with_condition(mut request: HttpRequest) -> Result<HttpRequest, HttpError> {
    let condition = CONDITION.try_with(Clone::clone).ok().filter(|_| request.method().as_str() == "DELETE");
    if let Some((header, value)) = condition {
        let value = value.parse().map_err(|error| HttpError::new(HttpErrorKind::Request, error))?;
        request.headers_mut().insert(header, value);
    }
    Ok(request)
}

/// What says nothing for so long is asked again.
const SILENCE: Duration = Duration::from_secs(30);
/// So many bytes are sent in that time, or the line is too slow.
const STEP_BYTES: usize = 1 << 20;
/// Where the services for metadata of S3's, Azure's and Google's clouds are.
const METADATA_HOSTS: [&str; 3] = ["169.254.169.254", "169.254.170.2", "metadata.google.internal"];
/// So many attempts to connect to one that all fail tell that there is none.
const METADATA_ATTEMPTS: usize = 3;
/// For so long attempts to connect go on to a server that has never been reached.
const UNREACHED: Duration = Duration::from_secs(10);

/// The status of what is refused for want of room.
const INSUFFICIENT_STORAGE: u16 = 507;

/// Makes such connections.
#[derive(Debug)]
pub struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Connection {
            client,
            in_vain: AtomicUsize::new(0),
            is_reached: AtomicBool::new(false),
            first_failure: OnceLock::new(),
        }))
    }
}

#[derive(Debug)]
struct Connection {
    client: HttpClient,
    /// Attempts to ask for metadata.
    in_vain: AtomicUsize,
    /// Whether an attempt to connect has not failed.
    is_reached: AtomicBool,
    /// When the first attempt to connect has failed.
    first_failure: OnceLock<Instant>,
}

#[async_trait]
impl HttpService for Connection {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let asks_machine = request.uri().host().is_some_and(|host| METADATA_HOSTS.contains(&host));
        let patience = patience_for(request.body().content_length());
        let address = request.uri().authority().map(|authority| without_user(authority.as_str()).to_owned());
        let request = with_condition(request)?;
        let outcome = timeout(patience, self.client.execute(request)).await.unwrap_or_else(|_| Err(silent()));
        let answer = match outcome {
            Err(error) if asks_machine => return Err(self.without_metadata(error)),
            Err(error) if is_untrusted(&error) => {
                return Err(HttpError::new(HttpErrorKind::Unknown, Untrusted));
            }
            Err(error) if error.kind() == HttpErrorKind::Connect => {
                return Err(self.without_connection(error, address.unwrap_or_default()));
            }
            outcome => {
                self.is_reached.store(true, Ordering::Relaxed);
                outcome?
            }
        };
        if answer.status().as_u16() == INSUFFICIENT_STORAGE {
            return Err(HttpError::new(HttpErrorKind::Unknown, Full)); // which is not tried again
        }
        Ok(answer.map(|body| HttpResponseBody::new(Watched { body, silence: Box::pin(sleep(SILENCE)) })))
    }
}

impl Connection {
    /// The error of an attempt to ask for metadata; at last one that is not tried again.
    fn without_metadata(&self, error: HttpError) -> HttpError {
        let attempts = 1 + self.in_vain.fetch_add(1, Ordering::Relaxed);
        if attempts < METADATA_ATTEMPTS {
            return error;
        }
        self.in_vain.store(0, Ordering::Relaxed);
        HttpError::new(HttpErrorKind::Unknown, NoCredentials)
    }

    /// The error of an attempt to connect; at last one that is not tried again.
    fn without_connection(&self, error: HttpError, address: String) -> HttpError {
        let first = *self.first_failure.get_or_init(Instant::now);
        if self.is_reached.load(Ordering::Relaxed) || first.elapsed() < UNREACHED {
            return error;
        }
        HttpError::new(HttpErrorKind::Unknown, Unreached { is_refused: is_refused(&error), address })
    }
}

fn without_user(authority: &str) -> &str {
    authority.rsplit_once('@').map_or(authority, |(_, address)| address)
}

/// Whether the machine is there, and nothing listens.
fn is_refused(error: &HttpError) -> bool {
    let mut source: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(found) = source {
        if found.downcast_ref::<io::Error>().is_some_and(|own| own.kind() == io::ErrorKind::ConnectionRefused)
        {
            return true;
        }
        source = found.source();
    }
    false
}

/// How long a request with so many bytes may take until its answer begins.
fn patience_for(nbytes: usize) -> Duration {
    SILENCE.saturating_mul(u32::try_from(nbytes.div_ceil(STEP_BYTES)).unwrap_or(u32::MAX).max(1))
}

fn silent() -> HttpError {
    HttpError::new(HttpErrorKind::Timeout, Silent)
}

/// Whether a connection failed because of the certificate of the server: no attempt ends otherwise then.
fn is_untrusted(error: &HttpError) -> bool {
    let mut source: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(found) = source {
        if matches!(encryption_in(found), Some(rustls::Error::InvalidCertificate(_))) {
            return true;
        }
        source = found.source();
    }
    false
}

/// What is inside of errors of the system that are inside of one another: these are no sources.
fn encryption_in<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    match error.downcast_ref::<io::Error>() {
        Some(outer) => encryption_in(outer.get_ref()?),
        None => error.downcast_ref(),
    }
}

/// The body of an answer that is silent for too long.
struct Watched {
    body: HttpResponseBody,
    silence: Pin<Box<Sleep>>,
}

impl Body for Watched {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if polled.is_ready() {
            self.silence.as_mut().reset(Instant::now() + SILENCE);
            return polled;
        }
        self.silence.as_mut().poll(context).map(|()| Some(Err(silent())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[derive(Debug)]
struct Silent;

impl fmt::Display for Silent {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "nothing came for {} s", SILENCE.as_secs())
    }
}

impl Error for Silent {}

/// Neither settings nor the environment have credentials, and this machine has no service that gives any.
#[derive(Debug)]
pub struct NoCredentials;

impl fmt::Display for NoCredentials {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "there are no credentials")
    }
}

impl Error for NoCredentials {}

/// The certificate of a server is not one that this process trusts.
#[derive(Debug)]
pub struct Untrusted;

impl fmt::Display for Untrusted {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "the certificate is not trusted")
    }
}

impl Error for Untrusted {}

/// The store has no room for what is written.
#[derive(Debug)]
pub struct Full;

impl fmt::Display for Full {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "the store has no room left")
    }
}

impl Error for Full {}

/// No connection to the server has ever been made.
#[derive(Clone, Debug)]
pub struct Unreached {
    is_refused: bool,
    address: String,
}

impl fmt::Display for Unreached {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_refused {
            write!(formatter, "{} refuses connections", self.address)
        } else {
            write!(formatter, "{} cannot be reached", self.address)
        }
    }
}

impl Error for Unreached {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_grows_with_what_is_sent() {
        assert_eq!(patience_for(0), SILENCE);
        assert_eq!(patience_for(STEP_BYTES), SILENCE);
        assert_eq!(patience_for(8 * STEP_BYTES), 8 * SILENCE);
        assert_eq!(patience_for(8 * STEP_BYTES + 1), 9 * SILENCE);
    }
}
