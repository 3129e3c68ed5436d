//! One call to a kubelet API: its deadline, and why it failed in words that fit a label.
//!
//! Inputs: a future of tonic, and its status when it fails. Invariants: no call outlives its deadline; every failure
//! has one reason of a closed set.

use std::future::Future;
use std::time::Duration;

use tonic::{Code, Response, Status};

/// The kubelet answers from memory; what takes longer is a kubelet that hangs.
pub(super) const DEADLINE: Duration = Duration::from_secs(2);

/// A node with 110 pods answers in some 100 KiB, yet gRPC's default of 4 MiB was seen to overflow on dense nodes.
pub(super) const LARGEST_ANSWER: usize = 16 * 1024 * 1024;

/// Why a call failed. The value of label `reason` of `forewarm_exporter_attribution_errors_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// There is no socket at the path.
    SocketMissing,
    /// The socket may not be opened.
    PermissionDenied,
    /// Nobody answers at the socket, or the connection broke.
    ConnectionFailed,
    /// The kubelet's rate limit.
    RateLimited,
    /// No answer within the deadline.
    DeadlineExceeded,
    /// The answer is larger than what is read.
    AnswerTooLarge,
    /// The kubelet does not serve this API.
    NotServed,
    /// The kubelet does not know its pods yet.
    NotReady,
    /// The answer is not what the API says.
    Malformed,
    /// The stream ended, or the kubelet dropped this reader for being slow.
    StreamEnded,
    /// There is no kubeconfig and no service account, so no API server to ask.
    NoApiServer,
    /// Any other refusal.
    Refused,
}

impl Reason {
    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SocketMissing => "socket-missing",
            Self::PermissionDenied => "permission-denied",
            Self::ConnectionFailed => "connection-failed",
            Self::RateLimited => "rate-limited",
            Self::DeadlineExceeded => "deadline-exceeded",
            Self::AnswerTooLarge => "answer-too-large",
            Self::NotServed => "not-served",
            Self::NotReady => "not-ready",
            Self::Malformed => "malformed",
            Self::StreamEnded => "stream-ended",
            Self::NoApiServer => "no-api-server",
            Self::Refused => "refused",
        }
    }
}

/// A failed call.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(super) struct CallError {
    pub(super) reason: Reason,
    pub(super) message: String,
}

impl CallError {
    pub(super) fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
        }
    }
}

impl From<Status> for CallError {
    fn from(status: Status) -> Self {
        let reason = match status.code() {
            Code::ResourceExhausted if status.message().contains("rate limit") => Reason::RateLimited,
            Code::ResourceExhausted if status.message().contains("channel closed") => Reason::StreamEnded,
            // grpc-go refuses to send what is over its own limit with this code, tonic to read it with the other.
            Code::ResourceExhausted | Code::OutOfRange => Reason::AnswerTooLarge,
            Code::DeadlineExceeded | Code::Cancelled => Reason::DeadlineExceeded,
            Code::Unimplemented => Reason::NotServed,
            Code::FailedPrecondition => Reason::NotReady,
            Code::PermissionDenied | Code::Unauthenticated => Reason::PermissionDenied,
            Code::Unavailable => Reason::ConnectionFailed,
            Code::Internal | Code::Unknown | Code::DataLoss => Reason::Malformed,
            _ => Reason::Refused,
        };
        Self::new(reason, format!("{:?}: {:.200}", status.code(), status.message()))
    }
}

/// Awaits an answer for at most the deadline.
pub(super) async fn within_deadline<T>(
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, CallError> {
    within(DEADLINE, call).await
}

async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, CallError> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_) => Err(CallError::new(
            Reason::DeadlineExceeded,
            format!("no answer within {limit:?}"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kubelets_refusals_have_their_own_reasons() {
        for (status, reason) in [
            (
                Status::resource_exhausted("rejected by rate limit"),
                Reason::RateLimited,
            ),
            (
                Status::resource_exhausted("watch client channel closed"),
                Reason::StreamEnded,
            ),
            (
                Status::resource_exhausted("grpc: trying to send message larger than max"),
                Reason::AnswerTooLarge,
            ),
            (
                Status::out_of_range("decoded message length too large"),
                Reason::AnswerTooLarge,
            ),
            (Status::unimplemented("unknown service"), Reason::NotServed),
            (
                Status::failed_precondition("Kubelet is initializing"),
                Reason::NotReady,
            ),
            (Status::unavailable("connect"), Reason::ConnectionFailed),
            (Status::internal("failed to decode"), Reason::Malformed),
        ] {
            assert_eq!(CallError::from(status.clone()).reason, reason, "{status}");
        }
    }

    #[tokio::test]
    async fn a_call_that_hangs_ends_at_the_deadline() {
        let never = std::future::pending::<Result<Response<()>, Status>>();
        assert_eq!(
            within(Duration::from_millis(1), never).await.unwrap_err().reason,
            Reason::DeadlineExceeded
        );
    }
}
