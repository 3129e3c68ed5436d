//! A kubelet socket that may be missing, and may be replaced while we hold it.
//!
//! Inputs: a path under the kubelet folder. Invariants: a connection is used only while the path still leads to the
//! inode it was made to; connecting costs one `stat`, so it is cheap to ask often.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use super::call::{CallError, DEADLINE, Reason};

/// gRPC wants an authority; on a unix socket nobody reads it.
const AUTHORITY: &str = "http://localhost";
/// Larger than most answers, so that one arrives without waiting for window updates.
const STREAM_WINDOW: u32 = 1024 * 1024;

/// Which file a path leads to. The creation time tells a file from a later one that got the same inode number.
type Identity = (u64, u64, i64, i64);

/// A socket path, the socket seen there, and the connection made to it.
#[derive(Debug)]
pub(super) struct Socket {
    path: PathBuf,
    seen: Option<Identity>,
    channel: Option<Channel>,
}

impl Socket {
    pub(super) const fn new(path: PathBuf) -> Self {
        Self {
            path,
            seen: None,
            channel: None,
        }
    }

    /// The connection to what is at the path now.
    pub(super) fn channel(&mut self) -> Result<Channel, CallError> {
        let present = self.identity().inspect_err(|_| self.seen = None)?;
        if self.seen != Some(present) {
            self.channel = None;
        }
        self.seen = Some(present);
        let channel = match self.channel.take() {
            Some(channel) => channel,
            None => self.connect(),
        };
        self.channel = Some(channel.clone());
        Ok(channel)
    }

    /// Whether the path leads to another socket than the one last used, or to none while there was one.
    pub(super) fn has_moved(&self) -> bool {
        self.seen != self.identity().ok()
    }

    /// Forgets the connection and not the socket: the next call connects anew.
    pub(super) fn disconnect(&mut self) {
        self.channel = None;
    }

    fn identity(&self) -> Result<Identity, CallError> {
        let meta = std::fs::metadata(&self.path).map_err(|error| {
            let reason = match error.kind() {
                ErrorKind::NotFound | ErrorKind::NotADirectory => Reason::SocketMissing,
                ErrorKind::PermissionDenied => Reason::PermissionDenied,
                _ => Reason::ConnectionFailed,
            };
            CallError::new(reason, format!("{}: {error}", self.path.display()))
        })?;
        Ok((meta.dev(), meta.ino(), meta.ctime(), meta.ctime_nsec()))
    }

    fn connect(&self) -> Channel {
        let path = self.path.clone();
        Endpoint::from_static(AUTHORITY)
            .connect_timeout(DEADLINE)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(STREAM_WINDOW)
            .connect_with_connector_lazy(service_fn(move |_: Uri| {
                let path = path.clone();
                async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
            }))
    }
}
