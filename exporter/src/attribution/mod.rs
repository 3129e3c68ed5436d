//! Which pod holds which device.
//!
//! Purpose: ask the kubelet which container holds which device and which pods run, and keep one immutable answer
//! that the renderer joins with device readings.
//! Inputs: `pod-resources/kubelet.sock` (allocations, inventory) and `pods-api/pods-api.sock` (UID, phase,
//! readiness) under the kubelet folder; where the second does not exist, a node-scoped pod watch at the API server.
//! ```text
//! pod-resources ──► allocations ─┐
//! pods-api ───────► pods ────────┼─► assemble ─► Attribution ─(AttributionView::load)─► join ─► rows
//! API server ·····► pods ────────┘                                NVML ─► devices ────────┘
//! ```
//! Invariants: readers never wait; a failing call keeps the last good answer, with its age; all state is bounded; a
//! pod UID is that of the present pod or absent.

mod allocation;
mod assemble;
mod call;
pub mod device_id;
pub mod join;
mod metrics;
mod pods;
mod poll;
mod socket;
mod view;
pub mod wire;

pub use allocation::{Allocation, Attribution, Gap, Gaps};
pub use call::Reason;
pub use metrics::Api;
pub use pods::PodSource;
pub use view::AttributionView;

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use forewarm_runtime::kube::ClientArgs;
use forewarm_runtime::tasks::Tasks;
use forewarm_signals::label::Sharing;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use self::metrics::Metrics;
use self::pods::{Facts, Watch};
use self::poll::Poller;
use self::socket::Socket;

/// Default time between two questions who holds what: new pods are noticed by the Pods API before that.
pub const INTERVAL: Duration = Duration::from_secs(5);

/// Where to ask, and how often.
#[derive(Debug, Clone)]
pub struct Config {
    /// The kubelet's folder, `/var/lib/kubelet`.
    pub kubelet_dir: PathBuf,
    /// Name of this node, for the API server; without it there is no fallback.
    pub node_name: Option<String>,
    /// How to reach the API server where the kubelet does not tell about pods.
    pub api_server: ClientArgs,
    /// Time between two questions who holds what: [`INTERVAL`].
    pub interval: Duration,
    /// What `<id>::<n>` means on this node, which the id does not say.
    pub shared_as: Sharing,
}

impl Config {
    /// The defaults for a kubelet folder and node.
    #[must_use]
    pub fn new(kubelet_dir: PathBuf, node_name: Option<String>) -> Self {
        Self {
            kubelet_dir,
            node_name,
            api_server: ClientArgs::default(),
            interval: INTERVAL,
            shared_as: Sharing::TimeSlicing,
        }
    }
}

/// Starts the tasks that keep the view up to date. Must be called within the runtime. The metrics are registered
/// under their `forewarm_exporter_attribution_*` names.
pub fn start(config: Config, tasks: &Tasks, registry: &mut Registry) -> AttributionView {
    let view = AttributionView::default();
    let metrics = Metrics::register(registry, view.clone());
    let (facts, told) = watch::channel(Arc::new(Facts::default()));
    let pods = Watch {
        path: config.kubelet_dir.join("pods-api/pods-api.sock"),
        api_server: config.api_server,
        node: config.node_name,
        facts,
        metrics: metrics.clone(),
    };
    let poller = Poller::new(
        Socket::new(config.kubelet_dir.join("pod-resources/kubelet.sock")),
        config.interval,
        config.shared_as,
        told,
        view.clone(),
        metrics,
    );
    let token = tasks.token();
    tasks.spawn("attribution-pods", async move {
        token.run_until_cancelled(pods.run()).await;
        Ok::<_, Infallible>(())
    });
    let token = tasks.token();
    tasks.spawn("attribution-allocations", async move {
        token.run_until_cancelled(poller.run()).await;
        Ok::<_, Infallible>(())
    });
    view
}
