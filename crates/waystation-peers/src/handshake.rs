//! How two agents prove to each other that they know the secret of the job.
//!
//! Client: hello. Server: challenge. Client: its proof. Server: its own. Each proof signs everything said
//! before: versions, purpose, run, both names, both random numbers, and the side that gives it; with TLS beneath, the
//! connection of that too, so that no host can pass on what another proves. Failures: a
//! side that goes away or is silent (the caller sets a deadline), a refusal, a proof that is wrong; then
//! there is no connection, and nothing was done. Invariants: the client proves first, so that a stranger who
//! knocks gets nothing to guess the secret from; replays fail for the other side's random number is new,
//! reflections for the side is signed; the keys of the connection depend on all of it.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use waystation_format::slot::Id;
use waystation_format::{Error, Kind, Result};

use super::carrier::Carrier;
use super::hello::{
    CHALLENGE_BYTES, Challenge, HELLO_BYTES, Hello, NONCE_BYTES, Name, Purpose, Refusal, VERSION, refusal,
};
use super::keys::{Keys, PROOF_BYTES, Proofs, Side, transcript};
use super::secret::Secret;
use super::tls;

/// Length of the last message: a status, zeros, and the server's proof.
const ANSWER_BYTES: usize = 16 + PROOF_BYTES;

/// Who speaks: a host, or a tool, of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its name, as the others of the job know it.
    pub name: Name,
    /// The run.
    pub run: Id,
}

/// Proves this side to a server, and has it prove itself.
pub(crate) async fn as_client(
    stream: &mut Carrier,
    secret: &Secret,
    own: &Identity,
    server: &Name,
    purpose: Purpose,
) -> Result<Keys> {
    let hello = Hello {
        versions: (VERSION, VERSION),
        purpose,
        run: own.run,
        nonce: random()?,
        client: own.name.clone(),
        server: server.clone(),
    }
    .encode();
    send(stream, &hello).await?;
    let challenge: [u8; CHALLENGE_BYTES] = receive(stream).await?;
    if let Some(refusal) = Challenge::decode(&challenge)?.refusal {
        return Err(refusal.error());
    }
    let transcript = transcript(&[&stream.binding()?, &hello, &challenge]);
    let proofs = Proofs::new(secret, &transcript)?;
    send(stream, &proofs.of(Side::Client)).await?;
    let answer: [u8; ANSWER_BYTES] = receive(stream).await?;
    if let Some(refusal) = Refusal::of_status(answer[0])? {
        return Err(refusal.error());
    }
    match answer.last_chunk() {
        Some(proof) if answer[1..16] == [0; 15] && proofs.verify(Side::Server, proof) => {}
        _ => {
            let message = "whoever answers there does not know the secret of this job";
            return Err(Error::new(Kind::InvalidInput, message));
        }
    }
    Keys::new(secret, &transcript, Side::Client)
}

/// Has a client prove itself, asks for a place for it, and proves this side. The hello says who it is.
pub(crate) async fn as_server<P>(
    stream: &mut Carrier,
    secret: &Secret,
    own: &Identity,
    place: impl FnOnce() -> Option<P>,
) -> Result<(Keys, Hello, P)> {
    let bytes: [u8; HELLO_BYTES] = receive(stream).await?;
    let read = Hello::decode(&bytes).map_err(|error| match error.kind() {
        Kind::Unsupported => (Refusal::Version, error),
        _ => (Refusal::Malformed, error),
    });
    let hello = match read.and_then(|hello| check(hello, own)).and_then(|hello| check_name(stream, hello)) {
        Ok(hello) => hello,
        Err((refusal, error)) => {
            refuse(stream, refusal).await;
            return Err(error);
        }
    };
    let challenge = Challenge { version: VERSION, refusal: None, nonce: random()? }.encode();
    send(stream, &challenge).await?;
    let transcript = transcript(&[&stream.binding()?, &bytes, &challenge]);
    let proofs = Proofs::new(secret, &transcript)?;
    let proof: [u8; PROOF_BYTES] = receive(stream).await?;
    let named = |kind, message| Error::new(kind, message).with("client", hello.client.as_str());
    let admitted = if proofs.verify(Side::Client, &proof) {
        let busy = || (Refusal::Busy, named(Kind::Unavailable, "there are too many connections"));
        place().ok_or_else(busy)
    } else {
        let error = named(Kind::InvalidInput, "a client does not know the secret of this job");
        Err((Refusal::Secret, error))
    };
    let mut answer = [0; ANSWER_BYTES];
    let place = match admitted {
        Ok(place) => place,
        Err((refusal, error)) => {
            answer[0] = refusal as u8;
            drop(send(stream, &answer).await); // whether it hears of it or not, it is not let in
            return Err(error);
        }
    };
    answer[ANSWER_BYTES - PROOF_BYTES..].copy_from_slice(&proofs.of(Side::Server));
    send(stream, &answer).await?;
    Ok((Keys::new(secret, &transcript, Side::Server)?, hello, place))
}

/// Tells a client that this side does not go on with it, if it still listens.
async fn refuse(stream: &mut Carrier, why: Refusal) {
    drop(send(stream, &refusal(why)).await);
}

fn check(hello: Hello, own: &Identity) -> Result<Hello, (Refusal, Error)> {
    if hello.server != own.name {
        let error = Error::new(Kind::InvalidInput, "a client wants another host");
        let error = error.with("client", hello.client.as_str()).with("wanted", hello.server.as_str());
        return Err((Refusal::Host, error));
    }
    if hello.run != own.run {
        let error = Error::new(Kind::Conflict, "a client belongs to another run");
        let error = error.with("client", hello.client.as_str()).with("run", hello.run.to_string());
        return Err((Refusal::Run, error));
    }
    Ok(hello)
}

/// Who a certificate names must be who the client says it is.
fn check_name(stream: &Carrier, hello: Hello) -> Result<Hello, (Refusal, Error)> {
    match stream.check_name(&hello.client) {
        Ok(()) => Ok(hello),
        Err(error) => Err((Refusal::Name, error)),
    }
}

async fn receive<const N: usize>(stream: &mut Carrier) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).await.map_err(|error| lost(&error))?;
    Ok(bytes)
}

async fn send(stream: &mut Carrier, bytes: &[u8]) -> Result<()> {
    stream.write_all(bytes).await.map_err(|error| lost(&error))?;
    stream.flush().await.map_err(|error| lost(&error))
}

/// Why there is no connection, when what carries it fails before both sides have proven.
pub(crate) fn lost(error: &std::io::Error) -> Error {
    tls::error_of(error).unwrap_or_else(|| {
        let message = format!("the connection was lost before both sides had proven: {error}");
        Error::new(Kind::Unavailable, message)
    })
}

fn random() -> Result<[u8; NONCE_BYTES]> {
    let mut bytes = [0; NONCE_BYTES];
    // Up to 256 bytes are given whole, once the system has been seeded.
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(NONCE_BYTES) => Ok(bytes),
        _ => Err(Error::new(Kind::Unavailable, "the system gives no random numbers")),
    }
}
