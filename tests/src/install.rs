//! Applies rendered manifests to an API server, the way `kubectl apply --server-side` does.

use kube::api::{DynamicObject, Patch, PatchParams};
use kube::core::{GroupVersionKind, TypeMeta};
use kube::discovery::{ApiCapabilities, ApiResource, Scope, pinned_kind};
use kube::{Api, Client};
use serde_json::Value;

/// Who owns the applied fields.
const MANAGER: &str = "forewarm-tests";

/// An object that the API server did not take.
#[derive(Debug, thiserror::Error)]
#[error("{object}: {reason}")]
pub struct Refused {
    /// Kind, namespace and name.
    pub object: String,
    /// The API server's message.
    pub reason: String,
}

/// Whether objects are stored or only checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Stored.
    Apply,
    /// Server-side dry run: admission and validation as for real, nothing stored.
    DryRun,
}

/// Applies all objects in order; strict about fields that the API server does not know.
///
/// # Errors
/// The first refused object.
pub async fn apply(client: &Client, objects: &[Value], mode: Mode) -> Result<(), Refused> {
    let mut params = PatchParams::apply(MANAGER).force().validation_strict();
    if mode == Mode::DryRun {
        params = params.dry_run();
    }
    for object in objects {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let refused = |reason: String| Refused {
            object: describe(object),
            reason,
        };
        let api = api(client, object).await.map_err(refused)?;
        let refused = |error: kube::Error| Refused {
            object: describe(object),
            reason: error.to_string(),
        };
        api.patch(name, &params, &Patch::Apply(object))
            .await
            .map_err(refused)?;
    }
    Ok(())
}

/// The API of one object's kind, in the object's namespace.
///
/// # Errors
/// When the API server does not serve the kind.
pub async fn api(client: &Client, object: &Value) -> Result<Api<DynamicObject>, String> {
    let field = |name: &str| object[name].as_str().unwrap_or_default().to_owned();
    let types = TypeMeta {
        api_version: field("apiVersion"),
        kind: field("kind"),
    };
    let kind = GroupVersionKind::try_from(&types).map_err(|error| error.to_string())?;
    let (resource, capabilities): (ApiResource, ApiCapabilities) = pinned_kind(client, &kind)
        .await
        .map_err(|error| error.to_string())?;
    Ok(match capabilities.scope {
        Scope::Cluster => Api::all_with(client.clone(), &resource),
        Scope::Namespaced => {
            let namespace = object["metadata"]["namespace"].as_str().unwrap_or("default");
            Api::namespaced_with(client.clone(), namespace, &resource)
        }
    })
}

/// `Kind namespace/name` of an object.
#[must_use]
pub fn describe(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (kind, name) = (text(&object["kind"]), text(&object["metadata"]["name"]));
    match object["metadata"]["namespace"].as_str() {
        Some(namespace) => format!("{kind} {namespace}/{name}"),
        None => format!("{kind} {name}"),
    }
}
