//! Follows the ConfigMap that says whom to believe.
//!
//! Purpose: keeps the trust store equal to `kube-system/extension-apiserver-authentication`.
//! Inputs: a watch of that one object.
//! Invariants: a change is swapped in whole; a map that cannot be read, is deleted or is out of reach leaves
//! the last good trust in place and says so; the watch restarts by itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use forewarm_runtime::BoxError;
use forewarm_runtime::exit::chain;
use forewarm_runtime::status::Condition;
use futures::{StreamExt as _, pin_mut};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::Api;
use kube::runtime::{WatchStreamExt as _, watcher};
use tokio_util::sync::CancellationToken;

use super::{Trust, TrustStore};
use crate::retry::watch_backoff;

/// Namespace of the ConfigMap.
pub const NAMESPACE: &str = "kube-system";
/// Name of the ConfigMap.
pub const NAME: &str = "extension-apiserver-authentication";

/// Keeps `store` up to date until cancelled; `condition` is ready once the map was read.
///
/// # Errors
/// Never before cancellation.
pub async fn watch(
    client: kube::Client,
    store: Arc<TrustStore>,
    condition: Condition,
    token: CancellationToken,
) -> Result<(), BoxError> {
    let api: Api<ConfigMap> = Api::namespaced(client, NAMESPACE);
    let config = watcher::Config::default().fields(&format!("metadata.name={NAME}"));
    let events = watcher(api, config).backoff(watch_backoff());
    pin_mut!(events);
    condition.waiting(format!("ConfigMap {NAMESPACE}/{NAME} was not read yet"));
    let mut listed = false;
    loop {
        let event = tokio::select! {
            () = token.cancelled() => return Ok(()),
            event = events.next() => event,
        };
        match event {
            None => return Err("the watch of the authentication ConfigMap ended".into()),
            Some(Ok(watcher::Event::Apply(map) | watcher::Event::InitApply(map))) => {
                listed = true;
                apply(&map.data.unwrap_or_default(), &store, &condition);
            }
            Some(Ok(watcher::Event::Delete(_))) => {
                tracing::warn!("authentication ConfigMap deleted, keeping the last trust");
            }
            Some(Ok(watcher::Event::Init)) => listed = false,
            Some(Ok(watcher::Event::InitDone)) => {
                if !listed && store.load().is_none() {
                    condition.waiting(format!("ConfigMap {NAMESPACE}/{NAME} does not exist"));
                }
            }
            Some(Err(error)) => {
                let error = chain(&error);
                tracing::warn!(error, "watching the authentication ConfigMap failed, retrying");
                if store.load().is_none() {
                    condition.waiting(format!("ConfigMap {NAMESPACE}/{NAME}: {error}"));
                }
            }
        }
    }
}

fn apply(data: &BTreeMap<String, String>, store: &TrustStore, condition: &Condition) {
    match Trust::read(data) {
        Ok(trust) => {
            tracing::info!(
                client_ca = trust.clients.is_some(),
                front_proxy = trust.front_proxy.is_some(),
                "trust loaded"
            );
            store.store(Some(Arc::new(trust)));
            condition.ready();
        }
        Err(error) => {
            tracing::error!(%error, "authentication ConfigMap cannot be used, keeping the last trust");
            if store.load().is_none() {
                condition.waiting(format!("ConfigMap {NAMESPACE}/{NAME}: {error}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forewarm_runtime::status::Readiness;

    #[test]
    fn a_broken_map_keeps_the_last_trust() {
        let store = TrustStore::empty();
        let condition = Readiness::new().condition("trust");
        let pem = rcgen::generate_simple_self_signed(vec!["ca".into()])
            .unwrap()
            .cert
            .pem();
        let good = BTreeMap::from([("client-ca-file".to_owned(), pem)]);
        let bad = BTreeMap::from([("client-ca-file".to_owned(), "nonsense".to_owned())]);

        apply(&bad, &store, &condition);
        assert!(store.load().is_none() && !condition.is_ready());
        apply(&good, &store, &condition);
        assert!(condition.is_ready());
        let before = store.load_full().unwrap();
        apply(&bad, &store, &condition);
        assert!(Arc::ptr_eq(&before, &store.load_full().unwrap()));
        assert!(condition.is_ready());
    }
}
