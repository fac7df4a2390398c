//! What stands for TLS in a program that is built without it: nothing, so that no connection goes through it.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use waystation_format::{Error, Result};

use super::hello::Name;

/// There is none of it.
#[derive(Clone, Debug)]
pub enum Tls {}

/// There is none of it.
#[derive(Debug)]
pub enum Session {}

impl Tls {
    pub(crate) async fn connect(&self, _: TcpStream, _: &Name) -> Result<Session> {
        match *self {}
    }

    pub(crate) async fn accept(&self, _: TcpStream) -> Result<Session, (io::Error, TcpStream)> {
        match *self {}
    }
}

pub(crate) fn binding(session: &Session) -> Result<Vec<u8>> {
    match *session {}
}

pub(crate) fn check_session(session: &Session, _: &Name) -> Result<()> {
    match *session {}
}

/// No error is one of TLS.
pub(crate) fn error_of(_: &io::Error) -> Option<Error> {
    None
}

impl AsyncRead for Session {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match *self {}
    }
}

impl AsyncWrite for Session {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
        match *self {}
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match *self {}
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match *self {}
    }
}
