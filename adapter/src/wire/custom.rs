//! Lists of custom metric values, v1beta1 and v1beta2.
//!
//! Purpose: one body writer for both versions, which differ in where the metric's name and window sit.
//! Inputs: values of one metric.
//! Invariants: both versions carry the same values.

use bytes::Bytes;
use serde::Serialize;

use super::time::Seconds;
use super::{CUSTOM_KIND, ListMeta, window_seconds};
use crate::provider::{CustomValue, ObjectRef};

/// Served versions of `custom.metrics.k8s.io`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CustomVersion {
    /// Flat metric name.
    V1Beta1,
    /// Metric identifier as an object; what HPA prefers where both are registered.
    V1Beta2,
}

impl CustomVersion {
    /// All, the preferred first.
    pub const ALL: [Self; 2] = [Self::V1Beta2, Self::V1Beta1];

    /// As in the URL.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V1Beta1 => "v1beta1",
            Self::V1Beta2 => "v1beta2",
        }
    }

    const fn api_version(self) -> &'static str {
        match self {
            Self::V1Beta1 => "custom.metrics.k8s.io/v1beta1",
            Self::V1Beta2 => "custom.metrics.k8s.io/v1beta2",
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct List<I: Serialize> {
    kind: &'static str,
    api_version: &'static str,
    metadata: ListMeta,
    items: Vec<I>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DescribedObject<'a> {
    kind: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<&'a str>,
    name: &'a str,
    api_version: &'a str,
}

impl<'a> From<&'a ObjectRef> for DescribedObject<'a> {
    fn from(object: &'a ObjectRef) -> Self {
        Self {
            kind: &object.kind,
            namespace: object.namespace.as_deref(),
            name: &object.name,
            api_version: &object.api_version,
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ItemV1Beta1<'a> {
    described_object: DescribedObject<'a>,
    metric_name: &'a str,
    timestamp: Seconds,
    #[serde(skip_serializing_if = "Option::is_none")]
    window: Option<u64>,
    value: String,
    selector: Option<()>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ItemV1Beta2<'a> {
    described_object: DescribedObject<'a>,
    metric: MetricIdentifier<'a>,
    timestamp: Seconds,
    #[serde(skip_serializing_if = "Option::is_none")]
    window_seconds: Option<u64>,
    value: String,
}

#[derive(Serialize)]
struct MetricIdentifier<'a> {
    name: &'a str,
    selector: Option<()>,
}

/// The body of an answer with `values` of `metric`.
#[must_use]
pub fn custom_list(version: CustomVersion, metric: &str, values: &[CustomValue]) -> Bytes {
    let body = match version {
        CustomVersion::V1Beta1 => write(version, values, |value| ItemV1Beta1 {
            described_object: (&value.object).into(),
            metric_name: metric,
            timestamp: Seconds(value.measured_at),
            window: window_seconds(value.window),
            value: value.value.to_string(),
            selector: None,
        }),
        CustomVersion::V1Beta2 => write(version, values, |value| ItemV1Beta2 {
            described_object: (&value.object).into(),
            metric: MetricIdentifier {
                name: metric,
                selector: None,
            },
            timestamp: Seconds(value.measured_at),
            window_seconds: window_seconds(value.window),
            value: value.value.to_string(),
        }),
    };
    body.into()
}

fn write<'a, I: Serialize>(
    version: CustomVersion,
    values: &'a [CustomValue],
    item: impl Fn(&'a CustomValue) -> I,
) -> Vec<u8> {
    let list = List {
        kind: CUSTOM_KIND,
        api_version: version.api_version(),
        metadata: ListMeta {},
        items: values.iter().map(item).collect(),
    };
    // Strings and integers always serialise.
    serde_json::to_vec(&list).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantity::Quantity;
    use proptest::prelude::*;
    use std::time::{Duration, SystemTime, UNIX_EPOCH};

    fn pod(name: &str, millis: i64, at: SystemTime, window: Option<Duration>) -> CustomValue {
        CustomValue {
            object: ObjectRef {
                kind: "Pod".into(),
                api_version: "v1".into(),
                namespace: Some("serving".into()),
                name: name.into(),
            },
            value: Quantity::from_millis(millis),
            measured_at: at,
            window,
        }
    }

    fn sample() -> Vec<CustomValue> {
        let at = UNIX_EPOCH + Duration::from_millis(1_790_000_000_900);
        let mut node = pod("gpu-7", 42_000, at, None);
        node.object.kind = "Node".into();
        node.object.namespace = None;
        vec![pod("llm-0", 85_250, at, Some(Duration::from_secs(15))), node]
    }

    #[test]
    fn v1beta1_has_a_flat_name_and_a_window() {
        let body: serde_json::Value = serde_json::from_slice(&custom_list(
            CustomVersion::V1Beta1,
            "gpu_busy_percent",
            &sample(),
        ))
        .unwrap();
        insta::assert_snapshot!(serde_json::to_string_pretty(&body).unwrap());
    }

    #[test]
    fn v1beta2_has_a_metric_object_and_window_seconds() {
        let body: serde_json::Value = serde_json::from_slice(&custom_list(
            CustomVersion::V1Beta2,
            "gpu_busy_percent",
            &sample(),
        ))
        .unwrap();
        insta::assert_snapshot!(serde_json::to_string_pretty(&body).unwrap());
    }

    #[test]
    fn no_values_are_an_empty_list_and_not_null() {
        for version in CustomVersion::ALL {
            let body = custom_list(version, "m", &[]);
            assert!(std::str::from_utf8(&body).unwrap().contains("\"items\":[]"));
        }
    }

    proptest! {
        #[test]
        fn both_versions_carry_the_same_values(
            rows in proptest::collection::vec(
                ("[a-z0-9.-]{1,20}", any::<i64>(), 0_u64..4_000_000_000, proptest::option::of(0_u64..100_000)),
                0..20,
            ),
            metric in "[a-z_:]{1,20}",
        ) {
            let values: Vec<_> = rows
                .iter()
                .map(|(name, millis, at, window)| {
                    pod(name, *millis, UNIX_EPOCH + Duration::from_secs(*at), window.map(Duration::from_millis))
                })
                .collect();
            let read = |version| -> serde_json::Value {
                serde_json::from_slice(&custom_list(version, &metric, &values)).unwrap()
            };
            let (one, two) = (read(CustomVersion::V1Beta1), read(CustomVersion::V1Beta2));
            prop_assert_eq!(&one["apiVersion"], "custom.metrics.k8s.io/v1beta1");
            prop_assert_eq!(&two["apiVersion"], "custom.metrics.k8s.io/v1beta2");
            let (one, two) = (one["items"].as_array().unwrap(), two["items"].as_array().unwrap());
            prop_assert_eq!(one.len(), values.len());
            prop_assert_eq!(two.len(), values.len());
            for ((one, two), value) in one.iter().zip(two).zip(&values) {
                prop_assert_eq!(&one["describedObject"], &two["describedObject"]);
                prop_assert_eq!(&one["timestamp"], &two["timestamp"]);
                prop_assert_eq!(&one["value"], &two["value"]);
                prop_assert_eq!(one["value"].as_str().unwrap(), value.value.to_string());
                prop_assert_eq!(&one["metricName"], &two["metric"]["name"]);
                prop_assert_eq!(one.get("window"), two.get("windowSeconds"));
                prop_assert_eq!(one.get("window").is_some(), value.window.is_some());
            }
        }
    }
}
