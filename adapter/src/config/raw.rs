//! The file as it is written: every field optional that may be left out, every scalar as the author put it.
//!
//! Invariants: reading this type never checks meaning. Scalars keep their text, so a missing unit becomes a
//! complaint with a cure instead of a type error; unknown fields are found by the loader, with their path.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;

/// A file of kind `AdapterConfig`.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "AdapterConfig", deny_unknown_fields)]
pub struct AdapterConfig {
    /// Always `forewarm.dev/v1alpha1`.
    pub api_version: Option<String>,
    /// Always `AdapterConfig`.
    pub kind: Option<String>,
    /// Where samples come from. Default: the exporters in the adapter's own namespace.
    pub sources: Option<Vec<Source>>,
    /// Custom metrics. Default: the set that the reference lists; `[]` for none.
    pub metrics: Option<Vec<Metric>>,
    /// External metrics. Default: `gpu_health_reason`; `[]` for none.
    pub external: Option<Vec<External>>,
}

/// Where samples come from; exactly one of `scrape`, `prometheus` and `delegate`.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Source", deny_unknown_fields)]
pub struct Source {
    /// Name that metrics refer to.
    pub name: Option<String>,
    /// Targets that the adapter reads itself.
    pub scrape: Option<Scrape>,
    /// A Prometheus server. Not in this version.
    pub prometheus: Option<Prometheus>,
    /// Another metrics adapter. Not in this version.
    pub delegate: Option<Delegate>,
}

/// Targets that the adapter reads itself; exactly one of `discover` and `targets`.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Scrape", deny_unknown_fields)]
pub struct Scrape {
    /// Targets found in the cluster.
    pub discover: Option<Discover>,
    /// A fixed list of targets: `host:port`, or `{address, node}`.
    pub targets: Option<Vec<Target>>,
    /// `http` or `https`. Default: `https` where `tls` is given, else `http`.
    pub scheme: Option<String>,
    /// Path of the exposition. Default `/metrics`.
    pub path: Option<String>,
    /// How certificates are verified and presented.
    pub tls: Option<Tls>,
    /// User and password.
    pub basic_auth: Option<BasicAuth>,
    /// File with a bearer token; re-read when it changes.
    pub bearer_token_file: Option<String>,
    /// Time between two scrapes of a target, 500ms to 60s. Default `2s`.
    pub interval: Option<Scalar>,
    /// Longest time for one scrape, at most the interval. Default `1s`.
    pub timeout: Option<Scalar>,
    /// Largest body, such as `8Mi`. Default `8Mi`.
    pub max_body_bytes: Option<Scalar>,
    /// Most samples in one body. Default 50000.
    pub max_series: Option<Scalar>,
    /// Whether to ask for the needed families only, by `name[]=`. Default: where all of them are Forewarm's.
    pub name_filter: Option<bool>,
}

/// Targets found in the cluster.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Discover", deny_unknown_fields)]
pub struct Discover {
    /// Pods by label.
    pub pods: Option<Pods>,
}

/// Pods by label, in one namespace.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "DiscoverPods", deny_unknown_fields)]
pub struct Pods {
    /// Their namespace. Default: the adapter's own, so that a tenant cannot pose as a target.
    pub namespace: Option<String>,
    /// Label selector.
    pub selector: Option<String>,
    /// Name of the container port.
    pub port: Option<String>,
}

/// A fixed target: `host:port`, or a map of `address` and `node`.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "host:port, or a map of address and node")]
#[schemars(rename = "Target")]
pub enum Target {
    /// `host:port`.
    Address(String),
    /// `address`, and the `node` that it reports about.
    Detailed(BTreeMap<String, String>),
}

/// How certificates are verified and presented.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Tls", deny_unknown_fields)]
pub struct Tls {
    /// Roots to trust, PEM.
    pub ca_file: Option<String>,
    /// Name that the target's certificate must carry. Default: the address.
    pub server_name: Option<String>,
    /// Client certificate, PEM.
    pub cert_file: Option<String>,
    /// Key of the client certificate, PEM.
    pub key_file: Option<String>,
    /// Refused: verification cannot be turned off.
    pub insecure_skip_verify: Option<bool>,
}

/// User and password.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "BasicAuth", deny_unknown_fields)]
pub struct BasicAuth {
    /// User name.
    pub username: Option<String>,
    /// File with the password; re-read when it changes.
    pub password_file: Option<String>,
}

/// A Prometheus server.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Prometheus", deny_unknown_fields)]
pub struct Prometheus {
    /// Base URL.
    pub url: Option<String>,
    /// File with a bearer token.
    pub bearer_token_file: Option<String>,
    /// Longest time for one query.
    pub timeout: Option<Scalar>,
}

/// Another metrics adapter.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Delegate", deny_unknown_fields)]
pub struct Delegate {
    /// `namespace/name` of its Service.
    pub service: Option<String>,
}

/// One custom metric; exactly one of `series` and `ratioOf`.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Metric", deny_unknown_fields)]
pub struct Metric {
    /// Name in the API.
    pub name: Option<String>,
    /// Name of a source.
    pub source: Option<String>,
    /// Family.
    pub series: Option<String>,
    /// One family over another, container by container.
    pub ratio_of: Option<RatioOf>,
    /// Labels that are summed over.
    pub sum: Option<Vec<String>>,
    /// Factor from the series' unit to the metric's. Default 1.
    pub scale: Option<Scalar>,
    /// `pods`, `nodes` or `namespaces`. Default `pods`.
    pub per: Option<Per>,
    /// `ready` or `all`. Default `ready`.
    pub pods: Option<String>,
    /// How containers of a pod on one device become one value: `sum`.
    pub containers: Option<String>,
    /// How devices become one value: `mean`, `max`, `sum` or `min`. Default `mean`.
    pub across_devices: Option<String>,
    /// `device` or `share`. Default `device`.
    pub relative_to: Option<String>,
    /// Smoothing or rate. Default: the newest reading.
    pub window: Option<Window>,
    /// How old a value may be: a time, or one each for `exclusive`, `mig-gpm` and `process`. Default 10s, 10s, 20s.
    pub max_age: Option<MaxAge>,
}

/// What a metric describes.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "pods, nodes or namespaces")]
#[schemars(rename = "Per")]
pub enum Per {
    /// `pods`, `nodes` or `namespaces`.
    Kind(String),
    /// `{resource, via: owner}`. Not in this version.
    Owner(BTreeMap<String, String>),
}

/// One family over another.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "RatioOf", deny_unknown_fields)]
pub struct RatioOf {
    /// Family above the line.
    pub numerator: Option<String>,
    /// Family below the line.
    pub denominator: Option<String>,
}

/// A look back over several readings.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Window", deny_unknown_fields)]
pub struct Window {
    /// How far, 1s to 10m.
    pub length: Option<Scalar>,
    /// `mean`, `max`, `min` or `rate`. Default `mean`.
    pub function: Option<String>,
}

/// How old a value may be.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a time, or a map of exclusive, mig-gpm and process")]
#[schemars(rename = "MaxAge")]
pub enum MaxAge {
    /// The same for all.
    All(Scalar),
    /// By `exclusive`, `mig-gpm` and `process`.
    BySource(BTreeMap<String, Scalar>),
}

/// One external metric.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "External", deny_unknown_fields)]
pub struct External {
    /// Name in the API.
    pub name: Option<String>,
    /// Name of a source.
    pub source: Option<String>,
    /// Family.
    pub series: Option<String>,
    /// Factor from the series' unit to the metric's. Default 1.
    pub scale: Option<Scalar>,
    /// `none`, `only`, `max` or `sum`, after namespace and selector. Default `only`.
    pub reduce: Option<String>,
    /// Who may read it. Default: everybody.
    pub namespaces: Option<Vec<String>>,
    /// Label that must equal the namespace of the request.
    pub namespace_label: Option<String>,
    /// How old a value may be. Default 10s.
    pub max_age: Option<Scalar>,
}

/// A scalar as the author wrote it.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a number or a text such as 2s")]
#[schemars(rename = "Scalar")]
pub enum Scalar {
    /// A whole number.
    Integer(i64),
    /// A number with decimals.
    Float(f64),
    /// Text, such as `2s`.
    Text(String),
}
