//! The inference workload that trials scale, one offered load per namespace.
//!
//! Images are fixed when nodes start; this routes the image's containers to the load of their namespace.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use forewarm_tests::simnode::workload::{Workload, WorkloadContext, WorkloadFactory};

/// Image of the workload.
pub(crate) const IMAGE: &str = "forewarm/simulated-inference";

/// Which workload runs in which namespace.
#[derive(Clone, Default)]
pub(crate) struct Router(Arc<Mutex<BTreeMap<String, Arc<dyn WorkloadFactory>>>>);

impl Router {
    /// Containers of the image in this namespace are started by `factory` from now on.
    pub(crate) fn route(&self, namespace: &str, factory: Arc<dyn WorkloadFactory>) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(namespace.to_owned(), factory);
    }
}

impl WorkloadFactory for Router {
    fn start(&self, context: WorkloadContext) -> Result<Box<dyn Workload>, String> {
        let factory = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&context.namespace)
            .cloned();
        factory
            .ok_or_else(|| format!("no workload for namespace {}", context.namespace))?
            .start(context)
    }
}
