//! The kubelet's local gRPC APIs, as the exporter meets them, without a kubelet.
//!
//! Purpose: serve PodResources v1 and the Pods API on unix sockets from a state that a test or a simulated node sets,
//! with the faults real kubelets were seen to have.
//! Inputs: a kubelet folder, pods with their devices, allocatable devices, faults.
//! Invariants: answers look like a real kubelet's (no UID in PodResources, containers without devices listed, ended
//! pods left out); stopping a socket ends its connections, as the end of a process does; everything stops on drop.

mod faults;
mod pod_resources;
mod pods;
mod state;

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forewarm_exporter::attribution::wire::podresources::pod_resources_lister_server::PodResourcesListerServer;
use forewarm_exporter::attribution::wire::pods::pods_server::PodsServer;
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

pub use faults::{Call, Fault};
use faults::{Faults, Gate};
pub use state::{Container, Device, Phase, Pod, State};

/// A socket of the kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Api {
    /// `pod-resources/kubelet.sock`.
    PodResources,
    /// `pods-api/pods-api.sock`, which kubelets before 1.37 do not have.
    Pods,
}

impl Api {
    /// Where the socket is, seen from the kubelet folder.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::PodResources => "pod-resources/kubelet.sock",
            Self::Pods => "pods-api/pods-api.sock",
        }
    }
}

/// Both APIs of one kubelet. Clones steer the same one.
#[derive(Debug, Clone)]
pub struct Kubelet {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    state: tokio::sync::watch::Sender<State>,
    faults: Arc<Faults>,
    servers: Mutex<Vec<Serving>>,
}

/// One bound socket with a runtime of its own, so that dropping it ends its connections too.
#[derive(Debug)]
struct Serving {
    api: Api,
    replaced: bool,
    runtime: Option<Runtime>,
}

impl Drop for Serving {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Kubelet {
    /// A kubelet of 1.37: both sockets under `dir`.
    ///
    /// # Errors
    /// A folder or socket that cannot be made.
    pub fn start(dir: &Path) -> io::Result<Self> {
        let kubelet = Self::stopped(dir);
        kubelet.serve(Api::PodResources)?;
        kubelet.serve(Api::Pods)?;
        Ok(kubelet)
    }

    /// A kubelet before 1.37: PodResources only.
    ///
    /// # Errors
    /// A folder or socket that cannot be made.
    pub fn start_without_pods_api(dir: &Path) -> io::Result<Self> {
        let kubelet = Self::stopped(dir);
        kubelet.serve(Api::PodResources)?;
        Ok(kubelet)
    }

    /// A kubelet that has no socket yet.
    #[must_use]
    pub fn stopped(dir: &Path) -> Self {
        Self {
            inner: Arc::new(Inner {
                dir: dir.to_owned(),
                state: tokio::sync::watch::Sender::new(State::default()),
                faults: Arc::default(),
                servers: Mutex::default(),
            }),
        }
    }

    /// Binds a socket, in place of what is at its path.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn serve(&self, api: Api) -> io::Result<()> {
        self.close(api);
        self.bind(api)
    }

    /// Binds a new socket at the path while the old one stays open behind it: a client that does not look at the path
    /// goes on talking to a kubelet that is no more.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn replace(&self, api: Api) -> io::Result<()> {
        for serving in self.servers().iter_mut().filter(|serving| serving.api == api) {
            serving.replaced = true;
        }
        self.bind(api)
    }

    /// Ends a socket and its connections, and removes the path.
    pub fn close(&self, api: Api) {
        self.servers()
            .retain(|serving| serving.api != api || serving.replaced);
        let _ = std::fs::remove_file(self.inner.dir.join(api.path()));
    }

    /// Changes the state; streams tell what changed.
    pub fn change(&self, change: impl FnOnce(&mut State)) {
        self.inner.state.send_modify(change);
    }

    /// Adds a pod, or replaces the one with its UID.
    pub fn put(&self, pod: Pod) {
        self.change(|state| {
            state.pods.insert(pod.uid.clone(), pod);
        });
    }

    /// Removes a pod.
    pub fn remove(&self, uid: &str) {
        self.change(|state| {
            state.pods.remove(uid);
        });
    }

    /// Sets a pod's readiness.
    pub fn set_ready(&self, uid: &str, ready: bool) {
        self.change(|state| {
            if let Some(pod) = state.pods.get_mut(uid) {
                pod.ready = ready;
            }
        });
    }

    /// Sets a pod's phase; a pod that ended is not ready.
    pub fn set_phase(&self, uid: &str, phase: Phase) {
        self.change(|state| {
            if let Some(pod) = state.pods.get_mut(uid) {
                pod.phase = phase;
                pod.ready &= !phase.has_ended();
            }
        });
    }

    /// Sets the devices of a resource that may be handed out.
    pub fn set_allocatable(&self, resource: &str, ids: impl IntoIterator<Item = impl Into<String>>) {
        let ids = ids.into_iter().map(Into::into).collect();
        self.change(|state| {
            state.allocatable.insert(resource.to_owned(), ids);
        });
    }

    /// The present state.
    #[must_use]
    pub fn state(&self) -> State {
        self.inner.state.borrow().clone()
    }

    /// Puts a fault on a call, or takes it away.
    pub fn fault(&self, call: Call, fault: Option<Fault>) {
        self.inner.faults.set(call, fault);
        // Streams that hang look again.
        self.inner.state.send_modify(|_| {});
    }

    /// How often a call was asked for, faults included.
    #[must_use]
    pub fn calls(&self, call: Call) -> u64 {
        self.inner.faults.calls(call)
    }

    fn bind(&self, api: Api) -> io::Result<()> {
        let path = self.inner.dir.join(api.path());
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        // Bound under another name and renamed, so that there is no moment without a socket.
        let fresh = path.with_extension("new");
        let _ = std::fs::remove_file(&fresh);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("kubelet-api")
            .enable_all()
            .build()?;
        // Guarded from here on: a runtime must not be dropped in place where the caller is asynchronous.
        let handle = runtime.handle().clone();
        let serving = Serving {
            api,
            replaced: false,
            runtime: Some(runtime),
        };
        let listener = {
            let _inside = handle.enter();
            UnixListener::bind(&fresh)
                .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", fresh.display())))?
        };
        std::fs::set_permissions(&fresh, std::fs::Permissions::from_mode(0o600))?;
        std::fs::rename(&fresh, &path)?;

        let faults = &self.inner.faults;
        let state = self.inner.state.clone();
        let incoming = UnixListenerStream::new(listener);
        let mut server = Server::builder();
        let router = match api {
            Api::PodResources => {
                let service =
                    PodResourcesListerServer::new(pod_resources::Service::new(state, Arc::clone(faults)));
                server.add_service(Gate::new(
                    service.max_encoding_message_size(usize::MAX),
                    Arc::clone(faults),
                ))
            }
            Api::Pods => {
                let service = PodsServer::new(pods::Service::new(state, Arc::clone(faults)));
                server.add_service(Gate::new(service, Arc::clone(faults)))
            }
        };
        #[allow(
            clippy::disallowed_methods,
            reason = "lives as long as this runtime, which the guard ends"
        )]
        handle.spawn(async move {
            if let Err(error) = router.serve_with_incoming(incoming).await {
                tracing::warn!(?api, %error, "kubelet api ended");
            }
        });
        self.servers().push(serving);
        Ok(())
    }

    fn servers(&self) -> MutexGuard<'_, Vec<Serving>> {
        self.inner.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
