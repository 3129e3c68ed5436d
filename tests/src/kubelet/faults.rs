//! Faults of the kubelet's APIs, put on single calls while they run.
//!
//! Inputs: tests set and clear faults by call. Invariants: a fault applies from the next call on; a call is counted
//! before its fault.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt, Full};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::Service;

/// A call of the APIs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Call {
    /// PodResources List.
    List,
    /// PodResources GetAllocatableResources.
    Allocatable,
    /// Pods WatchPods.
    Watch,
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The kubelet's own limiter.
    RateLimited,
    /// No answer, ever. An open stream tells nothing more until the fault is gone.
    Hang,
    /// Bytes that are no message of the API.
    Garbage,
    /// The right answer, padded to at least this many bytes: List with pods without GPUs, GetAllocatableResources
    /// with a resource without devices.
    Padded(usize),
    /// The kubelet does not know its pods yet.
    NotReady,
    /// The kubelet does not serve this call.
    Unimplemented,
}

/// Faults and counts by call.
#[derive(Debug, Default)]
pub(super) struct Faults {
    inner: Mutex<BTreeMap<Call, Record>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Record {
    fault: Option<Fault>,
    calls: u64,
}

impl Faults {
    pub(super) fn set(&self, call: Call, fault: Option<Fault>) {
        self.lock().entry(call).or_default().fault = fault;
    }

    pub(super) fn calls(&self, call: Call) -> u64 {
        self.lock().entry(call).or_default().calls
    }

    pub(super) fn get(&self, call: Call) -> Option<Fault> {
        self.lock().entry(call).or_default().fault
    }

    fn count(&self, call: Call) -> Option<Fault> {
        let mut records = self.lock();
        let record = records.entry(call).or_default();
        record.calls += 1;
        record.fault
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Call, Record>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A service behind its faults.
#[derive(Debug, Clone)]
pub(super) struct Gate<S> {
    inner: S,
    faults: Arc<Faults>,
}

impl<S> Gate<S> {
    pub(super) const fn new(inner: S, faults: Arc<Faults>) -> Self {
        Self { inner, faults }
    }
}

impl<S: NamedService> NamedService for Gate<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Gate<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let call = match request.uri().path().rsplit('/').next() {
            Some("List") => Some(Call::List),
            Some("GetAllocatableResources") => Some(Call::Allocatable),
            Some("WatchPods") => Some(Call::Watch),
            _ => None,
        };
        let refuse = |status: Status| -> Self::Future { Box::pin(async move { Ok(status.into_http()) }) };
        match call.and_then(|call| self.faults.count(call)) {
            Some(Fault::RateLimited) => refuse(Status::resource_exhausted("rejected by rate limit")),
            Some(Fault::NotReady) => refuse(Status::failed_precondition("Kubelet is initializing")),
            Some(Fault::Unimplemented) => refuse(Status::unimplemented("unknown method")),
            Some(Fault::Hang) => Box::pin(std::future::pending()),
            Some(Fault::Garbage) => Box::pin(async { Ok(garbage()) }),
            Some(Fault::Padded(_)) | None => Box::pin(self.inner.call(request)),
        }
    }
}

/// A gRPC answer whose frame is well formed and whose message is not.
fn garbage() -> Response<Body> {
    let message = [0xff_u8; 64];
    let mut frame = BytesMut::new();
    frame.put_u8(0); // not compressed
    frame.put_u32(64);
    frame.put_slice(&message);
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    let body = Full::<Bytes>::from(frame.freeze()).with_trailers(async move { Some(Ok(trailers)) });
    let mut response = Response::new(Body::new(body));
    response
        .headers_mut()
        .insert("content-type", HeaderValue::from_static("application/grpc"));
    response
}
