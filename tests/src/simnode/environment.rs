//! A container's environment and arguments: fieldRefs, ConfigMap and Secret keys, `$(VAR)`.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use k8s_openapi::api::core::v1::{ConfigMap, Container, Pod, Secret};
use kube::{Api, Client};

/// What the node knows of a pod beside its object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// Of the pod.
    pub pod: Ipv4Addr,
    /// Of the node.
    pub host: Ipv4Addr,
}

/// Why something a pod refers to cannot be had now; the kubelet would retry, and so does the node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Missing(pub String);

/// The value of a downward API field.
///
/// # Errors
/// When the field is not one that the kubelet offers.
pub fn field(path: &str, pod: &Pod, addresses: Addresses) -> Result<String, Missing> {
    let metadata = &pod.metadata;
    let spec = pod.spec.as_ref();
    let key = |prefix: &str| path.strip_prefix(prefix)?.strip_suffix("']");
    let of = |map: &Option<BTreeMap<String, String>>, key: &str| {
        map.as_ref()
            .and_then(|map| map.get(key))
            .cloned()
            .unwrap_or_default()
    };
    if let Some(label) = key("metadata.labels['") {
        return Ok(of(&metadata.labels, label));
    }
    if let Some(annotation) = key("metadata.annotations['") {
        return Ok(of(&metadata.annotations, annotation));
    }
    let value = match path {
        "metadata.name" => metadata.name.clone(),
        "metadata.namespace" => metadata.namespace.clone(),
        "metadata.uid" => metadata.uid.clone(),
        "spec.nodeName" => spec.and_then(|spec| spec.node_name.clone()),
        "spec.serviceAccountName" => spec.and_then(|spec| spec.service_account_name.clone()),
        "status.podIP" | "status.podIPs" => Some(addresses.pod.to_string()),
        "status.hostIP" | "status.hostIPs" => Some(addresses.host.to_string()),
        "metadata.labels" => Some(lines(metadata.labels.as_ref())),
        "metadata.annotations" => Some(lines(metadata.annotations.as_ref())),
        _ => return Err(Missing(format!("fieldPath {path} is not known"))),
    };
    Ok(value.unwrap_or_default())
}

/// Labels or annotations as a downward API file has them.
fn lines(map: Option<&BTreeMap<String, String>>) -> String {
    let lines = map
        .into_iter()
        .flatten()
        .map(|(key, value)| format!("{key}={value:?}"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The whole environment of a container: the API server's address, then `envFrom`, then `env` in order.
///
/// # Errors
/// [`Missing`] names the object or key.
pub async fn resolve(
    client: &Client,
    pod: &Pod,
    container: &Container,
    addresses: Addresses,
    api_server: (Ipv4Addr, u16),
) -> Result<BTreeMap<String, String>, Missing> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let mut env = BTreeMap::from([
        (
            "PATH".to_owned(),
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned(),
        ),
        (
            "HOSTNAME".to_owned(),
            pod.metadata.name.clone().unwrap_or_default(),
        ),
        ("KUBERNETES_SERVICE_HOST".to_owned(), api_server.0.to_string()),
        ("KUBERNETES_SERVICE_PORT".to_owned(), api_server.1.to_string()),
        (
            "KUBERNETES_SERVICE_PORT_HTTPS".to_owned(),
            api_server.1.to_string(),
        ),
    ]);
    for source in container.env_from.iter().flatten() {
        let prefix = source.prefix.as_deref().unwrap_or_default();
        let data = if let Some(reference) = &source.config_map_ref {
            config_map(
                client,
                namespace,
                &reference.name,
                reference.optional.unwrap_or(false),
            )
            .await?
        } else if let Some(reference) = &source.secret_ref {
            secret(
                client,
                namespace,
                &reference.name,
                reference.optional.unwrap_or(false),
            )
            .await?
        } else {
            BTreeMap::new()
        };
        for (key, value) in data {
            env.insert(
                format!("{prefix}{key}"),
                String::from_utf8_lossy(&value).into_owned(),
            );
        }
    }
    for variable in container.env.iter().flatten() {
        let value = match (&variable.value, &variable.value_from) {
            (Some(value), _) => Some(expand(value, &env)),
            (None, Some(from)) => {
                if let Some(reference) = &from.field_ref {
                    Some(field(&reference.field_path, pod, addresses)?)
                } else if let Some(reference) = &from.config_map_key_ref {
                    let optional = reference.optional.unwrap_or(false);
                    let data = config_map(client, namespace, &reference.name, optional).await?;
                    key_of(&data, &reference.name, &reference.key, optional)?
                } else if let Some(reference) = &from.secret_key_ref {
                    let optional = reference.optional.unwrap_or(false);
                    let data = secret(client, namespace, &reference.name, optional).await?;
                    key_of(&data, &reference.name, &reference.key, optional)?
                } else {
                    None
                }
            }
            (None, None) => Some(String::new()),
        };
        if let Some(value) = value {
            env.insert(variable.name.clone(), value);
        }
    }
    Ok(env)
}

fn key_of(
    data: &BTreeMap<String, Vec<u8>>,
    name: &str,
    key: &str,
    optional: bool,
) -> Result<Option<String>, Missing> {
    match data.get(key) {
        Some(value) => Ok(Some(String::from_utf8_lossy(value).into_owned())),
        None if optional => Ok(None),
        None => Err(Missing(format!("couldn't find key {key} in {name}"))),
    }
}

/// The content of a ConfigMap; empty when it is missing and optional.
///
/// # Errors
/// When it is missing, or the API server does not answer.
pub async fn config_map(
    client: &Client,
    namespace: &str,
    name: &str,
    optional: bool,
) -> Result<BTreeMap<String, Vec<u8>>, Missing> {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let found = api
        .get_opt(name)
        .await
        .map_err(|error| Missing(error.to_string()))?;
    let Some(map) = found else {
        return absent("configmap", name, optional);
    };
    let text = map
        .data
        .into_iter()
        .flatten()
        .map(|(key, value)| (key, value.into_bytes()));
    let binary = map
        .binary_data
        .into_iter()
        .flatten()
        .map(|(key, value)| (key, value.0));
    Ok(text.chain(binary).collect())
}

/// The content of a Secret; empty when it is missing and optional.
///
/// # Errors
/// When it is missing, or the API server does not answer.
pub async fn secret(
    client: &Client,
    namespace: &str,
    name: &str,
    optional: bool,
) -> Result<BTreeMap<String, Vec<u8>>, Missing> {
    let api: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let found = api
        .get_opt(name)
        .await
        .map_err(|error| Missing(error.to_string()))?;
    let Some(secret) = found else {
        return absent("secret", name, optional);
    };
    Ok(secret
        .data
        .into_iter()
        .flatten()
        .map(|(key, value)| (key, value.0))
        .collect())
}

fn absent(kind: &str, name: &str, optional: bool) -> Result<BTreeMap<String, Vec<u8>>, Missing> {
    if optional {
        Ok(BTreeMap::new())
    } else {
        Err(Missing(format!("{kind} \"{name}\" not found")))
    }
}

/// Replaces `$(NAME)` by its value; unknown names stay, `$$` is a literal `$`.
#[must_use]
pub fn expand(text: &str, env: &BTreeMap<String, String>) -> String {
    let mut expanded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        expanded.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            expanded.push('$');
            rest = after;
        } else if let Some((name, after)) = rest.strip_prefix('(').and_then(|inner| inner.split_once(')')) {
            match env.get(name) {
                Some(value) => expanded.push_str(value),
                None => expanded.push_str(&format!("$({name})")),
            }
            rest = after;
        } else {
            expanded.push('$');
        }
    }
    expanded.push_str(rest);
    expanded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_expand_as_the_kubelet_does_it() {
        let env = BTreeMap::from([("IP".to_owned(), "10.77.1.10".to_owned())]);
        assert_eq!(expand("--listen=$(IP):9410", &env), "--listen=10.77.1.10:9410");
        assert_eq!(expand("$(NO) $$(IP) $ $(IP", &env), "$(NO) $(IP) $ $(IP");
        assert_eq!(expand("$$$(IP)", &env), "$10.77.1.10");
    }

    #[test]
    fn fields_come_from_the_pod_and_its_addresses() {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "p", "uid": "u", "labels": {"a": "b"}}, "spec": {"nodeName": "n", "containers": []},
        }))
        .unwrap();
        let addresses = Addresses {
            pod: Ipv4Addr::new(10, 77, 1, 10),
            host: Ipv4Addr::new(10, 77, 1, 1),
        };
        let read = |path| field(path, &pod, addresses);
        assert_eq!(read("status.podIP").unwrap(), "10.77.1.10");
        assert_eq!(read("spec.nodeName").unwrap(), "n");
        assert_eq!(read("metadata.labels['a']").unwrap(), "b");
        assert!(read("status.qosClass").is_err());
    }
}
